"""Simulation of random runs with made-up prices: folded and flat agree, time adds up."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.program import Program
from foretrain.simulator.segment_play import EventTimes
from foretrain.simulator.simulate import Simulated, simulate
from foretrain.simulator.timeline import build_timeline
from foretrain.strategy.plan import Overlap, Plan
from support import (
    STACK,
    RandomRun,
    compile_small,
    flat_times,
    gpt,
    llama,
    random_runs,
    step_seconds,
)

HOST = st.sampled_from([0.0, 1e-6, 2e-5])
COMM = st.sampled_from([0.0, 0.01, 1.0])


def check_parts(simulated: Simulated) -> None:
    """Every second of every class has one cause."""
    for found in simulated.classes:
        parts = found.parts
        assert parts.total == pytest.approx(simulated.step_s, rel=1e-9)
        named = (parts.compute, parts.recompute, parts.optimizer, parts.bubble, parts.host)
        assert min(*named, parts.wait, parts.other) >= 0.0
        assert min(parts.exposed_communication.values()) >= 0.0
        assert 0.0 <= found.busy_s <= simulated.step_s * (1 + 1e-9)
        assert found.idle_s >= 0.0


@settings(max_examples=30)
@given(run=random_runs(max_world=16, max_layers=4), comm=COMM, host_s=HOST)
def test_folded_equals_flat_in_plain_mode(run: RandomRun, comm: float, host_s: float) -> None:
    program = run.compile().program
    times = flat_times(program, comm=comm, host_s=host_s)
    folded, flat = simulate(program, times), simulate(program, times, flat=True)
    assert flat.step_s == pytest.approx(folded.step_s, rel=1e-9)
    for simulated in (folded, flat):
        check_parts(simulated)
        assert simulated.step_s > 0.0
    for a, b in zip(folded.classes, flat.classes, strict=True):
        assert b.busy_s == pytest.approx(a.busy_s, rel=1e-9)


@settings(max_examples=15)
@given(tp=st.sampled_from([1, 2]), layers=st.integers(1, 3), host_s=st.floats(0.0, 5e-5))
def test_blocks_that_start_from_idle_add_up(tp: int, layers: int, host_s: float) -> None:
    program = compile_small(gpt(layers=layers), Plan(preset="megatron", tp=tp), 2)
    times = flat_times(program.program, host_s=host_s)
    synced = replace(times, synced=True)
    folded, flat = (simulate(program.program, synced, flat=flat) for flat in (False, True))
    # the folded host leaves a block with its last kernel, the flat one with its launch
    assert flat.step_s == pytest.approx(folded.step_s, rel=1e-3)
    check_parts(folded)
    assert folded.step_s >= simulate(program.program, times).step_s * (1 - 1e-9)


@settings(max_examples=15)
@given(tp=st.sampled_from([1, 2]), layers=st.integers(1, 3), host_s=st.floats(0.0, 5e-5))
def test_launches_that_block_add_up(tp: int, layers: int, host_s: float) -> None:
    program = compile_small(gpt(layers=layers), Plan(preset="megatron", tp=tp), 2)
    times = flat_times(program.program, host_s=host_s)
    blocking = replace(times, blocking=True)
    folded, flat = (simulate(program.program, blocking, flat=flat) for flat in (False, True))
    assert flat.step_s == pytest.approx(folded.step_s, rel=1e-3)
    check_parts(folded)
    synced = simulate(program.program, replace(times, synced=True))
    assert folded.step_s >= synced.step_s * (1 - 1e-9)


@pytest.mark.parametrize("cause", ["boundary", "gradients"])
def test_folded_equals_flat_when_collectives_over_tp_meet(cause: str) -> None:
    if cause == "boundary":
        plan = Plan(tp=2, pp=3, zero=0, schedule="gpipe", overlap=Overlap(p2p=True))
        stack = replace(STACK, scatter_gather=True)
        program = compile_small(llama(layers=3), plan, 6, accumulation=2, stack=stack).program
    else:
        plan = Plan(preset="ddp", tp=4, zero=0, sequence_parallel=True, bucket_mib=0.01)
        program = compile_small(gpt(), plan, 8, accumulation=1).program
    times = flat_times(program)
    folded, flat = step_seconds(program, times), step_seconds(program, times, flat=True)
    assert flat == pytest.approx(folded, rel=1e-9)


@settings(max_examples=30)
@given(
    run=random_runs(max_world=16, max_layers=3),
    comm=COMM,
    host_s=HOST,
    press=st.floats(0.0, 0.5),
    slowed=st.floats(0.0, 0.5),
    shared=st.booleans(),
)
def test_folded_is_close_to_flat_with_runtime_effects(
    run: RandomRun, comm: float, host_s: float, press: float, slowed: float, shared: bool
) -> None:
    program = run.compile().program
    times = flat_times(
        program, comm=comm, host_s=host_s, plain=False, press=press, slowed=slowed, shared=shared
    )
    folded, flat = simulate(program, times), simulate(program, times, flat=True)
    assert flat.step_s == pytest.approx(folded.step_s, rel=5e-3)
    for simulated in (folded, flat):
        check_parts(simulated)


@settings(max_examples=5)
@given(run=random_runs(max_world=32, max_layers=4).filter(lambda run: run.world == 32))
def test_32_ranks(run: RandomRun) -> None:
    program = run.compile().program
    times = flat_times(program, comm=0.1, host_s=1e-6)
    folded, flat = simulate(program, times), simulate(program, times, flat=True)
    assert flat.step_s == pytest.approx(folded.step_s, rel=1e-9)


@settings(max_examples=25)
@given(run=random_runs(), host_s=HOST, faster=st.floats(0.0, 1.0))
def test_more_bandwidth_never_slows_a_step(run: RandomRun, host_s: float, faster: float) -> None:
    program = run.compile().program
    slow = step_seconds(program, flat_times(program, host_s=host_s))
    fast = step_seconds(program, flat_times(program, comm=faster, host_s=host_s))
    assert fast <= slow * (1 + 1e-12)


@settings(max_examples=25)
@given(run=random_runs(), fewer=st.floats(0.0, 1.0))
def test_a_faster_host_never_slows_a_step(run: RandomRun, fewer: float) -> None:
    program = run.compile().program
    slow = step_seconds(program, flat_times(program, host_s=2e-5))
    fast = step_seconds(program, flat_times(program, host_s=2e-5 * fewer))
    assert fast <= slow * (1 + 1e-12)


@settings(max_examples=25)
@given(run=random_runs(), comm=COMM)
def test_a_step_takes_no_less_than_the_work_of_its_busiest_rank(
    run: RandomRun, comm: float
) -> None:
    program = run.compile().program
    times = flat_times(program, comm=comm)
    simulated = simulate(program, times)
    for rank_class in program.classes:
        work = sum(
            times.value[item.event]
            for entry in rank_class.entries
            for index in getattr(entry, "segments", ())
            for item in program.segments[index].items
            if item.stream == "compute"
        )
        assert simulated.step_s >= work * (1 - 1e-12)


# -- what must not matter ------------------------------------------------------------------------

ORDERS = [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"), ("tp", "pp", "dp", "cp")]


@settings(max_examples=20)
@given(run=random_runs(max_world=16), order=st.sampled_from(ORDERS), comm=COMM)
def test_the_order_of_the_mesh_changes_nothing_between_equal_links(
    run: RandomRun, order: tuple[str, ...], comm: float
) -> None:
    usual = run.compile().program
    other = run.compile(plan=replace(run.plan, order=order)).program
    a, b = (simulate(p, flat_times(p, comm=comm)) for p in (usual, other))
    assert b.step_s == pytest.approx(a.step_s, rel=1e-12)
    assert [peak.total for peak in b.peaks] == [peak.total for peak in a.peaks]


@settings(max_examples=20)
@given(run=random_runs(max_world=8, max_layers=3), seed=st.integers(0, 99), fluid=st.booleans())
def test_equal_ranks_may_be_shuffled(run: RandomRun, seed: int, fluid: bool) -> None:
    program = run.compile().program
    shuffled = []
    for rank_class in program.classes:
        ranks = list(rank_class.ranks)
        random.Random(seed).shuffle(ranks)
        shuffled.append(replace(rank_class, ranks=tuple(ranks)))
    other = replace(program, classes=tuple(shuffled))
    times = flat_times(program, comm=0.1, host_s=1e-6, plain=not fluid, press=0.2, slowed=0.1)
    expected = step_seconds(program, times, flat=True)
    assert step_seconds(other, times, flat=True) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20)
@given(run=random_runs(max_world=16, max_layers=4), flat=st.booleans())
def test_stages_may_be_listed_in_any_order(run: RandomRun, flat: bool) -> None:
    program = run.compile().program
    other = replace(program, classes=tuple(reversed(program.classes)))
    times = flat_times(program, comm=0.1, host_s=1e-6)
    expected = step_seconds(program, times, flat=flat)
    assert step_seconds(other, times, flat=flat) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=20)
@given(run=random_runs())
def test_equal_programs_give_equal_times_to_the_bit(run: RandomRun) -> None:
    first, second = run.compile().program, run.compile().program
    assert first == second

    def play(program: Program) -> tuple[float, list[float]]:
        times: EventTimes = flat_times(program, comm=0.1, host_s=1e-6, plain=False, press=0.2)
        simulated = simulate(program, times)
        return simulated.step_s, simulated.played.finish_s

    assert play(first) == play(second)


@settings(max_examples=20)
@given(run=random_runs(max_layers=4), host_s=HOST)
def test_the_timeline_lies_within_the_step(run: RandomRun, host_s: float) -> None:
    """Slices of one in-order stream of a class never overlap."""
    program = run.compile().program
    simulated = simulate(program, flat_times(program, comm=0.1, host_s=host_s))
    slices = build_timeline(program, simulated)
    limit = simulated.step_s * (1 + 1e-9)
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for piece in slices:
        assert 0.0 <= piece.start_s < piece.finish_s <= limit
        rows.setdefault((piece.rank_class, piece.stream), []).append(
            (piece.start_s, piece.finish_s)
        )
    for (_, stream), row in rows.items():
        if stream in ("compute", "tp", "gather", "reduce"):
            row.sort()
            for (_, end), (start, _) in pairwise(row):
                assert start >= end - simulated.step_s * 1e-9, stream


def test_sharded_gradients_are_reduced_beside_the_backward_only_where_that_is_asked_for() -> None:
    plans = [Plan(tp=1, zero=2, overlap=Overlap(grad=grad)) for grad in (True, False)]
    beside, after = (compile_small(gpt(), plan, 2).program for plan in plans)
    steps = [simulate(p, flat_times(p, comm=0.1)).step_s for p in (beside, after)]
    assert steps[1] > 1.2 * steps[0]
