"""The plain-text report of a prediction: verdict, tables that add up, levers, assumptions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from foretrain.analysis.events import bottleneck_shares, event_shares, naive_baseline
from foretrain.analysis.lever import Lever
from foretrain.report.tables import parts_table, round_to_sum, table
from foretrain.report.words import (
    fit_word,
    gib,
    mfu_lines,
    misfit_word,
    moment_words,
    number,
    percent,
    place,
    plural,
    rank_ranges,
    rate_band,
    throughput,
    time_band,
    verdict,
)
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result, TimeParts
from foretrain.units import GIB, format_count, format_seconds

WIDTH = 100
TOP_EVENTS = 8
#: Ranks that idle this share of the step more than the busiest ones: the report names those.
WAITS_FOR = 0.1


def render(
    result: Result, run: RunSpec, levers: Sequence[Lever] = (), budget: Sequence[str] = ()
) -> str:
    """Returns the report as plain ASCII text; its first line answers the question in words.

    Order: verdict, run, throughput triple with MFU, `budget` (report/tokens.py), time table, memory
    table, stages (pp > 1), top events, levers, assumptions, warnings, provenance. The columns of
    both tables add up as printed (largest remainder rounding).
    """
    sections = [
        [verdict(result, run)],
        [run_line(run), *_headline(result, run)],
        list(budget),
        _time_section(result),
        _memory_section(result),
        _stage_section(result),
        _event_section(result),
        lever_lines(levers),
        _bullets("Assumptions", result.assumptions),
        _bullets("Warnings", result.warnings),
        _provenance(result),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def run_line(run: RunSpec) -> str:
    """Returns the run in one line: model, length, precision, degrees, cluster, stack."""
    training = run.training
    words = [run.model.name]
    if training.sequence is not None:
        words.append(f"sequence {training.sequence}")
    if training.target_sequence is not None:
        words.append(f"target {training.target_sequence}")
    if training.image is not None:
        words.append(f"image {training.image}")
    words += [training.precision, plan_words(run), f"stack {run.stack.name}"]
    return f"{', '.join(words)}\non {run.cluster.text}"


def plan_words(run: RunSpec) -> str:
    """Returns the degrees and choices of the plan that differ from 'nothing', e.g. 'tp 8 pp 2'."""
    plan = run.plan
    words = [plan.preset]
    for name in ("tp", "pp", "dp", "cp", "ep", "etp", "shard", "interleave"):
        value = getattr(plan, name)
        if value is not None and (value != 1 or name == "tp"):
            words.append(f"{name} {value}")
    if plan.zero is not None:
        words.append(f"zero {plan.zero}")
    if plan.schedule and plan.pp > 1:
        words.append(plan.schedule)
    if plan.sequence_parallel and plan.tp > 1:
        words.append("sequence parallel")
    if plan.recompute.mode != "none":
        words.append(f"{plan.recompute.mode} recompute")
    return " ".join(words)


def _headline(result: Result, run: RunSpec) -> list[str]:
    step = result.step_time_s
    rate, unit = throughput(result, run.cluster.world_size)
    training = run.training
    batch = plural(training.global_batch, "sample")
    if result.tokens_per_s is not None:
        batch += f" = {format_count(result.tokens_per_s * step.value)} tokens"
    per_step = f"microbatch {training.microbatch}"
    if run.plan.dp:
        per_step += f", accumulation {training.accumulation(run.plan.dp)}"
    rows = [
        (unit, rate_band(rate, step)),
        ("step time", f"{time_band(step)}, 90 % band"),
        ("global batch", f"{batch} ({per_step})"),
    ]
    if result.tokens_per_s is not None:
        rows.append(("tokens/s", f"{number(result.tokens_per_s)} over the whole job"))
    rows.append((f"{result.sample_word}/s", number(result.samples_per_s)))
    rows += mfu_lines(result, run)
    return _wrap_rows(rows)


def _wrap_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns two-column lines whose second column wraps at `WIDTH`."""
    width = max(len(name) for name, _ in rows)
    lines: list[str] = []
    for name, text in rows:
        lead = f"  {name.ljust(width)}  "
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
            break_on_hyphens=False,
        )
    return lines


_EXPOSED = {"copy": "exposed copies to the host"}


def time_rows(parts: TimeParts) -> list[tuple[str, float]]:
    """Returns the time parts in seconds under their printed names; they sum to the step."""
    return [
        ("compute", parts.compute),
        ("recompute", parts.recompute),
        ("optimizer", parts.optimizer),
        *(
            (_EXPOSED.get(axis, f"exposed {axis} communication"), seconds)
            for axis, seconds in parts.exposed_communication.items()
        ),
        ("pipeline bubble", parts.bubble),
        ("host", parts.host),
        ("waiting for others", parts.wait),
        ("other", parts.other),
    ]


def _time_section(result: Result) -> list[str]:
    step = result.step_time_s.value
    scale, unit = (1.0, "s") if step >= 10 else (1e-3, "ms")
    rows = [(name, seconds / scale) for name, seconds in time_rows(result.time_parts)]
    last = result.classes[result.last_class]
    who = f" ({last.name}, which finishes last)" if len(result.classes) > 1 else ""
    base = naive_baseline(result)
    shares = ", ".join(f"{name} {share}" for name, share in _shares(bottleneck_shares(result)))
    notes = [
        f"Bound by: {shares}.",
        f"Adding up kernels instead: {format_seconds(base.perfect_overlap_s)} if all else hid "
        f"behind the longest stream, {format_seconds(base.no_overlap_s)} if nothing overlapped.",
    ]
    busiest = _waits_least(result)
    if busiest:
        notes.append(busiest)
    if run_has_pipeline(result):
        notes.append(f"Pipeline bubble, mean over stages: {percent(result.bubble_fraction)}.")
    lines = parts_table(rows, unit=unit, total_name="step")
    return [f"Where the step goes{who}", *lines, *_wrapped(notes)]


def _waits_least(result: Result) -> str:
    """Returns what holds up all others, where the ranks shown mostly wait for some that do not."""
    step = result.step_time_s.value

    def idle(parts: TimeParts) -> float:
        return (parts.bubble + parts.wait) / step

    least = min(result.classes, key=lambda rank_class: idle(rank_class.parts))
    if idle(result.time_parts) - idle(least.parts) < WAITS_FOR:
        return ""
    rows = {name: seconds / step for name, seconds in time_rows(least.parts) if seconds > 0.0}
    largest = sorted(rows, key=lambda name: -rows[name])[:3]
    words = ", ".join(f"{name} {percent(rows[name])}" for name in largest)
    return f"The others wait for {least.name}: {words} of the step."


def run_has_pipeline(result: Result) -> bool:
    """Returns whether the job has more than one pipeline stage."""
    return len({rank_class.stage for rank_class in result.classes}) > 1


def _shares(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns shares in %, rounded so that they add up to 100, without zeros, largest first."""
    rounded = round_to_sum([100 * share for share in shares.values()], 1)
    pairs = sorted(zip(shares, rounded, strict=True), key=lambda pair: -pair[1])
    return [(name, f"{value:.1f}%") for name, value in pairs if value]


def _memory_section(result: Result) -> list[str]:
    memory = result.memory
    rows = [(name.replace("_", " "), num / GIB) for name, num in memory.parts_bytes.items()]
    where = place(result, memory.worst_rank)
    moment = moment_words(result)
    seen = [
        ("allocated", gib(memory.peak_allocated_bytes), "torch.cuda.max_memory_allocated()"),
        ("reserved", gib(memory.peak_reserved_bytes), "torch.cuda.max_memory_reserved()"),
        ("device used", gib(memory.device_used_bytes), "nvidia-smi (context and libraries too)"),
        (
            "usable",
            gib(memory.usable_bytes),
            f"of {gib(memory.capacity_bytes)} on the device: {fit_word(result)}",
        ),
    ]
    if memory.band > 1.0:
        low, high = memory.device_used_bytes / memory.band, memory.device_used_bytes * memory.band
        seen.insert(3, ("90 % band", f"{gib(low)}", f"to {gib(high)} of device used"))
    if memory.host_used_bytes:
        size = memory.host_capacity_bytes
        note = "offloaded, each node" + ("" if size is None else f" of {gib(size)}")
        seen.append(("host memory", gib(memory.host_used_bytes), note))
    return [
        f"Memory of the fullest GPU: {where}" + (f", at its peak: {moment}" if moment else ""),
        *parts_table(rows, unit="GiB", total_name="device used", decimals=2),
        "  What you will see where:",
        *table(seen, left=(0, 2), indent="    "),
    ]


def _stage_section(result: Result) -> list[str]:
    if len(result.classes) < 2:
        return []
    head = ("", "ranks", "busy", "exposed", "bubble", "other idle", "peak allocated")
    rows: list[tuple[str, ...]] = []
    for rank_class in result.classes:
        parts = rank_class.parts
        seconds = (
            parts.compute + parts.recompute + parts.optimizer,
            sum(parts.exposed_communication.values()),
            parts.bubble,
            parts.host + parts.wait + parts.other,
        )
        times = (format_seconds(value) for value in seconds)
        ranks, peak = rank_ranges(rank_class.ranks), gib(rank_class.peak_allocated_bytes)
        rows.append((rank_class.name, ranks, *times, peak))
    several = len({rank_class.stage for rank_class in result.classes}) > 1
    word = "Stages" if several else "Ranks by their tables"
    return [
        f"{word} (busy + exposed communication + bubble + other idle = step)",
        *table([head, *rows], left=(0, 1)),
    ]


def _event_section(result: Result) -> list[str]:
    shares = event_shares(result)
    if not shares:
        return []
    rows: list[tuple[str, ...]] = [("event", "times", "each", "%", "from")]
    for row in shares[:TOP_EVENTS]:
        each, cost = format_seconds(row.cost.value_s), row.cost
        rows.append(
            (cost.label, f"{cost.count:,}", each, f"{100 * row.share:.1f}", cost.provenance)
        )
    rest = 1.0 - sum(row.share for row in shares[:TOP_EVENTS])
    if len(shares) > TOP_EVENTS:
        others = len(shares) - TOP_EVENTS
        rows.append((f"{plural(others, 'other event')}", "", "", f"{100 * rest:.1f}"))
    title = f"Where the time goes: {plural(len(shares), 'distinct event')}, % of their summed time"
    return [title, *table(rows, left=(0, 4))]


def lever_lines(levers: Sequence[Lever]) -> list[str]:
    """Returns the levers as numbered lines: what to change, step time, throughput, memory."""
    if not levers:
        return []
    rows: list[tuple[str, ...]] = []
    for i, lever in enumerate(levers, start=1):
        before, after = format_seconds(lever.step_before_s), format_seconds(lever.step_after_s)
        used = f"{gib(lever.memory_before_bytes)} -> {gib(lever.memory_after_bytes)}"
        fit = ""
        if lever.fits_after != lever.fits_before:
            fit = "fits" if lever.fits_after else misfit_word(lever.missing_after_bytes)
        elif not lever.fits_after:
            fit = f"still {misfit_word(lever.missing_after_bytes)}"
        gain = f"{100 * lever.gain:+.1f} % throughput"
        rows.append((f"{i}. {lever.title}", f"step {before} -> {after}", gain, used, fit))
    return ["What would change most (each alone)", *table(rows, left=(0, 1, 4))]


def _bullets(title: str, items: Sequence[str]) -> list[str]:
    return [title, *_wrapped([f"- {item}" for item in items])] if items else []


def _wrapped(items: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for item in items:
        more = "    " if item.startswith("- ") else "  "
        lines += textwrap.wrap(
            item, WIDTH, initial_indent="  ", subsequent_indent=more, break_on_hyphens=False
        )
    return lines


def _provenance(result: Result) -> list[str]:
    shares = ", ".join(f"{name} {share}" for name, share in _shares(result.provenance))
    if not shares:
        return []
    return textwrap.wrap(f"Constants behind the event times: {shares}.", WIDTH)
