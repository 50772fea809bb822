"""Times of many operators at once: columns in, columns out, for search and calibration.

`CostModel.price` answers for the events of a program, one object each, with a formula. Here
operators of one kind are rows of a table, and so are the answers: GEMMs, experts, attention,
convolutions, embedding bags, the optimizer and what is bound by memory never leave numpy. Other
kinds are priced through their events, equal rows once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import width
from foretrain.cost.compute import (
    attention,
    convolution,
    embedding_bag,
    gemm,
    memory_bound,
    moe,
    optimizer,
)
from foretrain.cost.machine import Machine
from foretrain.cost.model import provider
from foretrain.errors import InputError, Problem
from foretrain.hardware.device import Device
from foretrain.program import ComputeEvent
from foretrain.stack import Stack
from foretrain.units import DTYPE_BYTES, dtype_bytes

Array = NDArray[np.float64]
DIRECTIONS = ("forward", "backward", "backward_input", "backward_weight", "optimizer")
#: Columns that must be there and above zero.
_NEEDED = {"gemm": ("m", "n", "k"), "embedding_bag": ("rows", "dim")}
#: Columns that are above zero where they are there.
_POSITIVE = {
    **_NEEDED,
    "gemm": ("b", "m", "n", "k"),
    "attention": ("batch", "seq_q", "heads", "head_dim"),
    "conv2d": ("n", "c", "h", "w", "k", "r", "s"),
    "moe_gemm": ("tokens", "hidden", "ffn", "experts", "topk"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Operators of one kind, dtype and direction; `shape` holds one column per shape value.

    The names are those of the `validate ops` format (gemm: b m n k, and so on). Operators that move
    data also need `bytes`: what an ideally fused kernel reads and writes. Columns have one length,
    or are single numbers that hold for all rows.
    """

    op: str
    dtype: str
    shape: Mapping[str, Array | float]
    direction: str = "forward"
    bytes: Array | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each operator, its 90 % interval, and how well the constants are known."""

    value_s: Array
    low_s: Array
    high_s: Array
    provenance: str


def time(ops: Operators, device: Device, stack: Stack, *, warm: bool = False) -> Times:
    """Returns the times of operators as kernels alone on a device, without the host.

    `warm` counts the activation operand of a GEMM as partly resident in L2, as it is in a step.

    Raises:
        InputError: an unknown dtype or direction, columns of several lengths, or values that are
            not positive and finite.
    """
    columns = _checked(ops)
    if not columns["bytes"].size:
        nothing = np.empty(0)
        return Times(value_s=nothing, low_s=nothing, high_s=nothing, provenance="measured")
    machine = Machine(device=device, stack=stack, warm=warm)
    if ops.op == "gemm":
        return _gemm(columns, ops, machine)
    if ops.op == "moe_gemm":
        return _moe(columns, ops, machine)
    if ops.op == "attention":
        return _attention(columns, ops, machine)
    if ops.op == "conv2d":
        return _convolution(columns, ops, machine)
    if ops.op == "embedding_bag":
        return _bags(columns, ops, machine)
    if provider(ops.op) is memory_bound.price:
        return _memory(columns, ops, machine)
    if provider(ops.op) is optimizer.price:
        return _optimizer(columns, ops, machine)
    return _events(columns, ops, machine)


def _checked(ops: Operators) -> dict[str, Array]:
    """Returns all columns in full length; InputError says what is wrong with them."""
    problems: list[Problem] = []
    if ops.dtype not in DTYPE_BYTES:
        allowed = ", ".join(DTYPE_BYTES)
        problems.append(Problem(what="unknown dtype", value=ops.dtype, allowed=allowed))
    if ops.direction not in DIRECTIONS:
        allowed = ", ".join(DIRECTIONS)
        problems.append(Problem(what="unknown direction", value=ops.direction, allowed=allowed))
    given = {**ops.shape, "bytes": ops.bytes}
    arrays = {name: np.asarray(value, dtype=np.float64) for name, value in given.items()}
    lengths = {array.shape for array in arrays.values() if array.ndim}
    if len(lengths) > 1 or any(len(shape) > 1 for shape in lengths):
        what = "columns of different lengths"
        problems.append(Problem(what=what, where=ops.op, value=sorted(map(str, lengths))))
    needed = _NEEDED.get(ops.op, ())
    for name, array in arrays.items():
        least = np.nextafter(0.0, 1.0) if name in _POSITIVE.get(ops.op, ()) else 0.0
        if not np.all(np.isfinite(array)) or np.any(array < least):
            problems.append(Problem(what="not positive and finite", where=f"{ops.op}: {name}"))
    problems += [
        Problem(what="missing", where=f"{ops.op}: {name}") for name in needed if name not in arrays
    ]
    if problems:
        raise InputError(problems)
    length = next(iter(lengths), (1,))
    return {name: np.broadcast_to(array, length) for name, array in arrays.items()}


def _gemm(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    dtype = ops.dtype
    kernel_dtype = gemm.dtype_of(dtype, machine)
    found = gemm.constants_for(machine, kernel_dtype)
    ones = np.ones(columns["m"].shape)
    size = max(min(dtype_bytes(dtype), 4.0), 2.0)
    weight = ops.direction == "backward_weight"
    table = {
        "b": columns.get("b", ones),
        "m": columns["m"],
        "n": columns["n"],
        "k": columns["k"],
        "row": columns["m"] if weight else columns["k"],
        "out_bytes": columns.get("out_bytes", size * ones),
    }
    batched = gemm.vector_loss(machine, kernel_dtype)
    loss = gemm.alignment_loss(table, dtype, kernel_dtype, batched)
    seconds = gemm.column_seconds(table, loss, dtype, machine, found.values).seconds
    beyond = gemm.measured_beyond(table, loss, found, machine, kernel_dtype)
    seconds = seconds * beyond.factor
    factor = gemm.bands(found, table, beyond) * (1.0 if ops.direction == "forward" else 1.05)
    return _times(seconds, factor, found.provenance if kernel_dtype == dtype else "guess")


def _moe(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    kernel_dtype = gemm.dtype_of(ops.dtype, machine)
    found = moe.constants_for(machine, kernel_dtype)
    table = moe.with_busiest(columns)
    seconds = moe.column_seconds(table, ops.dtype, machine, found.values)
    beyond = moe.measured_beyond(table, found, machine, kernel_dtype)
    passes = 2.0 if ops.direction == "backward" else 1.0
    provenance = found.provenance if kernel_dtype == ops.dtype else "guess"
    factor = moe.bands(found, table, beyond)
    return _times(passes * beyond.factor * seconds, factor, provenance)


def _attention(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    zeros = np.zeros(columns["bytes"].shape)
    given = {name: columns.get(name, zeros) for name in attention.SHAPE}
    seconds, factor = np.empty(zeros.shape), np.empty(zeros.shape)
    parts = attention.column_times(given, ops.dtype, ops.direction, machine)
    for part in parts:
        seconds[part.where], factor[part.where] = part.seconds, part.factor
    return _times(seconds, factor, parts[0].kernel.found.provenance)


def _memory(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    found = memory_bound.constants_for(machine)
    zeros = np.zeros(columns["bytes"].shape)
    given = {name: columns.get(name, zeros) for name in ("bytes", "rows", "cols")}
    seconds = memory_bound.column_seconds(
        ops.op, ops.dtype, ops.direction, given, machine, found.values
    ).seconds
    factor = np.full(seconds.shape, memory_bound.band(ops.op, found))
    return _times(seconds, factor, found.provenance)


def _bags(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    found = memory_bound.constants_for(machine)
    backward = ops.direction != "forward"
    seconds = embedding_bag.column_seconds(columns, machine, found, backward=backward)
    factor = np.full(seconds.shape, width(found.row, "memory"))
    return _times(seconds, factor, found.provenance)


def _optimizer(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    found = memory_bound.constants_for(machine)
    seconds = optimizer.column_seconds(ops.op, columns, machine, found).seconds
    return _times(seconds, np.full(seconds.shape, optimizer.band(found)), found.provenance)


def _convolution(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    images = convolution.images_of(columns, columns["bytes"].shape)
    both = ops.direction == "backward"
    parts = [
        convolution.column_times(images, ops.dtype, way, machine)
        for way in (convolution.PARTS if both else (ops.direction,))
    ]
    seconds = np.sum([part.seconds for part in parts], axis=0)
    return _times(seconds, parts[0].factor, parts[0].found.provenance)


def _events(columns: dict[str, Array], ops: Operators, machine: Machine) -> Times:
    names = [name for name in columns if name != "bytes"]
    rows = np.stack([columns[name] for name in (*names, "bytes")], axis=1)
    distinct, where = np.unique(rows, axis=0, return_inverse=True)
    events = [
        ComputeEvent(
            op=ops.op,
            direction=cast("Any", ops.direction),
            dtype=ops.dtype,
            shape=tuple(zip(names, (float(value) for value in row[:-1]), strict=True)),
            flops=0.0,
            bytes=float(row[-1]),
        )
        for row in distinct
    ]
    answers = provider(ops.op)(events, machine)
    value = np.array([answer.value_s for answer in answers])[where.reshape(-1)]
    factor = np.array([answer.factor for answer in answers])[where.reshape(-1)]
    order = ("measured", "fitted", "spec", "guess")  # the least certain of all
    return _times(value, factor, max((a.provenance for a in answers), key=order.index))


def _times(value: Array, factor: Array, provenance: str) -> Times:
    return Times(value_s=value, low_s=value / factor, high_s=value * factor, provenance=provenance)
