"""GEMM: tiles, waves, split-K, and a roofline where only three constants are known.

A kernel computes b products of M x K by K x N in tiles of tm x tn on the SMs:

    F   = 2 b M N K                     D = s_i b (M K + K N) + s_o b M N
    d   = (1 + F / (P 1 ms)) ** -p      long kernels run at a lower sustained clock
    w   = b ceil(M/tm) ceil(N/tn) s / SM                    waves, s = split of K
    W   = max(1, q ceil(w) + (1 - q) w)
    e   = e_c d tm tn / (tm tn + 4096 c)                    small tiles reuse less
    t_c = W 2 tm tn (K/s + k0) SM / (P e)
    t_m = (D + [s>1] 8 s beta b M N) / (B e_b sqrt(min(1, 2 w)))
    t   = max(t_c, t_m) (1 + (min/max)**4 / 4) + [s>1] sigma
    T   = t0 + min over tiles and splits of t

Constants: catalog/calibration/gemm.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

Array = NDArray[np.float64]

TILES = (
    (256, 256),
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 64),
    (16, 128),
)
SPLITS = (1, 3, 8)
_CANDIDATES = np.array([(m, n, s) for m, n in TILES for s in SPLITS], dtype=np.float64)
_TM, _TN, _SPLIT = (_CANDIDATES[:, i : i + 1] for i in range(3))
_BIG = 1024.0  # m, n, k from here on count as big


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peak FLOP/s, memory bandwidth B/s, SMs."""

    peak: float
    bandwidth: float
    sms: int


def gemm_seconds(
    shape: Mapping[str, Array],
    *,
    rates: Rates,
    constants: Mapping[str, Any],
    bytes_moved: Array,
    penalty: Array | float = 1.0,
) -> tuple[Array, NDArray[np.intp]]:
    """Returns (seconds, index of the chosen tile and split) of GEMMs given as arrays b m n k.

    `penalty` divides the compute efficiency (misaligned rows). A roofline entry ignores tiles.
    """
    b, m, n, k = (shape[name] for name in "bmnk")
    flops = 2.0 * b * m * n * k
    e_b = float(constants["e_b"])
    t0 = float(constants["t0_us"]) * 1e-6
    e_c = float(constants["e_c"]) / penalty
    if constants["form"] == "roofline":
        compute = flops / (rates.peak * e_c)
        memory = bytes_moved / (rates.bandwidth * e_b)
        return t0 + np.maximum(compute, memory), np.full(m.shape, -1, dtype=np.intp)
    clock = (1.0 + flops / (rates.peak * 1e-3)) ** -float(constants["p"])
    area = _TM * _TN
    waves = b * np.ceil(m / _TM) * np.ceil(n / _TN) * _SPLIT / rates.sms
    q = float(constants["q"])
    rounds = np.maximum(1.0, q * np.ceil(waves) + (1.0 - q) * waves)
    efficiency = e_c * clock * area / (area + 4096.0 * float(constants["c"]))
    depth = k / _SPLIT + float(constants["k0"])
    compute = rounds * 2.0 * area * depth * rates.sms / (rates.peak * efficiency)
    is_split = _SPLIT > 1
    extra = np.where(is_split, 8.0 * _SPLIT * float(constants["beta"]), 0.0) * b * m * n
    fill = np.sqrt(np.minimum(1.0, 2.0 * waves))
    memory = (bytes_moved + extra) / (rates.bandwidth * e_b * fill)
    low, high = np.minimum(compute, memory), np.maximum(compute, memory)
    time = high * (1.0 + 0.25 * (low / high) ** 4)
    time += np.where(is_split, float(constants["sigma_us"]) * 1e-6, 0.0)
    time = np.where(is_split & (k < 256.0 * _SPLIT), np.inf, time)
    best = np.argmin(time, axis=0)
    return t0 + time[best, np.arange(time.shape[1])], best


def constants_for(machine: Machine, dtype: str) -> Constants:
    """Returns the GEMM constants of a device and dtype (see gemm.toml)."""
    entries = [e for e in load("gemm")["entry"] if dtype in e["dtypes"]]
    found = find(entries, machine.device)
    if found is None:
        raise InternalError(f"no GEMM constants for dtype {dtype!r}")
    return found


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `gemm` events (shape b m n k, optional out_bytes and accumulate)."""
    answers: dict[int, Answer] = {}
    by_dtype: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        by_dtype.setdefault(event.dtype, []).append(i)
    for dtype, indices in by_dtype.items():
        group = [events[i] for i in indices]
        answers.update(zip(indices, _price_dtype(group, dtype, machine), strict=True))
    return [answers[i] for i in range(len(events))]


def _price_dtype(events: Sequence[ComputeEvent], dtype: str, machine: Machine) -> list[Answer]:
    own_rate = machine.supports(dtype)
    kernel_dtype = dtype if own_rate or dtype == "fp32" else _emulated(dtype, machine)
    found = constants_for(machine, kernel_dtype)
    rules: Mapping[str, float] = load("gemm")["rules"]
    constants = dict(found.values)
    if kernel_dtype == "tf32":
        constants["e_c"] = float(constants["e_c"]) - rules["tf32_loss"]
    shapes = [dict(event.shape) for event in events]
    b, m, n, k = (np.array([s.get(x, 1.0) for s in shapes], dtype=np.float64) for x in "bmnk")
    size = min(dtype_bytes(dtype), 4.0)
    out = np.array([s.get("out_bytes", max(size, 2.0)) for s in shapes])
    accumulate = np.array([s.get("accumulate", 0.0) for s in shapes])
    out = np.where(accumulate > 0, 2.0 * np.maximum(out, 4.0), out)
    operands = size * b * (m * k + k * n)
    if machine.warm:
        operands -= _warm_bytes(size * b * m * k, machine, rules)
    wgrad = np.array([event.direction == "backward_weight" for event in events])
    penalty = _alignment(np.where(wgrad, m, k), n, size, rules)
    rates = Rates(
        peak=machine.peak(kernel_dtype),
        bandwidth=machine.device.memory_bandwidth,
        sms=machine.device.sm_count,
    )
    seconds, best = gemm_seconds(
        {"b": b, "m": m, "n": n, "k": k},
        rates=rates,
        constants=constants,
        bytes_moved=operands + out * b * m * n,
        penalty=penalty,
    )
    big = (m >= _BIG) & (n >= _BIG) & (k >= _BIG)
    factors = {True: width(found.row, "gemm_big"), False: width(found.row, "gemm_small")}
    extra = np.where([event.direction == "forward" for event in events], 1.0, 1.05)
    t0 = float(constants["t0_us"]) * 1e-6
    return [
        Answer(
            value_s=float(seconds[i]),
            latency_s=t0,
            factor=factors[bool(big[i])] * float(extra[i]),
            kernels=1.0,
            family="gemm",
            provenance=found.provenance if own_rate else "guess",
            formula=_formula(int(best[i]), constants, rates.peak, kernel_dtype, float(penalty[i])),
        )
        for i in range(len(events))
    ]


def _emulated(dtype: str, machine: Machine) -> str:
    """Returns the dtype whose units run `dtype` on a device that has none of its own."""
    for wider in ("bf16", "fp16"):
        if dtype in ("fp8", "mxfp8", "nvfp4") and machine.supports(wider):
            return wider
    return "fp32"


def _warm_bytes(activation: Array, machine: Machine, rules: Mapping[str, float]) -> Array:
    """Returns the bytes of the activation operand that L2 serves almost for free."""
    resident = rules["warm_share"] * machine.device.l2_bytes
    ratio = float(_memory_ratio(machine))
    return np.minimum(activation, resident) * (1.0 - 1.0 / ratio)


def _memory_ratio(machine: Machine) -> float:
    found = find(load("memory")["entry"], machine.device)
    return found.number("l2_ratio", 3.0) if found else 3.0


def _alignment(row: Array, n: Array, size: float, rules: Mapping[str, float]) -> Array:
    elements = 2.0 ** round(log2(rules["align_bytes"] / size))  # block scales lie elsewhere
    odd = (row % 2 == 1) | (n % 2 == 1)
    loose = (row % elements != 0) | (n % elements != 0)
    return np.where(odd, rules["odd_penalty"], np.where(loose, rules["align_penalty"], 1.0))


def _formula(
    best: int, constants: Mapping[str, Any], peak: float, dtype: str, penalty: float
) -> str:
    text = f"e_c {constants['e_c']:g}, P {peak / 1e12:.0f} TF {dtype}, e_b {constants['e_b']:g}"
    if penalty > 1.0:
        text += f", misaligned /{penalty:g}"
    if best < 0:
        return f"gemm roofline: t0 + max(2bmnk/(P e_c), D/(B e_b)); {text}"
    tm, tn, split = (int(x) for x in _CANDIDATES[best])
    return f"gemm tile {tm}x{tn} split {split}: waves x 2 tm tn (k/s + {constants['k0']:g}); {text}"
