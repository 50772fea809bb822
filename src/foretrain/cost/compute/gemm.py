"""GEMM events: their dtype, bytes and alignment, priced by the tile model of gemm_tiles.py.

Constants in catalog/calibration: gemm_fitted.toml and gemm_kernels.toml, which
studies/costs/gemm.py writes, and gemm.toml (spec sheets, single figures and judgement); keyed by
device, dtype and, where the stack says which kernel runs, by kernel. Explained in
docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.compute.features import gemm_features
from foretrain.cost.compute.gemm_tiles import GemmTimes, Rates, gemm_seconds
from foretrain.cost.machine import Machine
from foretrain.cost.residual import Beyond, nothing_beyond, residual_of, said
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

Array = NDArray[np.float64]
_BIG = 1024.0  # m, n, k from here on count as big
_WIDE = 128.0  # rows from here on: a tile is full
#: Dtypes that run on tensor units, which want aligned rows.
_VECTOR = ("fp32",)


def constants_for(machine: Machine, dtype: str) -> Constants:
    """Returns the GEMM constants of a device, dtype and kernel.

    Entries that name kernels hold for the stack's `gemm_kernel` (`low_kernels` of that dtype) only,
    and go before those that hold for any.
    """
    kernel = machine.stack.product_kernel(dtype).lower()
    tables = (("gemm_kernels",) if kernel else ()) + ("gemm_fitted", "gemm")
    entries: list[Mapping[str, Any]] = [
        entry
        for table in tables
        for entry in load(table)["entry"]
        if dtype in entry["dtypes"]
        and ("kernels" not in entry or _matches(kernel, entry["kernels"]))
    ]
    entries.sort(key=lambda entry: ("calibrated" not in entry, "kernels" not in entry))
    found = find(entries, machine.device)
    if found is None:
        raise InternalError(f"no GEMM constants for dtype {dtype!r}")
    return found


def _matches(kernel: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(kernel, pattern.lower()) for pattern in patterns)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `gemm` events (shape b m n k, optional out_bytes and accumulate)."""
    return price_by_dtype(events, machine, _price_dtype)


def price_by_dtype(
    events: Sequence[ComputeEvent],
    machine: Machine,
    price_group: Callable[[Sequence[ComputeEvent], str, Machine], list[Answer]],
) -> list[Answer]:
    """Returns the answers of `price_group`, called once for the events of each dtype, in order."""
    answers: dict[int, Answer] = {}
    by_dtype: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        by_dtype.setdefault(event.dtype, []).append(i)
    for dtype, indices in by_dtype.items():
        group = [events[i] for i in indices]
        answers.update(zip(indices, price_group(group, dtype, machine), strict=True))
    return [answers[i] for i in range(len(events))]


def _price_dtype(events: Sequence[ComputeEvent], dtype: str, machine: Machine) -> list[Answer]:
    kernel_dtype = dtype_of(dtype, machine)
    found = constants_for(machine, kernel_dtype)
    columns = _columns(events, dtype)
    loss = alignment_loss(columns, dtype, kernel_dtype, vector_loss(machine, kernel_dtype))
    times = column_seconds(columns, loss, dtype, machine, found.values)
    beyond = measured_beyond(columns, loss, found, machine, kernel_dtype)
    seconds = times.seconds * beyond.factor
    factor = bands(found, columns, beyond)
    factor = factor * np.where([e.direction == "forward" for e in events], 1.0, 1.05)
    units = str(found.values.get("units", kernel_dtype))
    peak, t0 = machine.peak(units), float(found.values["t0_us"]) * 1e-6
    provenance = found.provenance if kernel_dtype == dtype else "guess"
    share = machine.sustained(kernel_dtype)
    tail = f", x {share:g} under sustained load" if share < 1.0 else ""
    texts: dict[tuple[float, ...], str] = {}  # few differ
    for key in {*zip(times.tm, times.tn, times.split, loss, strict=True)}:
        texts[key] = _formula(key, found.values, peak, units) + tail
    return [
        Answer(
            value_s=float(seconds[i]),
            latency_s=min(t0, float(seconds[i])),
            factor=float(factor[i]),
            kernels=1.0,
            family="gemm",
            provenance=provenance,
            formula=texts[times.tm[i], times.tn[i], times.split[i], loss[i]]
            + said(beyond.factor[i]),
        )
        for i in range(len(events))
    ]


def _columns(events: Sequence[ComputeEvent], dtype: str) -> dict[str, Array]:
    shapes = [dict(event.shape) for event in events]
    columns = {x: np.array([s.get(x, 1.0) for s in shapes], dtype=np.float64) for x in "bmnk"}
    usual = max(min(dtype_bytes(dtype), 4.0), 2.0)
    out = np.array([s.get("out_bytes", usual) for s in shapes])
    accumulate = np.array([s.get("accumulate", 0.0) for s in shapes])
    columns["out_bytes"] = np.where(accumulate > 0, 2.0 * np.maximum(out, 4.0), out)
    wgrad = np.array([event.direction == "backward_weight" for event in events])
    columns["row"] = np.where(wgrad, columns["m"], columns["k"])
    return columns


def column_seconds(
    columns: Mapping[str, Array],
    loss: Array,
    dtype: str,
    machine: Machine,
    constants: Mapping[str, Any],
) -> GemmTimes:
    """Returns the times of GEMMs given as columns.

    Args:
        columns: b, m, n, k, and out_bytes: the bytes of an element of the result (read and written
            where it accumulates).
        loss: divides the compute efficiency of each (misaligned rows).
        dtype: of the operands.
        machine: device, stack, and whether the kernels run within a step.
        constants: an entry of gemm.toml.
    """
    kernel_dtype = str(constants.get("units", dtype_of(dtype, machine)))
    rules: Mapping[str, float] = load("gemm")["rules"]
    if kernel_dtype == "tf32" and "units" not in constants:
        constants = {**constants, "e_c": float(constants["e_c"]) - rules["tf32_loss"]}
    b, m, n, k = (columns[x] for x in "bmnk")
    size = min(dtype_bytes(dtype), 4.0)
    operands = size * b * (m * k + k * n)
    if machine.warm:
        operands = operands - _warm_bytes(size * b * m * k, machine, rules)
    return gemm_seconds(
        columns,
        rates=Rates(
            peak=machine.peak(kernel_dtype),
            bandwidth=machine.device.memory_bandwidth,
            sms=machine.device.sm_count,
        ),
        constants=constants,
        bytes_moved=operands + columns["out_bytes"] * b * m * n,
        penalty=loss / machine.sustained(kernel_dtype),
    )


def measured_beyond(
    columns: Mapping[str, Array], loss: Array, found: Constants, machine: Machine, dtype: str
) -> Beyond:
    """Returns what a table of measurements says of products beyond `column_seconds`."""
    residual = residual_of("gemm", found, machine.device, dtype)
    if residual is None:
        return nothing_beyond(loss)
    features = gemm_features(columns, machine.device.sm_count)
    return residual.beyond(features, {**columns, "loss": loss})


def dtype_of(dtype: str, machine: Machine) -> str:
    """Returns the dtype whose units run `dtype` on this device: its own, or a wider one's."""
    if machine.supports(dtype) or dtype == "fp32":
        return dtype
    for wider in ("bf16", "fp16"):
        if dtype in ("fp8", "fp8_block", "mxfp8", "nvfp4") and machine.supports(wider):
            return wider
    return "fp32"


def vector_loss(machine: Machine, kernel_dtype: str) -> float:
    """Returns what divides the efficiency of batched products that are misaligned (1: nothing).

    The libraries of some stacks have no kernels for them on tensor units: they run at the rate of
    fp32 (stack, `vector_misaligned`).
    """
    if not machine.stack.vector_misaligned:
        return 1.0
    share = machine.peak("fp32") / machine.peak(kernel_dtype)
    return max(1.0, 1.0 / (share * float(load("gemm")["rules"]["vector_gain"])))


def alignment_loss(
    columns: Mapping[str, Array], dtype: str, kernel_dtype: str, batched: float = 1.0
) -> Array:
    """Returns what divides the efficiency: rows that tensor units cannot load in whole vectors.

    `columns["row"]` is the length of an operand's rows (k, in a weight gradient m); `batched` is at
    least what divides the efficiency of several such products in one call.
    """
    row, n = columns["row"], columns["n"]
    if kernel_dtype in _VECTOR:
        return np.ones(n.shape)
    rules: Mapping[str, float] = load("gemm")["rules"]
    size = min(dtype_bytes(dtype), 4.0)
    elements = 2.0 ** round(log2(rules["align_bytes"] / size))  # block scales lie elsewhere
    odd = (row % 2 == 1) | (n % 2 == 1)
    loose = (row % elements != 0) | (n % elements != 0)
    loss = np.where(odd, rules["odd_penalty"], np.where(loose, rules["align_penalty"], 1.0))
    return np.where((loss > 1.0) & (columns["b"] > 1.0), np.maximum(loss, batched), loss)


def bands(found: Constants, columns: Mapping[str, Array], beyond: Beyond) -> Array:
    """Returns the interval factor of each: its residual's, the entry's, or by intervals.toml.

    The classes are m, n, k from 1024 on; m from 128 on; the rest.
    """
    if "band" in found.values and found.row in ("measured", "fitted"):
        big, wide, small = (float(x) for x in found.values["band"])
    else:
        big = width(found.row, "gemm_big")
        wide = small = width(found.row, "gemm_small")
    m, n, k = (columns[x] for x in "mnk")
    is_big = (m >= _BIG) & (n >= _BIG) & (k >= _BIG)
    which = np.where(is_big, 0, np.where(m >= _WIDE, 1, 2))
    return beyond.band(which, np.array([big, wide, small])[which])


def _warm_bytes(activation: Array, machine: Machine, rules: Mapping[str, float]) -> Array:
    """Returns the bytes of the activation operand that L2 serves almost for free."""
    resident = rules["warm_share"] * machine.device.l2_bytes
    ratio = float(_memory_ratio(machine))
    return np.minimum(activation, resident) * (1.0 - 1.0 / ratio)


def _memory_ratio(machine: Machine) -> float:
    found = find(load("memory")["entry"], machine.device)
    return found.number("l2_ratio", 3.0) if found else 3.0


def _formula(
    chosen: tuple[float, ...], constants: Mapping[str, Any], peak: float, dtype: str
) -> str:
    """Returns the words for a tile (tm, tn, split of K, loss by misaligned rows)."""
    tm, tn, split, loss = chosen
    text = f"e_c {constants['e_c']:g}, P {peak / 1e12:.0f} TF {dtype}, e_b {constants['e_b']:g}"
    if loss > 1.0:
        text += f", misaligned /{loss:g}"
    if split == 0:
        return f"gemm roofline: t0 + max(2bmnk/(P e_c), D/(B e_b)); {text}"
    tile = f"{tm:g}x{tn:g} split {split:g}"
    return f"gemm tile {tile}: waves x 2 tm tn (k/s + {constants['k0']:g}); {text}"
