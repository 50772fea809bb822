"""Fused attention: query tiles over the SMs against the span of keys that a tile sees.

    w    = H ceil(s_q/128) / SM            H = batch x query heads
    W    = max(1, q ceil(w) + (1 - q) w)
    span = s_kv + k0 | (s_kv + 128)/2 + k0 causal | min(s_kv, roundup(window + 128, 128)) + k0
    t_c  = max(W 128 f span, 128 f (s_kv + k0)) SM / (P e_D)       f = 2 d_qk + 2 d_v
    t_m  = batch bytes(q, k, v, o) / (B e_b)
    T    = t0 + max(t_c, t_m) + g min(t_c, t_m)

The second term of t_c is the longest row of one head, which cannot be split. Backward recomputes
the scores: 2.5 / rho times the forward time. Constants: catalog/calibration/attention.toml by
device and kernel family. Explained in docs/explain/costs.md.
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
TILE = 128.0


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
) -> Array:
    """Returns the forward seconds of fused attention.

    Args:
        shape: arrays batch seq_q seq_kv heads kv_heads head_dim head_dim_v causal window.
        peak: FLOP/s of the dtype.
        bandwidth: bytes/s of device memory.
        sms: number of streaming multiprocessors.
        constants: an entry of attention.toml.
        element_bytes: bytes of one element of q, k, v and the output.
    """
    k0, q = float(constants["k0"]), float(constants["q"])
    s_q, s_kv, window = shape["seq_q"], shape["seq_kv"], shape["window"]
    heads = shape["batch"] * shape["heads"]
    flops = 2.0 * shape["head_dim"] + 2.0 * shape["head_dim_v"]
    longest = np.where(window > 0, np.minimum(s_kv, np.ceil((window + TILE) / TILE) * TILE), s_kv)
    triangle = np.minimum((s_kv + TILE) / 2.0, longest)
    span = np.where(shape["causal"] > 0, triangle, longest) + k0
    waves = heads * np.ceil(s_q / TILE) / sms
    rounds = np.maximum(1.0, q * np.ceil(waves) + (1.0 - q) * waves)
    work = np.maximum(rounds * TILE * flops * span, TILE * flops * (longest + k0))
    efficiency = head_efficiency(constants["e"], shape["head_dim"])
    compute = work * sms / (peak * efficiency)
    rows = s_q * shape["heads"] * (shape["head_dim"] + shape["head_dim_v"])
    rows = rows + s_kv * shape["kv_heads"] * (shape["head_dim"] + shape["head_dim_v"])
    memory = element_bytes * shape["batch"] * rows / (bandwidth * float(constants["e_b"]))
    low, high = np.minimum(compute, memory), np.maximum(compute, memory)
    return float(constants["t0_us"]) * 1e-6 + high + float(constants["g"]) * low


def constants_for(machine: Machine) -> tuple[Constants, str]:
    """Returns the attention constants of the device, and the kernel that they belong to.

    A kernel without constants on the device is replaced as [fallback] of attention.toml says, and
    the interval is that of a generation default.
    """
    table = load("attention")
    wanted = machine.stack.attention_kernel
    kernels = (wanted, *table["fallback"].get(wanted, ("flash2",)))
    for kernel in kernels:
        entries = [e for e in table["entry"] if e["kernel"] == kernel]
        found = find(entries, machine.device)
        if found is not None and found.row != "other":
            break
    else:
        found, kernel = find(table["entry"], machine.device), "flash2"
    if found is None:
        raise InternalError("attention.toml has no default entry")
    if kernel != wanted and found.row in ("measured", "fitted"):
        found = Constants(values=found.values, provenance="guess", row="generation")
    return found, kernel


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `attention` events, forward or backward."""
    found, kernel = constants_for(machine)
    constants, rules = found.values, load("attention")["rules"]
    dtypes = [event.dtype for event in events]
    low = np.array([dtype in ("fp8", "mxfp8", "nvfp4") for dtype in dtypes])
    main = "fp32" if all(dtype == "fp32" for dtype in dtypes) else _half(machine)
    shape = _shapes(events)
    seconds = attention_seconds(
        shape,
        peak=machine.peak(main),
        bandwidth=machine.device.memory_bandwidth,
        sms=machine.device.sm_count,
        constants=constants,
        element_bytes=4.0 if main == "fp32" else 2.0,
    )
    t0 = float(constants["t0_us"]) * 1e-6
    body = (seconds - t0) / np.where(low, rules["fp8_gain"], 1.0)
    body *= np.where(shape["head_dim"] % 16 == 0, 1.0, rules["odd_head_dim_penalty"])
    backward = np.array([event.direction != "forward" for event in events])
    ratio = rules["backward_flops"] / float(constants["rho"])
    body *= np.where(backward, ratio, 1.0)
    factor = width(found.row, "attention")
    text = (
        f"attention {kernel}: waves x 128 (2d+2dv) span SM/(P e), e(128) "
        f"{float(head_efficiency(constants['e'], np.array([128.0]))[0]):.2f}"
    )
    return [
        Answer(
            value_s=float(t0 + body[i]),
            latency_s=t0,
            factor=factor * (1.1 if backward[i] else 1.0),
            kernels=2.0 if backward[i] else 1.0,
            family="attention",
            provenance=found.provenance,
            formula=text + (f"; backward x {ratio:.2f}" if backward[i] else ""),
        )
        for i in range(len(events))
    ]


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
