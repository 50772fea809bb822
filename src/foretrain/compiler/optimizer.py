"""The optimizer step as work: gradient norm, update, zeroing; bytes per parameter by role."""

from __future__ import annotations

from foretrain.compiler.events import EventTable
from foretrain.graph.precision import Precision
from foretrain.program import ComputeEvent, Item, Segment

#: Moments kept per parameter and FLOP per parameter of the update.
OPTIMIZERS: dict[str, tuple[int, float]] = {
    "none": (0, 0.0),
    "sgd": (0, 2.0),
    "sgd-momentum": (1, 4.0),
    "adam": (2, 14.0),
    "adamw": (2, 16.0),
}


def state_bytes(optimizer: str, precision: Precision) -> float:
    """Returns the optimizer's bytes per parameter: moments, and a master copy if one is kept."""
    moments, _ = OPTIMIZERS[optimizer]
    master = 0.0 if precision.master is None or optimizer == "none" else precision.bytes("master")
    return moments * precision.bytes("moments") + master


def update_bytes(optimizer: str, precision: Precision) -> float:
    """Returns the bytes read and written per parameter by a fused update.

    Adam with fp32 master and gradients: read p m v g 16, write p m v 12.
    """
    moments, _ = OPTIMIZERS[optimizer]
    states = precision.bytes("master") + moments * precision.bytes("moments")
    return 2.0 * states + precision.bytes("grad_accumulate")


def copy_bytes(precision: Precision) -> float:
    """Returns the bytes per parameter of refreshing the weights from the master copy."""
    if precision.master is None:
        return 0.0
    return precision.bytes("master") + precision.bytes("weight")


def norm_segment(table: EventTable, elements: int, precision: Precision) -> Segment:
    """Returns the gradient norm: one read of the gradients that this rank updates."""
    size = precision.bytes("grad_accumulate")
    event = ComputeEvent(
        op="grad_norm",
        direction="optimizer",
        dtype=precision.grad_accumulate,
        shape=(("params", float(elements)),),
        flops=2.0 * elements,
        bytes=size * elements,
    )
    item = Item(label="gradient norm", event=table.intern(event), category="optimizer")
    return Segment(name="gradient norm", items=(item,))


def update_segment(
    table: EventTable, optimizer: str, elements: int, gradients: int, precision: Precision
) -> Segment:
    """Returns the work on `elements` parameters and on `gradients` kept elements.

    With fp16 the gradients are unscaled and checked for overflow in a pass of their own; weights
    are refreshed from the master copy by a separate multi-tensor copy.
    """
    size = precision.bytes("grad_accumulate")
    _, flops = OPTIMIZERS[optimizer]
    unscale = 2.0 * size * elements if precision.compute == "fp16" else 0.0
    events = (
        ("unscale", "grad_clip", unscale, 1.0 * elements, elements),
        ("clip", "grad_clip", 2.0 * size * elements, 1.0 * elements, elements),
        (
            f"{optimizer} update",
            "optimizer",
            update_bytes(optimizer, precision) * elements,
            flops * elements,
            elements,
        ),
        ("weights from master", "weight_copy", copy_bytes(precision) * elements, 0.0, elements),
        ("zero gradients", "zero_grad", size * gradients, 0.0, gradients),
    )
    items = tuple(
        Item(
            label=label,
            event=table.intern(
                ComputeEvent(
                    op=op,
                    direction="optimizer",
                    dtype=precision.dtype("master"),
                    shape=(("params", float(count)),),
                    flops=work,
                    bytes=num_bytes,
                )
            ),
            category="optimizer",
        )
        for label, op, num_bytes, work, count in events
        if num_bytes > 0.0
    )
    return Segment(name="optimizer", items=items)
