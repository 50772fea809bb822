"""Redistribution of tensors, checked by carrying it out on numpy arrays of every rank.

The interpreter below knows nothing of the walk in compiler/placements.py. A rank holds an array
over the *whole* tensor and a mask of the elements it has; each collective does to them what MPI
says it does, and at the end every rank must hold its part of the wanted layout, with right values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foretrain.compiler.placements import (
    FLAT,
    REPLICATED,
    Layout,
    Redistribution,
    family,
    layout,
    redistribute,
    wire_elements,
)
from foretrain.errors import InternalError
from foretrain.mesh import Mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp.0", "tp.1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor, a mesh, and two layouts."""

    mesh: Mesh
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    source: Layout
    wanted: Layout

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def steps(self) -> tuple[Redistribution, ...]:
        return redistribute(self.source, self.wanted, self.elements, self.mesh)


@st.composite
def cases(draw: st.DrawFn, *, dims: Sequence[str] = ("a", "b", "c")) -> Case:
    """Up to 4 axes of sizes 1-4 (32 ranks at most), up to 3 dims, any legal pair of layouts."""
    axes = tuple(draw(st.permutations(AXES))[: draw(st.integers(1, 4))])
    sizes = tuple(draw(st.integers(1, 4)) for _ in axes)
    assume(prod(sizes) <= 32)
    mesh = Mesh(axes=axes, sizes=sizes)
    used = tuple(dims[: draw(st.integers(1, len(dims)))])
    before: dict[str, list[str]] = {dim: [] for dim in used}
    after: dict[str, list[str]] = {dim: [] for dim in used}
    partial, kept = set[str](), set[str]()
    places = ["replicated", "partial", *used]
    for axis in draw(st.permutations(axes)):
        place = draw(st.sampled_from(places))
        if place == "partial":
            partial.add(axis)
        elif place != "replicated":
            before[place].append(axis)
    for axis in draw(st.permutations(axes)):
        place = draw(st.sampled_from(places))
        if place == "partial":
            if axis in partial:
                kept.add(axis)
        elif place != "replicated":
            after[place].append(axis)
    shape = tuple(
        prod(mesh.size(axis) for axis in {*before[dim], *after[dim]}) * draw(st.integers(1, 2))
        for dim in used
    )
    return Case(
        mesh=mesh,
        dims=used,
        shape=shape,
        source=layout(before, partial),
        wanted=layout(after, kept),
    )


# -- the interpreter -----------------------------------------------------------------------------


@dataclass(slots=True)
class Rank:
    """What one rank holds: `data` is meaningful where `mask` is true."""

    data: NDArray[np.int64]
    mask: NDArray[np.bool_]


def part(case: Case, shards: dict[str, list[str]], rank: int) -> NDArray[np.bool_]:
    """The elements of the part of a rank: axes of a dim cut it one inside the other."""
    place = case.mesh.coordinates(rank)
    mask = np.ones(case.shape, dtype=bool)
    for i, dim in enumerate(case.dims):
        low, size = 0, case.shape[i]
        for axis in shards.get(dim, ()):
            size //= case.mesh.size(axis)
            low += place[axis] * size
        inside = np.zeros(case.shape[i], dtype=bool)
        inside[low : low + size] = True
        mask &= inside.reshape([-1 if j == i else 1 for j in range(len(case.dims))])
    return mask


def truth(case: Case) -> NDArray[np.int64]:
    return np.arange(1, case.elements + 1, dtype=np.int64).reshape(case.shape) * 7919


def start(case: Case) -> list[Rank]:
    """Every rank with its part; along partial axes the parts add up to the truth."""
    whole, mesh = truth(case), case.mesh
    shards = {dim: list(axes) for dim, axes in case.source.shards}
    random = np.random.default_rng(case.elements)
    ranks = [Rank(whole.copy(), part(case, shards, rank)) for rank in range(mesh.world_size)]
    if mesh.size(case.source.partial) > 1:
        for rank in range(mesh.world_size):
            group = mesh.group(rank, case.source.partial)
            if group[0] != rank:
                continue
            pieces = random.integers(-1000, 1000, (len(group) - 1, *case.shape))
            for other, piece in zip(group[1:], pieces, strict=True):
                ranks[other].data = piece
            ranks[rank].data = whole - pieces.sum(axis=0)
    return ranks


class Interpreter:
    """Carries out collectives; the layout is tracked only to know which slice is free."""

    def __init__(self, case: Case) -> None:
        self.case, self.mesh = case, case.mesh
        self.ranks = start(case)
        self.shards = {d: self._real(case.source.axes(d)) for d in case.dims}
        self.goal = {d: self._real(case.wanted.axes(d)) for d in case.dims}
        self.partial = set(self._real(case.source.partial))
        self.volume = 0.0  # elements one rank sends, from the buffers that were really there

    def _real(self, axes: Sequence[str]) -> list[str]:
        return [axis for axis in axes if self.mesh.size(axis) > 1]

    def run(self) -> None:
        for step in self.case.steps():
            self.slice_to_fit(step)
            self.check_and_count(step)
            getattr(self, step.collective)(step.axes)
        for dim in self.case.dims:
            self.shards[dim] += self.free_axes(dim)
        self.keep_own_part()

    def free_axes(self, dim: str) -> list[str]:
        """The next wanted axes of a dim along which ranks hold copies: cutting costs nothing."""
        taken = {axis for axes in self.shards.values() for axis in axes} | self.partial
        now, goal = self.shards[dim], self.goal[dim]
        if goal[: len(now)] != now:
            return []
        return list(takewhile(lambda axis: axis not in taken, goal[len(now) :]))

    def slice_to_fit(self, step: Redistribution) -> None:
        """Cuts what may be cut for nothing until the buffers have the size that the step says."""
        n = self.mesh.size(step.axes) if step.collective == "all_gather" else 1
        whole = int(self.ranks[0].mask.sum()) * n
        options = {dim: self.free_axes(dim) for dim in self.case.dims}
        for counts in product(*(range(len(axes), -1, -1) for axes in options.values())):
            cut = {dim: axes[:k] for (dim, axes), k in zip(options.items(), counts, strict=True)}
            if whole == step.elements * prod(self.mesh.size(axes) for axes in cut.values()):
                for dim, axes in cut.items():
                    self.shards[dim] += axes
                if any(cut.values()):
                    self.keep_own_part()
                return

    def keep_own_part(self) -> None:
        for rank, state in enumerate(self.ranks):
            own = part(self.case, self.shards, rank)
            assert not (own & ~state.mask).any(), "a rank lacks elements of its own part"
            state.mask = own

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        return sorted({self.mesh.group(rank, axes) for rank in range(self.mesh.world_size)})

    def check_and_count(self, step: Redistribution) -> None:
        """`elements` is what the buffers really hold, in the nccl-tests convention."""
        n = self.mesh.size(step.axes)
        local = int(self.ranks[0].mask.sum())
        assert {int(state.mask.sum()) for state in self.ranks} == {local}
        assert n > 1
        assert step.elements == (local * n if step.collective == "all_gather" else local)
        factor = 2 if step.collective == "all_reduce" else 1
        self.volume += factor * (n - 1) / n * step.elements

    def sums(self, axes: Sequence[str]) -> None:
        """Every rank gets the sum over its group, element by element."""
        assert set(axes) <= self.partial, "a reduction of what is no partial sum"
        for group in self.groups(axes):
            masks = [self.ranks[rank].mask for rank in group]
            assert all((mask == masks[0]).all() for mask in masks)
            total = sum(self.ranks[rank].data for rank in group)
            for rank in group:
                self.ranks[rank].data = np.array(total)
        self.partial -= set(axes)

    def union(self, axes: Sequence[str]) -> None:
        """Every rank gets the elements of its group; two ranks never bring the same one."""
        for group in self.groups(axes):
            masks = [self.ranks[rank].mask for rank in group]
            assert (sum(mask.astype(int) for mask in masks) <= 1).all(), "an element came twice"
            data = sum(
                np.where(m, self.ranks[r].data, 0) for r, m in zip(group, masks, strict=True)
            )
            for rank in group:
                self.ranks[rank] = Rank(np.array(data), np.logical_or.reduce(masks))

    def all_reduce(self, axes: Sequence[str]) -> None:
        self.sums(axes)

    def reduce_scatter(self, axes: Sequence[str]) -> None:
        self.sums(axes)
        self.append(axes)
        self.keep_own_part()

    def all_gather(self, axes: Sequence[str]) -> None:
        assert not set(axes) & self.partial
        holder = next(now for now in self.shards.values() if set(axes) <= set(now))
        self.union(axes)
        for axis in axes:
            holder.remove(axis)

    def all_to_all(self, axes: Sequence[str]) -> None:
        assert not set(axes) & self.partial
        holder = next(now for now in self.shards.values() if set(axes) <= set(now))
        self.union(axes)
        for axis in axes:
            holder.remove(axis)
        self.append(axes)
        self.keep_own_part()

    def append(self, axes: Sequence[str]) -> None:
        for dim, goal in self.goal.items():
            now = self.shards[dim]
            if goal[: len(now)] == now and goal[len(now) : len(now) + len(axes)] == list(axes):
                now.extend(axes)
                return
        raise AssertionError(f"no dim is to be split by {axes}")

    def check_end(self) -> None:
        whole, mesh, wanted = truth(self.case), self.mesh, self.case.wanted
        assert self.shards == self.goal
        shards = {dim: list(axes) for dim, axes in wanted.shards}
        for rank, state in enumerate(self.ranks):
            assert (state.mask == part(self.case, shards, rank)).all()
            kept = [axis for axis in wanted.partial if axis in mesh.axes]
            group = mesh.group(rank, kept)
            total = sum(self.ranks[other].data for other in group)
            assert (np.array(total)[state.mask] == whole[state.mask]).all()


@settings(max_examples=150)
@given(cases())
def test_every_rank_ends_with_the_right_values(case: Case) -> None:
    machine = Interpreter(case)
    machine.run()
    machine.check_end()
    inferred = sum(wire_elements(step, case.mesh) for step in case.steps())
    assert inferred == pytest.approx(machine.volume)


@given(cases(dims=(FLAT,)))
def test_flat_shards_are_redistributed_like_one_dim(case: Case) -> None:
    machine = Interpreter(case)
    machine.run()
    machine.check_end()


# -- volumes -------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(cases())
def test_no_less_is_sent_than_ranks_lack(case: Case) -> None:
    """A rank must receive each wanted element that it has not, or has only a partial sum of."""
    mesh = case.mesh
    before = {dim: list(axes) for dim, axes in case.source.shards}
    after = {dim: list(axes) for dim, axes in case.wanted.shards}
    reduced = mesh.size(case.source.partial) > mesh.size(case.wanted.partial)
    lacking = 0
    for rank in range(mesh.world_size):
        wanted = part(case, after, rank)
        held = part(case, before, rank)
        lacking += int((wanted if reduced else wanted & ~held).sum())
    sent = sum(wire_elements(step, mesh) for step in case.steps()) * mesh.world_size
    if reduced and case.wanted.partial:
        return  # who holds the sum of a kept partial axis is a matter of choice
    assert sent >= lacking * (1 - 1e-12)


@st.composite
def independent_cases(draw: st.DrawFn) -> Case:
    """Every dim is split by at most one axis in both layouts together: order cannot matter."""
    dims = ("a", "b", "c", "d", "e")
    free = list(dims)
    axes = tuple(draw(st.permutations(AXES))[: draw(st.integers(1, 4))])
    mesh = Mesh(axes=axes, sizes=tuple(draw(st.integers(1, 4)) for _ in axes))
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    partial, kept = set[str](), set[str]()
    moves = ["stay", "slice", "reduce", "keep", "reduce_scatter", "gather", "move"]
    for axis in axes:
        move = draw(st.sampled_from(moves))
        if move == "move" and len(free) < 2 + len(axes):
            move = "gather"
        if move in ("reduce", "keep", "reduce_scatter"):
            partial.add(axis)
        if move == "keep":
            kept.add(axis)
        if move in ("gather", "move"):
            before[free.pop(draw(st.integers(0, len(free) - 1)))] = [axis]
        if move in ("slice", "reduce_scatter", "move"):
            after[free.pop(draw(st.integers(0, len(free) - 1)))] = [axis]
    shape = tuple(mesh.size((before.get(d) or after.get(d) or [""])[0]) * 2 for d in dims)
    return Case(
        mesh=mesh,
        dims=dims,
        shape=shape,
        source=layout(before, partial),
        wanted=layout(after, kept),
    )


def analytic_volume(case: Case) -> float:
    """Elements sent per rank in the cheapest order, from the definition of each transition."""
    mesh = case.mesh
    before = {axis: dim for dim, axes in case.source.shards for axis in axes}
    after = {axis: dim for dim, axes in case.wanted.shards for axis in axes}
    local = case.elements / mesh.size(tuple(before))
    total = 0.0
    for axis in after:
        if axis not in before and axis not in case.source.partial:
            local /= mesh.size(axis)  # a free slice
    for axis in after:
        if axis in case.source.partial:
            n = mesh.size(axis)
            total += (n - 1) / n * local
            local /= n
    for axis in after:
        if axis in before:
            n = mesh.size(axis)
            total += (n - 1) / n * local
    groups: dict[str, int] = {}
    for axis in set(case.source.partial) - set(case.wanted.partial) - set(after):
        groups[family(axis)] = groups.get(family(axis), 1) * mesh.size(axis)
    total += sum(2 * (n - 1) / n * local for n in groups.values())
    for axis in before:
        if axis not in after:
            n = mesh.size(axis)
            total += (n - 1) * local
            local *= n
    return total


@settings(max_examples=120)
@given(independent_cases())
def test_volume_of_independent_axes_is_the_analytic_one(case: Case) -> None:
    sent = sum(wire_elements(step, case.mesh) for step in case.steps())
    assert sent == pytest.approx(analytic_volume(case))


X = Mesh(axes=("dp_shard", "tp"), sizes=(4, 2))


@pytest.mark.parametrize(
    ("source", "wanted", "expected"),
    [
        (layout(partial=["tp"]), REPLICATED, ("all_reduce", 64, 2 * 1 / 2 * 64)),
        (layout(partial=["tp"]), layout({"a": ["tp"]}), ("reduce_scatter", 64, 1 / 2 * 64)),
        (layout({"a": ["tp"]}), REPLICATED, ("all_gather", 64, 1 / 2 * 64)),
        (layout({"a": ["tp"]}), layout({"b": ["tp"]}), ("all_to_all", 32, 1 / 2 * 32)),
        (layout(partial=["dp_shard"]), REPLICATED, ("all_reduce", 64, 2 * 3 / 4 * 64)),
        (layout({FLAT: ["dp_shard"]}), REPLICATED, ("all_gather", 64, 3 / 4 * 64)),
    ],
    ids=["P-R", "P-S", "S-R", "S-S", "P-R over 4", "flat"],
)
def test_the_five_transitions(
    source: Layout, wanted: Layout, expected: tuple[str, int, float]
) -> None:
    (step,) = redistribute(source, wanted, 64, X)
    kind, elements, sent = expected
    assert (step.collective, step.elements) == (kind, elements)
    assert wire_elements(step, X) == sent


def test_a_slice_of_what_is_replicated_is_free() -> None:
    assert redistribute(REPLICATED, layout({"a": ["tp"], "b": ["dp_shard"]}), 64, X) == ()


def test_what_stays_costs_nothing_and_axes_of_size_one_do_not_count() -> None:
    mesh = Mesh(axes=("pp", "tp"), sizes=(1, 2))
    kept = layout({"a": ["tp"]}, ["pp"])
    assert redistribute(kept, kept, 64, mesh) == ()
    assert redistribute(kept, layout({"a": ["tp"], "b": ["pp"]}), 64, mesh) == ()


def test_a_partial_sum_cannot_be_made() -> None:
    with pytest.raises(InternalError, match="partial"):
        redistribute(REPLICATED, layout(partial=["tp"]), 64, X)


def test_data_axes_reduce_in_one_group_and_tensor_axes_apart() -> None:
    mesh = Mesh(axes=("dp_replicate", "dp_shard", "cp", "tp"), sizes=(2, 2, 2, 2))
    steps = redistribute(layout(partial=mesh.axes), REPLICATED, 64, mesh)
    assert sorted((step.axes for step in steps), key=len) == [
        ("tp",),
        ("dp_replicate", "dp_shard", "cp"),
    ]


def test_hybrid_sharding_scatters_then_reduces_the_shard() -> None:
    """HSDP: reduce-scatter inside the sharding group, all-reduce of 1/4 between the replicas."""
    mesh = Mesh(axes=("dp_replicate", "dp_shard"), sizes=(2, 4))
    steps = redistribute(layout(partial=mesh.axes), layout({FLAT: ["dp_shard"]}), 64, mesh)
    assert [(s.collective, s.axes, s.elements) for s in steps] == [
        ("reduce_scatter", ("dp_shard",), 64),
        ("all_reduce", ("dp_replicate",), 16),
    ]
