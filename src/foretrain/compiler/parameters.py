"""Weights, gradients and optimizer states of a unit: what their layouts cost per step.

A unit is one block instance, what FSDP wraps. DDP, ZeRO-1/2/3, FSDP and HSDP differ only in the
flat layouts of weight, accumulated gradient and master copy; every collective below is the
difference of two layouts. See docs/explain/placements.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from foretrain.compiler.block import LoweredBlock
from foretrain.compiler.placements import (
    FLAT,
    REPLICATED,
    Redistribution,
    layout,
    local_elements,
    redistribute,
)
from foretrain.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What decides the collectives of a weight: partial axes and the three flat layouts."""

    partial: tuple[str, ...]
    stored: tuple[str, ...]
    accumulated: tuple[str, ...]
    master: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """All trained weights of a unit with one signature; `elements` on one rank before ZeRO."""

    signature: Signature
    elements: int

    def gather(self, mesh: Mesh) -> tuple[Redistribution, ...]:
        """Returns what turns the stored shards into the weight that operators read."""
        stored = layout({FLAT: self.signature.stored})
        return redistribute(stored, REPLICATED, self.elements, mesh)

    def reduce_microstep(self, mesh: Mesh) -> tuple[Redistribution, ...]:
        """Returns the reduction after every backward: none while partial sums are kept."""
        sig = self.signature
        left = [axis for axis in sig.partial if axis not in sig.accumulated]
        return redistribute(
            layout({}, sig.partial), layout({FLAT: sig.accumulated}, left), self.elements, mesh
        )

    def reduce_step(self, mesh: Mesh) -> tuple[Redistribution, ...]:
        """Returns the reduction once per optimizer step, into the layout of the master copy."""
        sig = self.signature
        left = [axis for axis in sig.partial if axis not in sig.accumulated]
        source = layout({FLAT: sig.accumulated}, left)
        return redistribute(source, layout({FLAT: sig.master}), self.elements, mesh)

    def reduce_whole(self, mesh: Mesh) -> tuple[Redistribution, ...]:
        """Returns the reduction once per step where every rank keeps all sums, ZeRO or not."""
        return redistribute(layout({}, self.signature.partial), REPLICATED, self.elements, mesh)

    def publish(self, mesh: Mesh) -> tuple[Redistribution, ...]:
        """Returns what turns updated master shards into stored weights after the optimizer."""
        sig = self.signature
        return redistribute(
            layout({FLAT: sig.master}), layout({FLAT: sig.stored}), self.elements, mesh
        )

    def share(self, axes: Sequence[str], mesh: Mesh) -> int:
        """Returns the elements of one flat shard over `axes`."""
        return ceil(self.elements / mesh.size(axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The weights of one block instance."""

    path: str
    groups: tuple[WeightGroup, ...]
    reshard: bool
    gathered: bool  # some weight has to be gathered before use
    microstep: bool  # gradients are reduced after every backward, not only once per step
    microstep_elements: int  # of which so many on one rank before their reduction
    repeated: bool = True  # a block that repeats: its weights are those of linear layers and norms

    def elements(self) -> int:
        """Returns the trained elements on one rank before flat sharding."""
        return sum(group.elements for group in self.groups)


def tied_weights(lowered: LoweredBlock, mesh: Mesh) -> dict[str, int]:
    """Returns the elements on one rank of every weight that other blocks may share, by its name.

    The name is "block/weight" of the first copy: of a tied weight what it is tied to, of every
    other its own.
    """
    return {
        use.tensor.tied_to or f"{lowered.block.name}/{use.tensor.name}": local_elements(
            use.tensor.size, use.used, mesh
        )
        for use in lowered.weights
        if use.tensor.tied_to is not None or lowered.block.repeat == 1
    }


def make_unit(lowered: LoweredBlock, mesh: Mesh, *, held: Collection[str]) -> Unit:
    """Returns the unit of a block instance.

    A tied weight is left out where an earlier block `held` its copy on the same ranks; the first
    one of a stage counts like any weight. Tables that backward updates are not in it
    (compiler/tables.py): they are neither reduced nor part of the optimizer step.
    """
    groups: dict[Signature, int] = {}
    for use in lowered.weights:
        if use.sparse:
            continue
        elements = local_elements(use.tensor.size, use.used, mesh)
        if use.tensor.tied_to in held:
            continue
        signature = Signature(
            partial=use.partial,
            stored=use.stored,
            accumulated=use.accumulated,
            master=use.master,
        )
        groups[signature] = groups.get(signature, 0) + elements
    weights = tuple(WeightGroup(signature=s, elements=n) for s, n in groups.items())
    reduced = [group for group in weights if group.reduce_microstep(mesh)]
    return Unit(
        path=lowered.path,
        groups=weights,
        reshard=lowered.reshard,
        gathered=any(group.signature.stored for group in weights),
        microstep=bool(reduced),
        microstep_elements=sum(group.elements for group in reduced),
        repeated=lowered.input is not None and lowered.output is not None,
    )


def merge(groups: Iterable[WeightGroup]) -> tuple[WeightGroup, ...]:
    """Returns one group per signature with the elements of all."""
    total: dict[Signature, int] = {}
    for group in groups:
        total[group.signature] = total.get(group.signature, 0) + group.elements
    return tuple(WeightGroup(signature=s, elements=n) for s, n in total.items())
