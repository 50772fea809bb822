"""What a rank of a stage holds all step: weights, gradients, optimizer states, gradient buckets."""

from __future__ import annotations

from math import inf

from foretrain.compiler.launches import StageContext
from foretrain.compiler.optimizer import state_bytes
from foretrain.compiler.parameters import merge
from foretrain.compiler.placements import family


def updated_elements(context: StageContext) -> int:
    """Returns how many parameters one rank of the stage updates, 0 without an optimizer."""
    if context.optimizer == "none":
        return 0
    groups = merge(group for unit in context.units() for group in unit.groups)
    return sum(g.share(g.signature.master, context.mesh) for g in groups)


def persistent_bytes(context: StageContext) -> dict[str, float]:
    """Returns the bytes of weights, gradients and optimizer states of one rank of the stage."""
    precision, mesh = context.precision, context.mesh
    groups = merge(group for unit in context.units() for group in unit.groups)
    states = state_bytes(context.optimizer, precision, context.factored)
    trains = context.optimizer != "none"
    buckets = staged_bucket_bytes(context)
    tables, table_states = context.tables
    return {
        "weights": sum(g.share(g.signature.stored, mesh) for g in groups)
        * precision.bytes("weight"),
        "gradients": sum(g.share(g.signature.accumulated, mesh) for g in groups)
        * precision.bytes("grad_accumulate"),
        "optimizer": sum(g.share(g.signature.master, mesh) for g in groups) * states
        if trains
        else 0.0,
        **({"gradient buckets": buckets} if buckets else {}),
        **({"tables": tables, "table states": table_states if trains else 0.0} if tables else {}),
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
