"""Properties of the event engine on random programs.

`check_schedule` needs only start and finish times: a task starts when everything before it has
ended, and the integral of its rate is its work, where the rates follow from who runs when. Both
together have one solution, so this is a full oracle that shares no code with the engine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.simulator import fluid
from foretrain.simulator.fairness import fair_rates
from foretrain.simulator.reference import dependents, longest_path, play
from foretrain.simulator.tasks import COMM, COMPUTE, HOST, Played, TaskGraph

# few distinct values make ties; zero lengths are frequent
SECONDS = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 0.1, 0.3]) | st.floats(1e-6, 10.0)
FACTORS = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
FRACTIONS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.0])


@st.composite
def programs(draw: st.DrawFn, *, contended: bool = True) -> TaskGraph:
    """Up to 16 tasks on up to 5 streams of up to 3 devices, 3 links; free of deadlock."""
    graph = TaskGraph()
    num_streams = draw(st.integers(1, 5))
    for _ in range(num_streams):
        graph.add_stream(draw(st.integers(-1, 2)))
    for task in range(draw(st.integers(1, 16))):
        kind = draw(st.sampled_from([COMPUTE, COMM, COMM, HOST]))
        active = contended and kind == COMM
        links = draw(st.dictionaries(st.integers(0, 2), FRACTIONS, max_size=3)) if active else {}
        graph.add_task(
            kind=kind,
            streams=tuple(sorted(draw(st.sets(st.integers(0, num_streams - 1), max_size=3)))),
            latency_s=draw(SECONDS) if draw(st.booleans()) else 0.0,
            work_s=draw(SECONDS),
            preds=tuple(draw(st.sets(st.integers(0, task - 1), max_size=2))) if task else (),
            press=draw(FACTORS) if active else 0.0,
            slowed=draw(FACTORS) if active else 0.0,
            links=tuple(links.items()),
            label=f"t{task}",
        )
    return graph


@st.composite
def crowds(draw: st.DrawFn) -> TaskGraph:
    """Transfers that meet on few links at few moments: components of links grow and fall apart."""
    graph = TaskGraph()
    for task in range(draw(st.integers(2, 9))):
        links = draw(st.dictionaries(st.integers(0, 3), FRACTIONS, min_size=1, max_size=2))
        graph.add_task(
            kind=COMM,
            streams=(),
            latency_s=draw(st.sampled_from([0.0, 0.0, 0.5, 2.0])),
            work_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
            preds=(draw(st.integers(0, task - 1)),) if task > 5 else (),
            links=tuple(links.items()),
        )
    return graph


@st.composite
def overlaps(draw: st.DrawFn) -> TaskGraph:
    """Computation and communication side by side on two devices, some of it on both."""
    graph = TaskGraph()
    for device in (0, 0, 0, 1, 1, 1):
        graph.add_stream(device)
    for task in range(draw(st.integers(2, 12))):
        where = draw(st.sampled_from([(0,), (0,), (3,), (0, 3)]))
        if draw(st.booleans()):
            kind, press, slowed = COMPUTE, 0.0, 0.0
        else:
            lane = draw(st.integers(1, 2))
            where = tuple(first + lane for first in where)
            kind, press, slowed = COMM, draw(st.sampled_from([0.0, 0.25, 1.0])), draw(FACTORS)
        graph.add_task(
            kind=kind,
            streams=where,
            latency_s=draw(st.sampled_from([0.0, 0.0, 0.25])),
            work_s=draw(st.sampled_from([0.5, 1.0, 1.5, 4.0])),
            preds=(draw(st.integers(0, task - 1)),) if task and draw(st.booleans()) else (),
            press=press,
            slowed=slowed,
        )
    return graph


def streams_of(graph: TaskGraph) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in graph.kind]
    for stream, order in enumerate(graph.order):
        for task in order:
            found[task].append(stream)
    return found


def water_fill(uses: dict[int, dict[int, float]]) -> dict[int, float]:
    """Max-min rates in exact fractions, over all links at once."""
    rates: dict[int, Fraction] = {}
    level = Fraction(0)
    while len(rates) < len(uses):
        rising = [task for task in uses if task not in rates]
        steps = [1 - level]
        for link in {link for task in rising for link in uses[task]}:
            used = sum(Fraction(uses[t].get(link, 0)) * rates.get(t, level) for t in uses)
            slope = sum(Fraction(uses[t].get(link, 0)) for t in rising)
            steps.append((1 - used) / slope)
        level += max(min(steps), Fraction(0))
        full = {
            link
            for task in rising
            for link in uses[task]
            if sum(Fraction(uses[t].get(link, 0)) * rates.get(t, level) for t in uses) >= 1
        }
        rates |= {t: level for t in rising if level >= 1 or full & set(uses[t])}
    return {task: float(rate) for task, rate in rates.items()}


def rates_between(graph: TaskGraph, played: Played, middle: float) -> dict[int, float]:
    """The rate of every task that works (is past its latency) at the moment `middle`."""
    tasks = range(graph.num_tasks)
    running = [t for t in tasks if played.start_s[t] <= middle < played.finish_s[t]]
    working = [t for t in running if played.start_s[t] + graph.latency_s[t] <= middle]
    where = [{graph.device[s] for s in on} - {-1} for on in streams_of(graph)]
    shares = water_fill({t: dict(graph.links[t]) for t in working})
    rates: dict[int, float] = {}
    for task in working:
        beside = [t for t in running if where[t] & where[task]]
        if graph.kind[task] == COMPUTE:
            press = max((graph.press[t] for t in beside if graph.kind[t] == COMM), default=0.0)
            rates[task] = 1.0 / (1.0 + press)
        elif graph.kind[task] == COMM:
            disturbed = any(graph.kind[t] == COMPUTE for t in beside)
            rates[task] = shares[task] / (1.0 + graph.slowed[task] * disturbed)
        else:
            rates[task] = 1.0
    return rates


def check_schedule(graph: TaskGraph, played: Played) -> None:
    before = [list(preds) for preds in graph.preds]
    for order in graph.order:
        for first, second in pairwise(order):
            before[second].append(first)
    for task, others in enumerate(before):
        assert played.start_s[task] == max((played.finish_s[t] for t in others), default=0.0)
    done = [0.0] * graph.num_tasks
    begun = [s + a for s, a in zip(played.start_s, graph.latency_s, strict=True)]
    times = sorted({*played.start_s, *played.finish_s, *begun})
    for left, right in pairwise(times):
        if right - left < 1e-12 * right:
            continue  # one moment, apart by rounding
        for task, rate in rates_between(graph, played, (left + right) / 2).items():
            done[task] += rate * (right - left)
    assert done == pytest.approx(graph.work_s, rel=1e-9, abs=1e-9)
    assert played.makespan_s == max(played.finish_s)


@given(programs())
def test_every_rate_integrates_to_the_work(graph: TaskGraph) -> None:
    check_schedule(graph, play(graph))


@given(overlaps())
def test_overlap_stretches_exactly_while_it_lasts(graph: TaskGraph) -> None:
    check_schedule(graph, play(graph))


@given(crowds())
def test_crowded_links_share_max_min_at_every_moment(graph: TaskGraph) -> None:
    check_schedule(graph, play(graph))


@given(crowds())
def test_progressive_filling_is_max_min_and_fills_no_link_twice(graph: TaskGraph) -> None:
    uses = graph.links
    rates = fair_rates(uses)
    exact = water_fill({task: dict(links) for task, links in enumerate(uses)})
    assert rates == pytest.approx([exact[task] for task in range(len(uses))], rel=1e-12)
    for link in range(4):
        load = sum(rate * dict(on).get(link, 0.0) for rate, on in zip(rates, uses, strict=True))
        assert load <= 1.0 + 1e-9


@given(programs(contended=False))
def test_without_contention_fluid_is_plain(graph: TaskGraph) -> None:
    assert play(graph) == play(graph, fluid=False)


@given(programs(contended=False))
def test_the_event_loop_agrees_with_the_longest_path(graph: TaskGraph) -> None:
    # play() would not enter the event loop where nothing can interact: do it by hand
    free = fluid.Interactions(
        devices=[()] * graph.num_tasks, links=[()] * graph.num_tasks, num_devices=0
    )
    walked = fluid.walk(graph, free, *dependents(graph))
    assert walked == longest_path(graph, *dependents(graph))
    # every compute task tracked on its device, with nobody there to slow it
    watched = replace(
        free,
        devices=[(0,) if kind == COMPUTE else () for kind in graph.kind],
        num_devices=1,
    )
    tracked = fluid.walk(graph, watched, *dependents(graph))
    assert tracked[1] == pytest.approx(walked[1], rel=1e-12)


@given(programs())
def test_contention_never_helps_a_graph_without_reordering(graph: TaskGraph) -> None:
    plain, slow = play(graph, fluid=False), play(graph)
    for fast_s, slow_s in zip(plain.finish_s, slow.finish_s, strict=True):
        assert slow_s >= fast_s * (1.0 - 1e-12)


@given(programs(), st.data())
def test_shorter_tasks_never_lengthen_the_step(graph: TaskGraph, data: st.DataObject) -> None:
    # a theorem without contention only: with it, a transfer that starts earlier may disturb more
    shrink = data.draw(
        st.lists(st.floats(0.0, 1.0), min_size=graph.num_tasks, max_size=graph.num_tasks)
    )
    shorter = replace(
        graph, work_s=[w * factor for w, factor in zip(graph.work_s, shrink, strict=True)]
    )
    fast, slow = play(shorter, fluid=False), play(graph, fluid=False)
    assert all(a <= b for a, b in zip(fast.finish_s, slow.finish_s, strict=True))


@given(programs(), st.randoms(use_true_random=False))
def test_renaming_streams_devices_and_links_changes_nothing(
    graph: TaskGraph, rng: random.Random
) -> None:
    streams = list(range(len(graph.order)))
    rng.shuffle(streams)
    device_name = {-1: -1, 0: 2, 1: 0, 2: 1}
    link_name = {0: 1, 1: 2, 2: 0}
    renamed = replace(
        graph,
        order=[graph.order[s] for s in streams],
        device=[device_name[graph.device[s]] for s in streams],
        links=[tuple((link_name[link], f) for link, f in uses) for uses in graph.links],
    )
    same, expected = play(renamed), play(graph)
    assert same.start_s == pytest.approx(expected.start_s, rel=1e-9, abs=1e-12)
    assert same.finish_s == pytest.approx(expected.finish_s, rel=1e-9, abs=1e-12)


@given(programs(), st.randoms(use_true_random=False), st.booleans())
def test_task_ids_are_only_names(graph: TaskGraph, rng: random.Random, slow: bool) -> None:
    ids = list(range(graph.num_tasks))  # new id -> old id
    rng.shuffle(ids)
    new = {old: task for task, old in enumerate(ids)}
    shuffled = TaskGraph(
        order=[[new[task] for task in order] for order in graph.order],
        device=graph.device,
        kind=[graph.kind[old] for old in ids],
        latency_s=[graph.latency_s[old] for old in ids],
        work_s=[graph.work_s[old] for old in ids],
        preds=[tuple(new[p] for p in graph.preds[old]) for old in ids],
        press=[graph.press[old] for old in ids],
        slowed=[graph.slowed[old] for old in ids],
        links=[graph.links[old] for old in ids],
        label=[graph.label[old] for old in ids],
    )
    finish = play(shuffled, fluid=slow).finish_s
    expected = play(graph, fluid=slow).finish_s
    assert [finish[new[task]] for task in range(graph.num_tasks)] == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@given(programs())
def test_playing_leaves_the_graph_alone_and_repeats_bit_for_bit(graph: TaskGraph) -> None:
    copy = replace(graph, order=[list(order) for order in graph.order], preds=list(graph.preds))
    assert play(graph) == play(graph)
    assert graph == copy
