"""Framework passes: memory-bound work around the operators that no graph shows.

- *accumulate*: a gradient that a GEMM did not add to its accumulator itself is added by a kernel;
- *cast*: weights stored wider than the compute dtype are cast before use (autocast, FSDP shards);
- *unpack, pack*: FSDP copies a gathered buffer into weights and gradients into a flat buffer.

Each is one launch per unit, with the bytes it reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foretrain.compiler.events import EventTable
from foretrain.compiler.parameters import Unit
from foretrain.graph.precision import LOW, Precision
from foretrain.mesh import Mesh
from foretrain.program import ComputeEvent, Item, Segment
from foretrain.stack import Stack


def fresh_gradients(unit: Unit, precision: Precision, stack: Stack) -> float:
    """Returns the bytes of gradients of one backward that wait for their accumulation."""
    waits = stack.late_accumulate and precision.grad != precision.grad_accumulate
    return unit.elements() * precision.bytes("grad") if waits and not unit.microstep else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Makes the extra items of a unit; `accumulation` is the number of micro-steps."""

    table: EventTable
    mesh: Mesh
    precision: Precision
    stack: Stack
    accumulation: int

    def around_forward(self, segment: Segment, unit: Unit, *, again: bool) -> Segment:
        """Returns the forward of a unit with what the framework launches around its operators.

        With `again` it runs again in backward: cast weights die with each of the two passes.
        """
        copies = self.weight_copies(unit)
        if again and copies:
            segment = _changed(segment, {"weight copies": -copies})
        return _joined(self.before_forward(unit), segment, [])

    def around_backward(self, segment: Segment, unit: Unit, *, again: bool) -> Segment:
        """Returns the backward of a unit with what the framework launches around its operators."""
        copies = self.weight_copies(unit)
        segment = _changed(segment, self.change_of_backward(unit))
        if again and copies:
            segment = _begun(segment, {"weight copies": copies})
        return _joined(self.before_backward(unit), segment, self.after_backward(unit))

    def before_forward(self, unit: Unit) -> list[Item]:
        """Returns casts of the weights held here and the unpacking of a gathered buffer."""
        held = sum(group.share(group.signature.stored, self.mesh) for group in unit.groups)
        wide = self.precision.bytes("weight")
        compute = self._compute_bytes()
        items: list[Item] = []
        if wide > compute:
            cast = self._item("cast weights", "cast", held, wide + compute)
            copies = self.weight_copies(unit)
            items.append(replace(cast, delta={"weight copies": copies}) if copies else cast)
        return items + self._unpack(unit)

    def weight_copies(self, unit: Unit) -> float:
        """Returns the bytes of cast weights that live until backward has read them (autocast).

        Shards that are cast for a gather die with it.
        """
        compute = self._compute_bytes()
        if unit.gathered or self.precision.bytes("weight") <= compute:
            return 0.0
        held = sum(group.share(group.signature.stored, self.mesh) for group in unit.groups)
        return held * compute

    def change_of_backward(self, unit: Unit) -> dict[str, float]:
        """Returns what a backward leaves behind (+) or frees (-) beside activations, by part."""
        copies, fresh = self.weight_copies(unit), fresh_gradients(unit, self.precision, self.stack)
        change = {"weight copies": -copies, "new gradients": fresh}
        return {part: value for part, value in change.items() if value}

    def before_backward(self, unit: Unit) -> list[Item]:
        """Returns the unpacking of weights that are gathered again."""
        return self._unpack(unit) if unit.reshard else []

    def after_backward(self, unit: Unit) -> list[Item]:
        """Returns the packing of gradients for a reduction, and their accumulation."""
        grad, kept = self.precision.bytes("grad"), self.precision.bytes("grad_accumulate")
        items: list[Item] = []
        if unit.gathered and unit.microstep:
            size = grad + self.precision.bytes("grad_reduce")
            items.append(self._item("pack gradients", "copy", unit.microstep_elements, size))
        separate = self.accumulation > 1 or kept != grad
        if separate and "wgrad_accumulate" not in self.stack.fused:
            held = sum(g.share(g.signature.accumulated, self.mesh) for g in unit.groups)
            read = kept if self.accumulation > 1 else 0.0
            items.append(self._item("accumulate gradients", "grad_add", held, grad + read + kept))
        return items

    def _compute_bytes(self) -> float:
        compute = self.precision.compute
        return 2.0 if compute in LOW else self.precision.bytes("compute")

    def _unpack(self, unit: Unit) -> list[Item]:
        gathered = sum(group.elements for group in unit.groups if group.signature.stored)
        if not gathered:
            return []
        return [self._item("unpack weights", "copy", gathered, 2.0 * self._compute_bytes())]

    def _item(self, label: str, op: str, elements: int, size: float) -> Item:
        event = ComputeEvent(
            op=op,
            direction="forward",
            dtype=self.precision.dtype("grad_accumulate"),
            shape=(("rows", 1.0), ("cols", float(elements)), ("operands", 2.0)),
            flops=float(elements),
            bytes=elements * size,
        )
        return Item(label=label, event=self.table.intern(event))


def _changed(segment: Segment, change: Mapping[str, float]) -> Segment:
    """Returns a segment whose last item also changes live bytes by `change`."""
    if not change or not segment.items:
        return segment
    *first, last = segment.items
    return replace(segment, items=(*first, replace(last, delta={**last.delta, **change})))


def _begun(segment: Segment, change: Mapping[str, float]) -> Segment:
    """Returns a segment whose first item also changes live bytes by `change`."""
    if not segment.items:
        return segment
    first, *rest = segment.items
    delta = {
        part: first.delta.get(part, 0.0) + change.get(part, 0.0) for part in (*first.delta, *change)
    }
    return replace(segment, items=(replace(first, delta=delta), *rest))


def _joined(before: list[Item], segment: Segment, after: list[Item]) -> Segment:
    """Returns a segment with items before and after; what waits for its items still does."""
    shift = len(before)
    moved = [
        replace(item, waits=tuple(wait + shift for wait in item.waits)) for item in segment.items
    ]
    return replace(segment, items=(*before, *moved, *after))
