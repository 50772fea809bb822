"""The layout algebra: how a tensor lies on the mesh, and what changing that costs.

On every mesh axis a tensor is replicated, split along one of its dims, or a partial sum. Comparing
the layout a producer leaves with the layout a consumer wants gives the communication:

    partial -> replicated  all-reduce        split -> replicated       all-gather
    partial -> split       reduce-scatter    split -> other dim        all-to-all
                                             replicated -> split       a free slice
    owned -> split           scatter         split -> owned            gather

An owned tensor lies whole on one rank (an embedding table and what it gives); which rank that is
does not matter here. The scatters and gathers of all tables run as one all-to-all
(compiler/exchange.py).

See docs/explain/placements.md. The pseudo-dim FLAT splits the elements of the local tensor as one
flat buffer (what ZeRO and FSDP do).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

from foretrain.errors import InternalError
from foretrain.mesh import Mesh

FLAT = "*"

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scatter", "gather", "broadcast"
]


@dataclass(frozen=True, slots=True)
class Layout:
    """`shards` maps dims to the axes that split them (outer first); `partial` lists axes.

    `owned` lists axes along which one rank holds everything and the others nothing.
    """

    shards: tuple[tuple[str, tuple[str, ...]], ...] = ()
    partial: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()

    def axes(self, dim: str) -> tuple[str, ...]:
        """Returns the axes that split `dim`."""
        for name, axes in self.shards:
            if name == dim:
                return axes
        return ()

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Returns all axes that split some dim."""
        return tuple(axis for _, axes in self.shards for axis in axes)

    def __str__(self) -> str:
        parts = [f"S_{dim}({','.join(axes)})" for dim, axes in self.shards]
        if self.partial:
            parts.append(f"P({','.join(self.partial)})")
        if self.owned:
            parts.append(f"O({','.join(self.owned)})")
        return " ".join(parts) or "R"


def layout(
    shards: Mapping[str, Sequence[str]] | None = None,
    partial: Iterable[str] = (),
    owned: Iterable[str] = (),
) -> Layout:
    """Returns a normalised Layout: empty dims dropped, dims and partial axes sorted."""
    items = tuple(sorted((dim, tuple(axes)) for dim, axes in (shards or {}).items() if axes))
    return Layout(items, tuple(sorted(set(partial))), tuple(owned))


REPLICATED = Layout()


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """One inferred collective over the group of `axes`; `elements` in the nccl-tests convention.

    All-reduce: elements per rank; all-gather: gathered elements; reduce-scatter: elements before;
    all-to-all: elements one rank holds; scatter and gather: elements of the owner.
    """

    collective: CollectiveKind
    axes: tuple[str, ...]
    elements: int


def local_elements(elements: int, placed: Layout, mesh: Mesh) -> int:
    """Returns how many of `elements` one rank holds under a layout (rounded up)."""
    return ceil(elements / mesh.size(placed.shard_axes))


def wire_elements(step: Redistribution, mesh: Mesh) -> float:
    """Returns the elements each rank sends in a ring (docs/explain/placements.md)."""
    n = mesh.size(step.axes)
    factor = 2.0 if step.collective == "all_reduce" else 1.0
    return factor * (n - 1) / n * step.elements


def family(axis: str) -> str:
    """Returns what a group over `axis` serves: data (all data axes reduce together), tp, pp."""
    stem = axis.split(".")[0]
    return "data" if stem in ("dp_replicate", "dp_shard", "cp", "dp") else stem


@lru_cache(maxsize=65536)
def redistribute(
    source: Layout, wanted: Layout, elements: int, mesh: Mesh
) -> tuple[Redistribution, ...]:
    """Returns the collectives that turn `source` into `wanted`, cheapest order first.

    `elements` counts the whole, unsplit tensor. Reductions that shrink the tensor and free slices
    come first, all-reduce works on what is left, gathers come last. A dim split over several axes
    keeps their order: only its innermost axes can be gathered or appended. Axes of size 1 cost
    nothing and are ignored.
    """
    if source.owned or wanted.owned:
        return _change_owner(source, wanted, elements, mesh)
    return tuple(_Walk(source, wanted, elements, mesh).run())


def _change_owner(
    source: Layout, wanted: Layout, elements: int, mesh: Mesh
) -> tuple[Redistribution, ...]:
    """From the owner to everyone's part, or back; nothing where one rank is the whole group."""
    axes = tuple(axis for axis in source.owned or wanted.owned if mesh.size(axis) > 1)
    if source == wanted or not axes:
        return ()
    other = wanted if source.owned else source
    split = {axis for axis in other.shard_axes if mesh.size(axis) > 1}
    if (source.owned and wanted.owned) or other.partial or split != set(axes):
        raise InternalError(f"no way from layout {source} to {wanted}")
    kind: CollectiveKind = "scatter" if source.owned else "gather"
    return (Redistribution(collective=kind, axes=axes, elements=elements),)


class _Walk:
    """The state of one redistribution: the current layout, changed step by step."""

    def __init__(self, source: Layout, wanted: Layout, elements: int, mesh: Mesh) -> None:
        def real(axes: Iterable[str]) -> list[str]:
            return [axis for axis in axes if mesh.size(axis) > 1]

        self.mesh = mesh
        self.elements = elements
        self.now = {dim: real(axes) for dim, axes in source.shards}
        self.goal = {dim: real(axes) for dim, axes in wanted.shards}
        self.partial = set(real(source.partial))
        self.keep_partial = set(real(wanted.partial))
        if self.keep_partial - self.partial:
            raise InternalError(f"a partial sum cannot be made: {source} -> {wanted}")
        self.steps: list[Redistribution] = []

    def run(self) -> list[Redistribution]:
        """Returns the steps; every pass either makes progress or ends."""
        self._shrink()
        self._all_reduce()
        while self._gather():
            self._shrink()
        if any(self.now.get(d, []) != self.goal.get(d, []) for d in {*self.now, *self.goal}):
            raise InternalError(f"layout walk stuck at {self.now}, wanted {self.goal}")
        return self.steps

    def _local(self) -> int:
        axes = [axis for names in self.now.values() for axis in names]
        return ceil(self.elements / self.mesh.size(axes))

    def _emit(self, collective: CollectiveKind, axes: Sequence[str], elements: int) -> None:
        self.steps.append(
            Redistribution(collective=collective, axes=tuple(axes), elements=elements)
        )

    def _next_axes(self, dim: str) -> list[str]:
        """The axes that `dim` still needs, if what it has is a prefix of what it wants."""
        now, goal = self.now.get(dim, []), self.goal[dim]
        return goal[len(now) :] if goal[: len(now)] == now else []

    def _shrink(self) -> None:
        """Grows dims as far as they go: free slices first, then reductions, then moves."""
        kinds = (self._slice, self._scatter, self._move)
        while any(kind(dim) for kind in kinds for dim in sorted(self.goal)):
            pass

    def _holder(self, axis: str) -> str | None:
        return next((dim for dim, axes in self.now.items() if axis in axes), None)

    def _slice(self, dim: str) -> bool:
        """Splits `dim` along a replicated axis: every rank keeps its part."""
        todo = self._next_axes(dim)
        if not todo or todo[0] in self.partial or self._holder(todo[0]) is not None:
            return False
        self.now.setdefault(dim, []).append(todo[0])
        return True

    def _scatter(self, dim: str) -> bool:
        """Reduces partial sums into shards of `dim`, one group per family of axes."""
        run = self._partial_run(self._next_axes(dim))
        if not run:
            return False
        self._emit("reduce_scatter", run, self._local())
        self.partial -= set(run)
        self.now.setdefault(dim, []).extend(run)
        return True

    def _move(self, dim: str) -> bool:
        """Moves the innermost axis of another dim to `dim`."""
        todo = self._next_axes(dim)
        holder = self._holder(todo[0]) if todo else None
        if holder is None or holder == dim or self.now[holder][-1] != todo[0]:
            return False
        self._emit("all_to_all", (todo[0],), self._local())
        self.now[holder].pop()
        self.now.setdefault(dim, []).append(todo[0])
        return True

    def _partial_run(self, todo: Sequence[str]) -> list[str]:
        """The leading partial axes of one family: they reduce in one group."""
        run: list[str] = []
        for axis in todo:
            if axis not in self.partial or (run and family(axis) != family(run[0])):
                break
            run.append(axis)
        return run

    def _all_reduce(self) -> None:
        planned = {axis for axes in self.goal.values() for axis in axes}
        rest = [a for a in self.mesh.axes if a in self.partial - self.keep_partial - planned]
        for name in dict.fromkeys(family(axis) for axis in rest):
            axes = [axis for axis in rest if family(axis) == name]
            self._emit("all_reduce", axes, self._local())
            self.partial -= set(axes)

    def _gather(self) -> bool:
        """Gathers the unwanted innermost axes of one dim; False when none is left."""
        for dim in sorted(self.now, key=lambda name: name != FLAT):
            now, goal = self.now[dim], self.goal.get(dim, [])
            common = 0
            while common < min(len(now), len(goal)) and now[common] == goal[common]:
                common += 1
            extra = now[common:]
            if not extra:
                continue
            for name in dict.fromkeys(family(axis) for axis in reversed(extra)):
                axes = [axis for axis in extra if family(axis) == name]
                self.now[dim] = [a for a in self.now[dim] if a not in axes]
                self._emit("all_gather", axes, self._local())
            return True
        return False
