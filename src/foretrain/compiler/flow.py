"""Placing layouts: walks operators in launch order and infers every change of layout.

The result is a list of launches: operators with their local splits, and re-layouts of tensors.
One re-layout serves all consumers that want the same layout. Partial sums pass through linear
operators and are resolved where the algebra of docs/explain/placements.md says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foretrain.compiler.placements import Layout, Redistribution, layout, redistribute
from foretrain.compiler.splits import Split, check_split, full_split, wanted_layout
from foretrain.errors import PlanError, Problem
from foretrain.graph.ir import Op, Operand, Tensor
from foretrain.mesh import Mesh

Copy = tuple[str, Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLaunch:
    """An operator with its split; `reads` and `writes` are copies of activations."""

    op: Op
    split: Split
    reads: tuple[Copy, ...]
    writes: tuple[Copy, ...]
    recomputed: bool = False
    owner: int | None = None  # the rank of the data group that does it; None: every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """A change of layout of one activation or gradient: collectives one after the other."""

    source: Copy
    target: Copy
    steps: tuple[Redistribution, ...]
    tensor: Tensor
    recomputed: bool = False
    group: str = ""  # the operator that wants it first
    owner: int | None = None  # of the end that one rank owns


Launch = OpLaunch | Relayout


@dataclass(slots=True, kw_only=True)
class Flow:
    """Layouts of the tensors of one block on one mesh; `produced` is how each was first left."""

    tensors: Mapping[str, Tensor]
    mesh: Mesh
    path: str
    produced: dict[str, Layout] = field(default_factory=dict[str, Layout])
    copies: dict[Copy, Copy] = field(default_factory=dict[Copy, Copy])
    weights: dict[str, Layout] = field(default_factory=dict[str, Layout])
    splits: dict[str, Split] = field(default_factory=dict[str, Split])
    owners: dict[str, int] = field(default_factory=dict[str, int])  # of operators
    tensor_owners: dict[str, int] = field(default_factory=dict[str, int])
    owner_axes: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list[Problem])

    def arrive(self, tensor: str, placed: Layout) -> None:
        """Declares a tensor that comes from outside the block."""
        self.produced[tensor] = placed
        self.copies[(tensor, placed)] = (tensor, placed)

    def run(
        self, op: Op, own: Split, inherited: Split, *, recomputed: bool = False
    ) -> list[Launch]:
        """Returns the launches of one operator: the re-layouts it needs, then itself."""
        sources = [
            (operand, self.tensors[operand.tensor], self.produced[operand.tensor])
            for operand in op.inputs
            if operand.tensor in self.produced
        ]
        split = full_split(op, own, inherited, sources, self.mesh)
        self.problems += check_split(op, split, self.mesh, f"{self.path}.{op.name}")
        self.splits[op.name] = split
        passed = self._passed_partials(op, split)
        launches: list[Launch] = []
        reads: list[Copy] = []
        for operand in op.inputs:
            tensor = self.tensors[operand.tensor]
            want = wanted_layout(operand, tensor, split)
            if operand.tensor not in self.produced:
                self._use_weight(operand, tensor, want)
                continue
            keep = set(self.produced[operand.tensor].partial) & passed
            want = layout(dict(want.shards), keep)
            launches += self.convert(operand.tensor, want, op.name, recomputed=recomputed)
            reads.append((operand.tensor, want))
        writes = tuple(self._write(op, operand, split, passed) for operand in op.outputs)
        launches.append(
            OpLaunch(op=op, split=split, reads=tuple(reads), writes=writes, recomputed=recomputed)
        )
        return launches

    def run_owned(self, op: Op, owner: int) -> list[Launch]:
        """Returns the launches of an operator that one rank of the data group does alone."""
        want = layout(owned=self.owner_axes)
        self.owners[op.name] = owner
        self.splits[op.name] = {d.name: () for d in op.dims}
        launches: list[Launch] = []
        reads: list[Copy] = []
        for operand in op.inputs:
            if operand.tensor not in self.produced:
                self._use_weight(operand, self.tensors[operand.tensor], want)
                continue
            relayouts = self.convert(operand.tensor, want, op.name)
            launches += [replace(r, owner=owner) for r in relayouts if isinstance(r, Relayout)]
            reads.append((operand.tensor, want))
        for operand in op.outputs:
            self.arrive(operand.tensor, want)
            self.tensor_owners[operand.tensor] = owner
        writes = tuple((operand.tensor, want) for operand in op.outputs)
        split = self.splits[op.name]
        done = OpLaunch(op=op, split=split, reads=tuple(reads), writes=writes, owner=owner)
        return [*launches, done]

    def convert(
        self, name: str, want: Layout, group: str, *, recomputed: bool = False
    ) -> list[Launch]:
        """Returns the re-layout that makes the copy (name, want), nothing if it exists."""
        if (name, want) in self.copies:
            return []
        source = self.produced[name]
        tensor = self.tensors[name]
        steps = redistribute(source, want, tensor.size, self.mesh)
        if not steps:  # a view: a free slice, or axes of size one
            self.copies[(name, want)] = self.copies[(name, source)]
            return []
        self.copies[(name, want)] = (name, want)
        return [
            Relayout(
                source=(name, source),
                target=(name, want),
                steps=steps,
                tensor=tensor,
                recomputed=recomputed,
                group=group,
                owner=self.tensor_owners.get(name),
            )
        ]

    def root(self, copy: Copy) -> Copy:
        """Returns the copy whose storage `copy` views."""
        while self.copies[copy] != copy:
            copy = self.copies[copy]
        return copy

    def _use_weight(self, operand: Operand, tensor: Tensor, want: Layout) -> None:
        if tensor.role != "weight":
            return  # tokens, targets: every rank reads its own part
        known = self.weights.setdefault(operand.tensor, want)
        if known != want:
            raise PlanError(
                Problem(
                    what=f"two operators want weight {operand.tensor} in different layouts",
                    where=self.path,
                    value=f"{known} and {want}",
                    way_out="split both operators alike",
                )
            )

    def _write(self, op: Op, operand: Operand, split: Split, passed: set[str]) -> Copy:
        """The layout an output is left in: split dims that it does not index stay partial."""
        tensor = self.tensors[operand.tensor]
        summed = {a for dim, axes in split.items() if dim not in operand.dims for a in axes}
        shards = dict(wanted_layout(operand, tensor, split).shards)
        placed = layout(shards, {a for a in summed | passed if self.mesh.size(a) > 1})
        self.arrive(operand.tensor, placed)
        return (operand.tensor, placed)

    def _passed_partials(self, op: Op, split: Split) -> set[str]:
        """The axes on which partial sums pass through `op` unresolved.

        A sum passes them when all its operands are partial on the axis, a contraction when
        exactly one is; never on an axis that splits a dim of the operator itself.
        """
        if not op.linear:
            return set()
        partials = [
            set(self.produced[op.inputs[i].tensor].partial)
            if op.inputs[i].tensor in self.produced
            else set[str]()
            for i in op.linear
        ]
        used = {axis for axes in split.values() for axis in axes}
        axes = set[str]().union(*partials) - used
        if op.kind == "contraction" or len(partials) == 1:
            return {axis for axis in axes if sum(axis in p for p in partials) == 1}
        return {axis for axis in axes if all(axis in p for p in partials)}


def as_split(source: Split, op: Op) -> Split:
    """Returns the split of a source operator restricted to the dims of a derived one."""
    names = {d.name for d in op.dims}
    return {dim: axes for dim, axes in source.items() if dim in names}
