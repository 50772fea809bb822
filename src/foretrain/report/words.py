"""Words for numbers: bands, ranks, verdicts, formulas. Everything is plain ASCII."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.frontends.spec import ConvSpec
from foretrain.graph.precision import LOW
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Band, ClassResult, MemoryResult, Result
from foretrain.units import GIB, format_seconds

#: A run that fits with less than this share of the usable memory to spare is called tight: two
#: allocator segments or one longer sample more, and it is over.
TIGHT_SHARE = 0.05


def number(value: float) -> str:
    """Returns a number with three significant digits and thousands separators, e.g. '12,300'."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:.3g}"


def gib(num_bytes: float) -> str:
    """Returns bytes as GiB with one decimal (two below 10 GiB), e.g. '61.3 GiB'."""
    value = num_bytes / GIB
    return f"{value:.1f} GiB" if abs(value) >= 10 else f"{value:.2f} GiB"


def percent(fraction: float) -> str:
    """Returns a fraction as per cent with one decimal, e.g. '41.3 %'."""
    return f"{100 * fraction:.1f} %"


def plural(count: int, noun: str) -> str:
    """Returns '1 rank' or '8 ranks'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def time_band(band: Band) -> str:
    """Returns a time with its 90 % band, e.g. '13.8 s (12.6 s to 14.9 s)'."""
    low, high = format_seconds(band.low), format_seconds(band.high)
    return f"{format_seconds(band.value)} ({low} to {high})"


def rate_band(rate: float, step: Band) -> str:
    """Returns a rate with the band that the band of the step time implies."""
    return f"{number(rate)} ({' to '.join(number(r) for r in rate_limits(rate, step))})"


def rate_limits(rate: float, step: Band) -> tuple[float, float]:
    """Returns the low and high end of a rate: work per step over the high and low step time."""
    return rate * step.value / step.high, rate * step.value / step.low


def throughput(result: Result, devices: int) -> tuple[float, str]:
    """Returns the rate that people compare and its unit: tokens, images or samples/s/GPU."""
    if result.tokens_per_s_per_device is not None:
        return result.tokens_per_s_per_device, "tok/s/GPU"
    return result.samples_per_s / devices, f"{result.sample_word}/s/GPU"


def rank_ranges(ranks: Sequence[int]) -> str:
    """Returns ranks as ranges, e.g. '0-7', '0-7,16-23' or '0-56 step 8'; long lists are cut."""
    runs = _runs(sorted(ranks))
    if len(runs) > 4 and len(ranks) > 2:
        steps = {b - a for a, b in zip(sorted(ranks), sorted(ranks)[1:], strict=False)}
        if len(steps) == 1:
            return f"{min(ranks)}-{max(ranks)} step {steps.pop()}"
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:4]]
    return ",".join(words) + (",..." if len(runs) > 4 else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks with their word, e.g. 'rank 3' or 'ranks 0-31'."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_ranges(ranks)}"


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def class_of(result: Result, rank: int) -> ClassResult:
    """Returns the rank class that holds `rank` (the last-finishing one if none does)."""
    for rank_class in result.classes:
        if rank in rank_class.ranks:
            return rank_class
    return result.classes[result.last_class]


def place(result: Result, rank: int) -> str:
    """Returns where the worst rank sits, e.g. 'stage 0 (ranks 0-7)' or 'every rank'."""
    if len(result.classes) == 1:
        return "every rank"
    rank_class = class_of(result, rank)
    return f"{rank_class.name} ({ranks_text(rank_class.ranks)})"


def is_tight(memory: MemoryResult) -> bool:
    """Returns whether a run that fits has less than 5 % of the usable memory to spare."""
    spare = memory.usable_bytes - memory.device_used_bytes
    return 0 <= spare < TIGHT_SHARE * memory.usable_bytes


def fit_word(result: Result) -> str:
    """Returns 'fits', 'tight' or 'does not fit by 4.50 GiB'."""
    if not result.fits:
        return misfit_word(result.memory.missing_bytes)
    return "tight" if is_tight(result.memory) else "fits"


def misfit_word(missing: float) -> str:
    """Returns the one wording of a run that does not fit, with the bytes that it lacks."""
    return f"does not fit by {gib(missing)}"


def misfit_words(result: Result) -> str:
    """Returns by how much a run does not fit, where and when, as a clause without its subject."""
    memory = result.memory
    word = misfit_word(memory.missing_bytes)
    if not memory.host_fits:
        need, have = gib(memory.host_used_bytes), gib(memory.host_capacity_bytes or 0.0)
        return f"{word}: each node needs {need} of host memory and has {have}"
    moment = moment_words(result)
    return f"{word}: {used_words(result)}{f' in {moment}' if moment else ''}"


def used_words(result: Result) -> str:
    """Returns what the fullest rank uses: 'every rank uses 61.3 GiB of 79.2 GiB GPU memory'."""
    memory = result.memory
    used = f"{gib(memory.device_used_bytes)} of {gib(memory.usable_bytes)} GPU memory"
    return f"{place(result, memory.worst_rank)} uses {used}"


def verdict(result: Result, run: RunSpec) -> str:
    """Returns the first line: fits or not and by how much, and the throughput with its band."""
    memory = result.memory
    rate, unit = throughput(result, run.cluster.world_size)
    low, high = (number(r) for r in rate_limits(rate, result.step_time_s))
    speed = f"{number(rate)} {unit} (90 % band {low} to {high})"
    if not result.fits:
        words = misfit_words(result)
        return f"{words[0].upper()}{words[1:]}. If it did: {speed}."
    gap = gib(memory.usable_bytes - memory.device_used_bytes)
    word = "Fits, but it is tight" if is_tight(memory) else "Fits"
    return f"{word}: {used_words(result)}, {gap} to spare. Expect {speed}."


def moment_words(result: Result) -> str:
    """Returns when the fullest rank is fullest, without the stage (`place` names it)."""
    memory = result.memory
    return memory.moment.removeprefix(f"stage {class_of(result, memory.worst_rank).stage}, ")


def flop(value: float) -> str:
    """Returns a FLOP count with a unit prefix, e.g. '139 PFLOP'."""
    for scale, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}FLOP"
    return f"{value:.4g} FLOP"


def model_flops_formula(result: Result) -> str:
    """Returns how the model FLOP of a step are counted, in words (docs/explain/flops.md)."""
    full = result.model_flops_full_attention
    text = (
        f"{flop(result.model_flops_per_step)} per step: forward + backward of all "
        "samples, multiply-add = 2, no recompute"
    )
    if full > 1.0005 * result.model_flops_per_step:
        text += (
            f", causal attention counted half ({flop(full)} with full attention, as Megatron "
            "tables count)"
        )
    return text


def mfu_lines(result: Result, run: RunSpec) -> list[tuple[str, str]]:
    """Returns (name, text) lines for MFU, HFU when it differs, and what makes them ambiguous."""
    devices = run.cluster.world_size
    peak = f"{result.peak_flops_per_device / 1e12:,.4g} TFLOP/s dense {result.peak_dtype}"
    base = f"/ (step x {plural(devices, 'GPU')} x {peak})"
    lines = [("MFU", f"{percent(result.mfu)} = model FLOP {base}")]
    if abs(result.hfu - result.mfu) > 5e-4:
        lines.append(("HFU", f"{percent(result.hfu)} = the same with recomputed FLOP counted"))
    per_device = result.model_flops_per_step / result.step_time_s.value / devices
    lines.append(("", f"{per_device / 1e12:.4g} TFLOP/s/GPU; {model_flops_formula(result)}"))
    lines.extend(_ambiguity(result, run, per_device))
    return lines


def _ambiguity(result: Result, run: RunSpec, per_device: float) -> list[tuple[str, str]]:
    """Returns what makes the rate above ambiguous.

    Above 100 %: fast convolutions; over the peak of a low precision: the rate over that of bf16.
    """
    if result.mfu > 1.0 and isinstance(run.model, ConvSpec):
        return [("", "above 100 %: Winograd convolutions multiply less than the FLOP counted")]
    if result.peak_dtype not in LOW:
        return []
    if not run.cluster.device.supports("bf16"):
        return []
    peak = run.cluster.device.peak("bf16")
    return [
        (
            "",
            f"{percent(per_device / peak)} over the bf16 peak ({peak / 1e12:,.4g} TFLOP/s): only "
            f"the matrix products run in {result.peak_dtype}, so neither number is the whole truth",
        )
    ]
