"""What a rank of a stage holds all step: weights, gradients, optimizer states, gradient buckets."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from foretrain.compiler.launches import StageContext
from foretrain.compiler.optimizer import state_bytes
from foretrain.compiler.parameters import Unit, merge
from foretrain.compiler.placements import family
from foretrain.compiler.quantized import by_weight_dtype, copy_bytes
from foretrain.units import dtype_bytes


def updated_elements(context: StageContext) -> int:
    """Returns how many parameters one rank of the stage updates, 0 without an optimizer."""
    if context.optimizer == "none":
        return 0
    groups = merge(group for unit in context.units() for group in unit.groups)
    return sum(g.share(g.signature.master, context.mesh) for g in groups)


def persistent_bytes(context: StageContext) -> dict[str, float]:
    """Returns the bytes of weights, gradients and optimizer states of one rank of the stage.

    By module, each part is divided over the blocks by their share of what is held of it.
    """
    units = context.units()
    whole, buckets = _state_bytes(context, units), staged_bucket_bytes(context)
    staged = {"gradient buckets": buckets} if buckets else {}
    tables, table_states = context.tables
    if tables:
        staged |= {"tables": tables}
        staged |= {"table states": table_states if context.optimizer != "none" else 0.0}
    if not context.by_module:
        return {**whole, **staged}
    blocks: dict[str, list[Unit]] = {}
    for unit in units:
        blocks.setdefault(unit.path.split(".")[0], []).append(unit)
    found: dict[str, float] = {}
    for block, own in blocks.items():
        for part, value in _state_bytes(context, own).items():
            found[f"{block} {part}"] = value
    for part, value in whole.items():  # shards are rounded up once for all blocks together
        booked = sum(v for key, v in found.items() if key.endswith(f" {part}"))
        first = f"{units[0].path.split('.')[0]} {part}"
        found[first] = found.get(first, 0.0) + value - booked
    return {**found, **staged}


def _state_bytes(context: StageContext, units: Sequence[Unit]) -> dict[str, float]:
    precision, mesh = context.precision, context.mesh
    groups = merge(group for unit in units for group in unit.groups)
    states = state_bytes(context.optimizer, precision, context.factored)
    trains = context.optimizer != "none"
    copies = sum(copy_bytes(u, precision, context.stack, context.fp8_layouts) for u in units)
    return {
        "weights": sum(
            g.share(g.signature.stored, mesh) * dtype_bytes(dtype)
            for dtype, stored in by_weight_dtype(units, precision).items()
            for g in stored
        ),
        **({"quantized weights": copies} if copies else {}),
        "gradients": sum(g.share(g.signature.accumulated, mesh) for g in groups)
        * precision.bytes("grad_accumulate"),
        "optimizer": sum(g.share(g.signature.master, mesh) for g in groups) * states
        if trains
        else 0.0,
    }


def staged_bucket_bytes(context: StageContext) -> float:
    """Returns the bytes of the buffers that gradients are copied to before their reduction.

    DDP holds a copy of all gradients in its buckets, DeepSpeed one bucket or two.
    """
    runtime, mesh = context.tree.runtime, context.mesh
    data = [axis for axis in mesh.axes if family(axis) == "data"]
    if not runtime.staged_buckets or mesh.size(data) == 1:
        return 0.0
    groups = merge(group for unit in context.units() for group in unit.groups)
    whole = sum(g.elements for g in groups) * context.precision.bytes("grad")
    return min(whole, runtime.staged_buckets * (runtime.bucket_bytes or inf))
