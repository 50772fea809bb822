"""The optimizer step as work: gradient norm, update, zeroing; bytes per parameter by role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foretrain.compiler.events import EventTable
from foretrain.graph.ir import Tensor
from foretrain.graph.precision import Precision
from foretrain.program import ComputeEvent, Item, Segment

#: A block of 256 elements shares one fp32 scale (bitsandbytes, blockwise quantisation).
_SCALE_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an optimizer keeps and does per parameter.

    `moments` in the dtype of moments, or of `moment_bytes` each; `factored` ones keep a row and a
    column per matrix instead. `norms`: passes over weight and update that layer-wise norms take,
    as numbers read or written in the master dtype.
    """

    moments: int
    flops: float
    moment_bytes: float | None = None
    factored: bool = False
    norms: float = 0.0


#: LAMB writes the update, reads it and the weight for their norms, and reads the update again
#: to apply it: 20 bytes over Adam's 28 (apex FusedLAMB). Adafactor (Shazeer and Stern 2018) without
#: a first moment; it squares the gradient for rows and columns, then scales and clips the update.
OPTIMIZERS: dict[str, Rule] = {
    "none": Rule(moments=0, flops=0.0),
    "sgd": Rule(moments=0, flops=2.0),
    "sgd-momentum": Rule(moments=1, flops=4.0),
    "adagrad": Rule(moments=1, flops=7.0),
    "adam": Rule(moments=2, flops=14.0),
    "adamw": Rule(moments=2, flops=16.0),
    "lamb": Rule(moments=2, flops=22.0, norms=5.0),
    "adafactor": Rule(moments=1, flops=14.0, factored=True, norms=4.0),
    "adam-8bit": Rule(moments=2, flops=24.0, moment_bytes=1.0 + 4.0 / _SCALE_BLOCK),
}


def factored_share(weights: Iterable[Tensor]) -> float:
    """Returns the row and column statistics of factored moments per parameter.

    A matrix of r x c keeps r + c numbers, where output dims are its rows and its last dim the
    columns; a vector keeps all its elements.
    """
    kept = total = 0
    for weight in weights:
        total += weight.size
        columns = weight.shape[-1] if len(weight.shape) > 1 else 0
        kept += weight.size // columns + columns if columns else weight.size
    return kept / total if total else 0.0


def moment_bytes(optimizer: str, precision: Precision, factored: float = 1.0) -> float:
    """Returns the bytes per parameter of all moments; `factored` is that of `factored_share`."""
    rule = OPTIMIZERS[optimizer]
    if rule.moment_bytes is not None:
        return rule.moments * rule.moment_bytes
    size = rule.moments * precision.bytes("moments")
    if rule.moments == 2:
        size = precision.bytes("moments") + precision.bytes("second_moment")
    return size * (factored if rule.factored else 1.0)


def state_bytes(optimizer: str, precision: Precision, factored: float = 1.0) -> float:
    """Returns the optimizer's bytes per parameter: moments, and a master copy if one is kept."""
    master = 0.0 if precision.master is None or optimizer == "none" else precision.bytes("master")
    return moment_bytes(optimizer, precision, factored) + master


def update_bytes(optimizer: str, precision: Precision, factored: float = 1.0) -> float:
    """Returns the bytes read and written per parameter by a fused update.

    Adam with fp32 master and gradients: read p m v g 16, write p m v 12.
    """
    states = precision.bytes("master") + moment_bytes(optimizer, precision, factored)
    more = OPTIMIZERS[optimizer].norms * precision.bytes("master")
    return 2.0 * states + precision.bytes("grad_accumulate") + more


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


def buckets_segment(
    table: EventTable, elements: int, passes: float, precision: Precision
) -> Segment:
    """Returns the copies of gradients to and from the buckets that they are reduced in."""
    event = ComputeEvent(
        op="weight_copy",
        direction="optimizer",
        dtype=precision.grad_reduce,
        shape=(("params", float(elements)),),
        flops=0.0,
        bytes=passes * precision.bytes("grad_reduce") * elements,
    )
    item = Item(label="gradients in buckets", event=table.intern(event), category="optimizer")
    return Segment(name="gradient buckets", items=(item,))


def parts_segment(table: EventTable, elements: int, copies: int, precision: Precision) -> Segment:
    """Returns the copies of gathered weights from flat buffers to their places, one by one.

    Each is flattened by its owner before, and read and written again: four passes.
    """
    event = ComputeEvent(
        op="weight_parts",
        direction="optimizer",
        dtype=precision.weight,
        shape=(("params", float(elements)), ("copies", float(copies))),
        flops=0.0,
        bytes=4.0 * precision.bytes("weight") * elements,
    )
    item = Item(label="gathered weights apart", event=table.intern(event), category="optimizer")
    return Segment(name="gathered weights", items=(item,))


def update_segment(
    table: EventTable,
    optimizer: str,
    elements: int,
    gradients: int,
    precision: Precision,
    factored: float = 1.0,
    step_bytes: float = 0.0,
    *,
    clipped: int,
) -> Segment:
    """Returns the work on `elements` parameters and on `gradients` kept elements.

    With fp16 the gradients are unscaled and checked for overflow in a pass of their own; weights
    are refreshed from the master copy by a separate multi-tensor copy. `step_bytes` per parameter
    live only during the update. `clipped` gradients are scaled.
    """
    size = precision.bytes("grad_accumulate")
    flops = OPTIMIZERS[optimizer].flops
    unscale = 2.0 * size * elements if precision.compute == "fp16" else 0.0
    events = (
        ("unscale", "grad_clip", unscale, 1.0 * elements, elements),
        ("clip", "grad_clip", 2.0 * size * clipped, 1.0 * clipped, clipped),
        (
            f"{optimizer} update",
            "optimizer",
            update_bytes(optimizer, precision, factored) * elements,
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
            transient={"optimizer step": step_bytes * elements}
            if op == "optimizer" and step_bytes
            else {},
        )
        for label, op, num_bytes, work, count in events
        if num_bytes > 0.0
    )
    return Segment(name="optimizer", items=items)
