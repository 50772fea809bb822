"""Fused attention: query tiles over the SMs against the span of keys that a tile sees.

    w    = H ceil(s_q/tile) / SM           H = batch x query heads
    W    = max(1, q ceil(w) + (1 - q) w)
    span = s_kv + k0 | (s_kv + tile)/2 + k0 causal | min(s_kv, roundup(window + tile, 128)) + k0
    t_c  = max(W tile f span, tile f (s_kv + k0)) SM / (P e_D d)         f = 2 d_qk + 2 d_v
    d    = (1 + F / (P 1 ms)) ** -p        long kernels run at a lower clock; F: FLOP of the event
    t_m  = batch bytes(q, k, v, o) / (B e_b)
    T    = t0 + max(t_c, t_m) + g min(t_c, t_m)

The second term of t_c is the longest row of one head, which cannot be split. Backward recomputes
the scores: f is 2.5 times as large. Where its own constants are not known it takes 2.5 / rho times
the forward time. Constants by device and kernel, and within a kernel by case (causal, full, window,
backward): catalog/calibration/attention.toml and attention_fitted.toml, which
studies/costs/attention.py writes. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent

Array = NDArray[np.float64]
#: Rows of queries that a thread block takes, where an entry does not say.
TILE = 128.0
#: Sequence from which the narrower interval holds.
LONG = 2048.0
BACKWARD_FLOPS = 2.5
#: Cases with constants of their own -> the cases whose constants stand in, before the entry's own.
CASES: Mapping[str, tuple[str, ...]] = {
    "causal": (),
    "full": ("full",),
    "window": ("window",),
    "causal_backward": ("causal_backward",),
    "full_backward": ("full_backward", "causal_backward"),
    "window_backward": (),
}


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
    k0, q = float(constants["k0"]), float(constants["q"])
    tile = float(constants.get("tile", TILE))
    s_q, s_kv, window = shape["seq_q"], shape["seq_kv"], shape["window"]
    heads = shape["batch"] * shape["heads"]
    per_pair = work * (2.0 * shape["head_dim"] + 2.0 * shape["head_dim_v"])
    longest = np.where(window > 0, np.minimum(s_kv, np.ceil((window + tile) / 128) * 128), s_kv)
    causal = shape["causal"] > 0
    span = np.where(causal, np.minimum((s_kv + tile) / 2.0, longest), longest) + k0
    waves = heads * np.ceil(s_q / tile) / sms
    rounds = np.maximum(1.0, q * np.ceil(waves) + (1.0 - q) * waves)
    items = np.maximum(rounds * tile * per_pair * span, tile * per_pair * (longest + k0))
    useful = heads * s_q * per_pair * np.where(causal, np.minimum(s_kv / 2.0, longest), longest)
    clock = (1.0 + useful / (peak * 1e-3)) ** -float(constants.get("p", 0.0))
    compute = items * sms / (peak * head_efficiency(constants["e"], shape["head_dim"]) * clock)
    rows = s_q * shape["heads"] * (shape["head_dim"] + shape["head_dim_v"])
    rows = rows + s_kv * shape["kv_heads"] * (shape["head_dim"] + shape["head_dim_v"])
    moved = work * element_bytes * shape["batch"] * rows
    memory = moved / (bandwidth * float(constants["e_b"]))
    low, high = np.minimum(compute, memory), np.maximum(compute, memory)
    return float(constants["t0_us"]) * 1e-6 + high + float(constants["g"]) * low


def entries(kernel: str) -> list[Mapping[str, Any]]:
    """Returns the entries of a kernel: of its name, or of a name that a table gives it."""
    return [
        entry
        for table in ("attention_fitted", "attention")
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


def case_of(event: ComputeEvent) -> str:
    """Returns the case of an event: causal, full or window, and _backward."""
    shape = dict(event.shape)
    window = 0.0 < shape.get("window", 0.0) < (shape.get("seq_kv") or shape.get("seq_q", 1.0))
    word = "window" if window else "causal" if shape.get("causal", 0.0) > 0 else "full"
    return word if event.direction == "forward" else f"{word}_backward"


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `attention` events, forward or backward."""
    cases = [case_of(event) for event in events]
    answers: dict[int, Answer] = {}
    for case in dict.fromkeys(cases):
        where = [i for i, other in enumerate(cases) if other == case]
        prices = _price_case([events[i] for i in where], case, machine)
        answers.update(zip(where, prices, strict=True))
    return [answers[i] for i in range(len(events))]


def _price_case(events: Sequence[ComputeEvent], case: str, machine: Machine) -> list[Answer]:
    found, kernel = constants_for(machine)
    rules = load("attention")["rules"]
    own = next((found.values[name] for name in CASES[case] if name in found.values), None)
    constants = own or found.values
    backward = case.endswith("_backward")
    ratio = BACKWARD_FLOPS / found.number("rho") if backward and own is None else 1.0
    main = "fp32" if all(event.dtype == "fp32" for event in events) else _half(machine)
    shape = _shapes(events)
    seconds = attention_seconds(
        shape,
        peak=machine.peak(main),
        bandwidth=machine.device.memory_bandwidth,
        sms=machine.device.sm_count,
        constants=constants,
        element_bytes=4.0 if main == "fp32" else 2.0,
        work=BACKWARD_FLOPS if backward and own is not None else 1.0,
    )
    t0 = float(constants["t0_us"]) * 1e-6
    low = np.array([event.dtype in ("fp8", "mxfp8", "nvfp4") for event in events])
    body = ratio * (seconds - t0) / np.where(low, rules["fp8_gain"], 1.0)
    measured = np.array([float(dim) for dim in constants["e"]])
    odd = (shape["head_dim"] % 16 != 0) & ~np.isin(shape["head_dim"], measured)
    body *= np.where(odd, rules["odd_head_dim_penalty"], 1.0)
    long = np.minimum(shape["seq_q"], shape["seq_kv"]) >= LONG
    factors = _bands(found, constants, long)
    text = (
        f"attention {kernel} {case.replace('_', ' ')}: waves x tile (2d+2dv) span SM/(P e), e(128) "
        f"{float(head_efficiency(constants['e'], np.array([128.0]))[0]):.2f}"
    )
    return [
        Answer(
            value_s=float(t0 + body[i]),
            latency_s=t0,
            factor=factors[i] * (1.1 if backward and own is None else 1.0),
            kernels=2.0 if backward else 1.0,
            family="attention",
            provenance=found.provenance,
            formula=text + (f"; backward x {ratio:.2f}" if ratio != 1.0 else ""),
        )
        for i in range(len(events))
    ]


def _bands(found: Constants, constants: Mapping[str, Any], long: NDArray[np.bool_]) -> list[float]:
    """The interval factors: of rows left out of the fit where there were enough of them."""
    known = found.row in ("measured", "fitted")
    own: Mapping[str, Any] = constants if known else {}
    wide = float(own.get("band", width(found.row, "attention")))
    narrow = float(own.get("band_long", width(found.row, "attention_long")))
    return [narrow if is_long else wide for is_long in long]


def _half(machine: Machine) -> str:
    return "bf16" if machine.supports("bf16") else "fp16"


def _shapes(events: Sequence[ComputeEvent]) -> dict[str, Array]:
    shapes = [dict(event.shape) for event in events]
    names = {
        "batch": 1.0,
        "seq_q": 1.0,
        "heads": 1.0,
        "head_dim": 1.0,
        "causal": 0.0,
        "window": 0.0,
    }
    out = {
        name: np.array([s.get(name, default) for s in shapes], dtype=np.float64)
        for name, default in names.items()
    }
    for name, same in (("seq_kv", "seq_q"), ("kv_heads", "heads"), ("head_dim_v", "head_dim")):
        out[name] = np.array([s.get(name) or s.get(same, 1.0) for s in shapes], dtype=np.float64)
    return out
