"""Framework passes: memory-bound work around the operators that no graph shows.

- *accumulate*: a gradient that a GEMM did not add to its accumulator itself is added by a kernel;
- *cast*: weights stored wider than the compute dtype are cast before use (autocast, FSDP shards);
- *unpack, pack*: FSDP copies a gathered buffer into weights and gradients into a flat buffer.

Each is one launch per unit, with the bytes it reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.compiler.events import EventTable
from foretrain.compiler.parameters import Unit
from foretrain.graph.precision import Precision
from foretrain.mesh import Mesh
from foretrain.program import ComputeEvent, Item
from foretrain.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Makes the extra items of a unit; `accumulation` is the number of micro-steps."""

    table: EventTable
    mesh: Mesh
    precision: Precision
    stack: Stack
    accumulation: int

    def before_forward(self, unit: Unit) -> list[Item]:
        """Returns casts of the weights held here and the unpacking of a gathered buffer."""
        held = sum(group.share(group.signature.stored, self.mesh) for group in unit.groups)
        wide = self.precision.bytes("weight")
        compute = self._compute_bytes()
        items: list[Item] = []
        if wide > compute:
            items.append(self._item("cast weights", "cast", held, wide + compute))
        return items + self._unpack(unit)

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
        return 2.0 if compute in ("fp8", "mxfp8", "nvfp4") else self.precision.bytes("compute")

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
