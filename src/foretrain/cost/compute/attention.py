"""Fused attention: query tiles over the SMs against the span of keys that a tile sees.

    w    = H ceil(s_q/tile) / SM           H = batch x query heads
    W    = max(a, q ceil(w) + (1 - q) w)
    L    = s_kv | min(s_kv, roundup(window + tile, 128)) where the kernel skips what it masks
    span = L + k0 | L - (L - tile) L / (2 s_kv) + k0 causal: tile i sees i tile keys, and L at most
    t_c  = max(W tile f span, a tile f (L + k0)) SM / (P e_D d)          f = 2 d_qk + 2 d_v
    d    = (1 + F / (P 1 ms)) ** -p        long kernels run at a lower clock; F: FLOP of the event
    t_m  = batch bytes(q, k, v, o) / (B e_b)
    T    = t0 + max(t_c, t_m) + g min(t_c, t_m) + batch s_q token_bytes / (B copy_share)

The second term of t_c is the longest row of one head, which cannot be split; a is the time of a
lone tile over its share of a full SM, which holds several. token_bytes: what an engine moves of
every token's latent to its cache before the kernel, once for all heads. Backward recomputes
the scores: f is 2.5 times as large. Where its own constants are not known it takes 2.5 / rho times
the forward time. Constants by device and kernel, within a kernel by case (causal, full, window,
backward, FP8), and within a case by head_dim where enough was measured (a kernel is compiled for
each, with a tile of its own): catalog/calibration/attention.toml, attention_fitted.toml, which
studies/costs/attention.py writes from tables of operators, and attention_published.toml, which
attention_published.py writes from published benchmarks. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.compute.features import attention_features
from foretrain.cost.machine import Machine
from foretrain.cost.residual import Beyond, nothing_beyond, residual_of, said
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent

Array = NDArray[np.float64]
#: Rows of queries that a thread block takes, where an entry does not say.
TILE = 128.0
#: Sequence from which the narrower interval holds.
LONG = 2048.0
BACKWARD_FLOPS = 2.5
#: Cases with constants of their own -> cases whose constants stand in before the entry's own.
#: A window is a causal mask that sees less.
STAND_IN: Mapping[str, tuple[str, ...]] = {
    "full_backward": ("causal_backward",),
    "window_backward": ("causal_backward",),
}
LOW_PRECISION = ("fp8", "mxfp8", "nvfp4")
#: Columns of a shape; which of them is another where it is 0; which of them may be 0.
SHAPE = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v", "causal",
         "window")  # fmt: skip
LIKE: Mapping[str, str] = {"seq_kv": "seq_q", "kv_heads": "heads", "head_dim_v": "head_dim"}
MASKS = ("causal", "window")


def head_efficiency(table: Mapping[str, float], head_dim: Array) -> Array:
    """Returns the share of the peak for each head_dim, interpolated over log2, clamped outside."""
    known = sorted((float(dim), float(value)) for dim, value in table.items())
    xs = np.log2([dim for dim, _ in known])
    return np.interp(np.log2(np.maximum(head_dim, 1.0)), xs, [value for _, value in known])


def attention_seconds(
    shape: Mapping[str, Array],
    *,
    peak: float,
    bandwidth: float,
    sms: int,
    constants: Mapping[str, Any],
    element_bytes: float = 2.0,
    work: float = 1.0,
) -> Array:
    """Returns the seconds of fused attention.

    Args:
        shape: arrays batch seq_q seq_kv heads kv_heads head_dim head_dim_v causal window.
        peak: FLOP/s of the dtype.
        bandwidth: bytes/s of device memory.
        sms: number of streaming multiprocessors.
        constants: an entry of the calibration, or one of its cases.
        element_bytes: bytes of one element of q, k, v and the output.
        work: FLOP and bytes over those of forward.
    """
    k0, q, alone = (float(constants.get(name, 1.0)) for name in ("k0", "q", "a"))
    tile, skips = float(constants.get("tile", TILE)), bool(constants.get("skips", True))
    s_q, s_kv, window = shape["seq_q"], shape["seq_kv"], shape["window"]
    heads = shape["batch"] * shape["heads"]
    per_pair = work * (2.0 * shape["head_dim"] + 2.0 * shape["head_dim_v"])
    seen = np.where(window > 0, np.minimum(s_kv, np.ceil((window + tile) / 128) * 128), s_kv)
    causal = shape["causal"] > 0
    longest = seen if skips else s_kv
    later = np.maximum(longest - tile, 0.0) * longest / (2.0 * s_kv)
    span = np.where(causal, longest - later, longest) + k0
    waves = heads * np.ceil(s_q / tile) / sms
    rounds = np.maximum(alone, q * np.ceil(waves) + (1.0 - q) * waves)
    items = np.maximum(rounds * span, alone * (longest + k0)) * tile * per_pair
    useful = heads * s_q * per_pair * np.where(causal, longest - longest**2 / (2.0 * s_kv), longest)
    clock = (1.0 + useful / (peak * 1e-3)) ** -float(constants.get("p", 0.0))
    compute = items * sms / (peak * head_efficiency(constants["e"], shape["head_dim"]) * clock)
    rows = s_q * shape["heads"] * (shape["head_dim"] + shape["head_dim_v"])
    rows = rows + s_kv * shape["kv_heads"] * (shape["head_dim"] + shape["head_dim_v"])
    moved = work * element_bytes * shape["batch"] * rows
    memory = moved / (bandwidth * float(constants["e_b"]))
    low, high = np.minimum(compute, memory), np.maximum(compute, memory)
    latents = shape["batch"] * s_q * float(constants.get("token_bytes", 0.0))
    beside = latents / (bandwidth * float(load("attention")["rules"]["copy_share"]))
    return float(constants["t0_us"]) * 1e-6 + high + float(constants["g"]) * low + beside


def entries(kernel: str) -> list[Mapping[str, Any]]:
    """Returns the entries of a kernel: of its name, or of a name that a table gives it."""
    return [
        entry
        for table in ("attention_fitted", "attention_published", "attention")
        for entry in load(table)["entry"]
        if entry["kernel"] == kernel or kernel in entry.get("names", ())
    ]


def constants_for(machine: Machine) -> tuple[Constants, str]:
    """Returns the attention constants of the device, and the kernel that they belong to.

    A kernel without constants on the device is replaced as [fallback] of attention.toml says, and
    the interval is that of a generation default.
    """
    table = load("attention")
    wanted = machine.stack.attention_kernel
    kernels = (wanted, *table["fallback"].get(wanted, ("flash2",)))
    for kernel in kernels:
        found = find(entries(kernel), machine.device)
        if found is not None and found.row != "other":
            break
    else:
        found, kernel = find(table["entry"], machine.device), "flash2"
    if found is None:
        raise InternalError("attention.toml has no default entry")
    if kernel != wanted and found.row in ("measured", "fitted"):
        found = Constants(values=found.values, provenance="guess", row="generation")
    return found, kernel


def head_name(head_dim: float, head_dim_v: float) -> str:
    """Returns the name of constants of one head_dim: "128", or "192x128" where values differ."""
    return f"{head_dim:g}" if head_dim == head_dim_v else f"{head_dim:g}x{head_dim_v:g}"


def table_name(case: str, head: str, constants: Mapping[str, Any]) -> str:
    """Returns the name of the table of a case: of a head_dim of few numbers of heads, its own.

    What is measured of others says little of where its residual holds.
    """
    return f"{case} {head}" if "heads" in constants else case


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `attention` events, forward or backward."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, event in enumerate(events):
        kinds.setdefault((event.dtype, event.direction), []).append(i)
    answers: dict[int, Answer] = {}
    for (dtype, direction), indices in kinds.items():
        shapes = [dict(events[i].shape) for i in indices]
        columns = {name: np.array([s.get(name, 0.0) for s in shapes]) for name in SHAPE}
        for part in column_times(columns, dtype, direction, machine):
            for i, row in enumerate(part.where):
                answers[indices[row]] = _answer(part, i, direction)
    return [answers[i] for i in range(len(events))]


def _answer(part: Part, i: int, direction: str) -> Answer:
    backward, kernel = direction != "forward", part.kernel
    return Answer(
        value_s=float(part.seconds[i]),
        latency_s=min(float(kernel.constants["t0_us"]) * 1e-6, float(part.seconds[i])),
        factor=float(part.factor[i]),
        kernels=2.0 if backward else 1.0,
        family="attention",
        provenance=kernel.found.provenance,
        formula=part.formula + said(float(part.beyond[i])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The constants of one case and head_dim.

    `ratio` is the time over what they give (backward from forward, FP8 from 16 bits), and `own`
    whether the case itself was measured. `measured`: the table they were fitted to (`table_name`),
    "" where they stand in for another dtype.
    """

    found: Constants
    name: str
    constants: Mapping[str, Any]
    ratio: float
    own: bool
    measured: str


def kernel_for(case: str, head: str, machine: Machine) -> Kernel:
    """Returns the constants of a case and head_dim.

    Args:
        case: causal, full or window, and _fp8, and _backward.
        head: as `head_name` says.
        machine: the device, and the stack that names the kernel.
    """
    found, name = constants_for(machine)
    backward, low = case.endswith("_backward"), "_fp8" in case
    plain = case.replace("_fp8", "")
    ratio, own = 1.0, found.values
    for word in (case, plain, *STAND_IN.get(plain, ())):
        if word in found.values:
            own = found.values[word]
            break
    else:
        word = plain.removesuffix("_backward")
        own = found.values.get(word, own)
        ratio = BACKWARD_FLOPS / found.number("rho") if backward else 1.0
    if low and "_fp8" not in word:
        ratio /= float(load("attention")["rules"]["fp8_gain"])
    own_case = not backward or word.endswith("_backward")
    table = case if own_case else case.removesuffix("_backward")
    constants = {**own, **own.get("dim", {}).get(head, {})}
    return Kernel(
        found=found,
        name=name,
        constants=constants,
        ratio=ratio,
        own=own_case,
        measured="" if low and "_fp8" not in word else table_name(table, head, constants),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Times of the rows `where` of a table, which have one case and head_dim.

    `beyond`: what the residual of the entry made of the formula's seconds.
    """

    where: NDArray[np.intp]
    kernel: Kernel
    seconds: Array
    beyond: Array
    factor: Array
    formula: str


def column_times(
    columns: Mapping[str, Array], dtype: str, direction: str, machine: Machine
) -> list[Part]:
    """Returns the times of attention of one dtype and direction; columns of SHAPE, 0 = default."""
    shape = {name: columns[name] for name in SHAPE}
    for name, same in LIKE.items():
        shape[name] = np.where(shape[name] > 0.0, shape[name], shape[same])
    shape |= {name: np.maximum(shape[name], 1.0) for name in SHAPE if name not in MASKS}
    window = (shape["window"] > 0.0) & (shape["window"] < shape["seq_kv"])
    mask = np.where(window, 2, np.where(shape["causal"] > 0.0, 1, 0))
    low = "_fp8" if dtype in LOW_PRECISION else ""
    low += "" if direction == "forward" else "_backward"
    keys = mask + 4.0 * (shape["head_dim"] + 1e6 * shape["head_dim_v"])
    parts: list[Part] = []
    for key, first in zip(*np.unique(keys, return_index=True), strict=True):
        where = np.flatnonzero(keys == key)
        word, dim, dim_v = (float(x[first]) for x in (mask, shape["head_dim"], shape["head_dim_v"]))
        case, head = ("full", "causal", "window")[int(word)] + low, head_name(dim, dim_v)
        kernel = kernel_for(case, head, machine)
        own = {name: column[where] for name, column in shape.items()}
        seconds, factor = case_seconds(own, kernel, machine, case, single=dtype == "fp32")
        if int(word) == 1:
            most = _unmasked(own, kernel, machine, case, head, single=dtype == "fp32")
            seconds = np.minimum(seconds, most)
        beyond = measured_beyond(own, kernel, machine, dtype)
        seconds, factor = seconds * beyond.factor, beyond.band(1 - _long(own), factor)
        efficiency = float(head_efficiency(kernel.constants["e"], np.array([dim]))[0])
        text = (
            f"attention {kernel.name} {case.replace('_', ' ')}: waves x tile (2d+2dv) span "
            f"SM/(P e), e({head}) {efficiency:.2f}"
        )
        text += f"; x {kernel.ratio:.2f}" if kernel.ratio != 1.0 else ""
        parts.append(
            Part(
                where=where,
                kernel=kernel,
                seconds=seconds,
                beyond=beyond.factor,
                factor=factor,
                formula=text,
            )
        )
    return parts


def _unmasked(
    shape: Mapping[str, Array], kernel: Kernel, machine: Machine, case: str, head: str, *,
    single: bool,
) -> Array | float:  # fmt: skip
    """Returns the seconds of the calls of a causal case without their mask, which is the most.

    Both cases have constants of their own, and those of the mask are fitted to long sequences.
    """
    full = case.replace("causal", "full")
    if full not in kernel.found.values:
        return np.inf
    plain = {**shape, "causal": np.zeros_like(shape["causal"])}
    return case_seconds(plain, kernel_for(full, head, machine), machine, full, single=single)[0]


def measured_beyond(
    shape: Mapping[str, Array], kernel: Kernel, machine: Machine, dtype: str
) -> Beyond:
    """Returns what a table of measurements says of a measured case beyond `case_seconds`."""
    residual = None
    if kernel.measured:
        residual = residual_of("attention", kernel.found, machine.device, dtype, kernel.measured)
    if residual is None:
        return nothing_beyond(shape["batch"])
    features = attention_features(shape, machine.device.sm_count)
    return residual.beyond(features, shape)


def case_seconds(
    shape: Mapping[str, Array], kernel: Kernel, machine: Machine, case: str, *, single: bool
) -> tuple[Array, Array]:
    """Returns seconds and interval factors of attention of one case and head_dim.

    `single`: in fp32.
    """
    constants, backward = kernel.constants, case.endswith("_backward")
    main = "fp32" if single else _half(machine)
    seconds = attention_seconds(
        shape,
        peak=machine.peak(main),
        bandwidth=machine.device.memory_bandwidth,
        sms=machine.device.sm_count,
        constants=constants,
        element_bytes=4.0 if single else 2.0,
        work=BACKWARD_FLOPS if backward and kernel.own else 1.0,
    )
    t0 = float(constants["t0_us"]) * 1e-6
    body = kernel.ratio * (seconds - t0)
    measured = np.array([float(dim) for dim in constants["e"]])
    odd = (shape["head_dim"] % 16 != 0) & ~np.isin(shape["head_dim"], measured)
    body *= np.where(odd, load("attention")["rules"]["odd_head_dim_penalty"], 1.0)
    bands = _bands(kernel, _long(shape)) ** _reach(kernel, shape["heads"])
    return t0 + body, bands * (1.0 if kernel.own else 1.1)


def _long(shape: Mapping[str, Array]) -> NDArray[np.intp]:
    """Returns 1 where sequences are long, else 0."""
    return (np.minimum(shape["seq_q"], shape["seq_kv"]) >= LONG).astype(np.intp)


def _bands(kernel: Kernel, long: NDArray[np.intp]) -> Array:
    """The interval factors: of rows left out of the fit where there were enough of them."""
    row = kernel.found.row
    own: Mapping[str, Any] = kernel.constants if row in ("measured", "fitted") else {}
    wide = float(own.get("band", width(row, "attention")))
    narrow = float(own.get("band_long", width(row, "attention_long")))
    return np.where(long > 0, narrow, wide)


def _reach(kernel: Kernel, heads: Array) -> Array:
    """Returns how much wider the logarithm of the interval is where heads were not measured.

    Constants that were fitted to a few numbers of heads (`heads`) miss what fewer ones show.
    """
    least = float(kernel.constants.get("heads", [0.0])[0])
    doublings = np.log2(np.maximum(least / heads, 1.0))
    return 1.0 + float(load("attention")["rules"]["width_per_halving"]) * doublings


def _half(machine: Machine) -> str:
    return "bf16" if machine.supports("bf16") else "fp16"
