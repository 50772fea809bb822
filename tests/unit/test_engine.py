"""The event engine against closed forms: who starts when, how rates stretch, what is refused."""

from __future__ import annotations

import math

import pytest

from foretrain.errors import InternalError
from foretrain.simulator.fairness import fair_rates
from foretrain.simulator.fluid import interactions
from foretrain.simulator.reference import play
from foretrain.simulator.tasks import COMM, COMPUTE, HOST, TaskGraph


def transfers(*links: tuple[tuple[int, float], ...], work_s: float = 1.0) -> TaskGraph:
    """Transfers that all start at 0, each on a stream of its own."""
    graph = TaskGraph()
    for uses in links:
        graph.add_task(kind=COMM, streams=(graph.add_stream(),), work_s=work_s, links=uses)
    return graph


def side_by_side(*, press: float, slowed: float, work_s: tuple[float, float]) -> TaskGraph:
    """One computation (task 0) and one communication (task 1) on one device."""
    graph = TaskGraph()
    compute, network = graph.add_stream(0), graph.add_stream(0)
    graph.add_task(kind=COMPUTE, streams=(compute,), work_s=work_s[0])
    graph.add_task(kind=COMM, streams=(network,), work_s=work_s[1], press=press, slowed=slowed)
    return graph


@pytest.mark.parametrize("fluid", [True, False])
def test_empty_graph_takes_no_time(fluid: bool) -> None:
    assert play(TaskGraph(), fluid=fluid).makespan_s == 0.0


@pytest.mark.parametrize("fluid", [True, False])
def test_chain_on_a_stream_adds_up_with_latencies(fluid: bool) -> None:
    graph = TaskGraph()
    stream = graph.add_stream(0)
    for work in (1.0, 0.0, 2.0):
        graph.add_task(kind=COMPUTE, streams=(stream,), work_s=work, latency_s=0.25)
    played = play(graph, fluid=fluid)
    assert played.start_s == [0.0, 1.25, 1.5]
    assert played.finish_s == [1.25, 1.5, 3.75]
    assert played.makespan_s == 3.75


@pytest.mark.parametrize("fluid", [True, False])
def test_fork_join_waits_for_the_longest_branch(fluid: bool) -> None:
    graph = TaskGraph()
    fork = graph.add_task(kind=HOST, streams=(), work_s=1.0)
    branches = tuple(
        graph.add_task(kind=COMPUTE, streams=(graph.add_stream(d),), work_s=w, preds=(fork,))
        for d, w in enumerate((1.0, 5.0, 3.0))
    )
    join = graph.add_task(kind=HOST, streams=(), work_s=1.0, preds=branches)
    played = play(graph, fluid=fluid)
    assert [played.start_s[b] for b in branches] == [1.0, 1.0, 1.0]
    assert played.start_s[join] == 6.0
    assert played.makespan_s == 7.0


def test_rendezvous_starts_with_the_last_member_and_holds_all_streams() -> None:
    graph = TaskGraph()
    early, late = graph.add_stream(0), graph.add_stream(1)
    graph.add_task(kind=COMPUTE, streams=(early,), work_s=1.0)
    graph.add_task(kind=COMPUTE, streams=(late,), work_s=4.0)
    meet = graph.add_task(kind=COMM, streams=(early, late), work_s=2.0)
    after = graph.add_task(kind=COMPUTE, streams=(early,), work_s=1.0)
    played = play(graph)
    assert (played.start_s[meet], played.finish_s[meet]) == (4.0, 6.0)
    assert played.start_s[after] == 6.0


def test_launch_order_decides_not_the_task_id() -> None:
    graph = TaskGraph()
    stream = graph.add_stream(0)
    for work in (1.0, 2.0):
        graph.add_task(kind=COMPUTE, streams=(), work_s=work)
    graph.order[stream] = [1, 0]
    assert play(graph).start_s == [2.0, 0.0]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 7])
def test_1f1b_with_equal_stages_takes_m_plus_p_minus_1_slots(
    stages: int, microbatches: int
) -> None:
    forward_s, backward_s = 1.0, 2.0
    graph = TaskGraph()
    slots = [one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    ids: dict[tuple[int, str, int], int] = {}
    for stage, order in enumerate(slots):
        stream = graph.add_stream(stage)
        for kind, microbatch in order:
            ids[stage, kind, microbatch] = graph.add_task(
                kind=COMPUTE,
                streams=(stream,),
                work_s=forward_s if kind == "F" else backward_s,
            )
    for (stage, kind, microbatch), task in ids.items():
        if kind == "F" and stage > 0:
            graph.preds[task] = (ids[stage - 1, "F", microbatch],)
        if kind == "B" and stage < stages - 1:
            graph.preds[task] = (ids[stage + 1, "B", microbatch],)
    expected = (microbatches + stages - 1) * (forward_s + backward_s)
    assert play(graph).makespan_s == pytest.approx(expected, rel=1e-12)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards left."""
    warm = min(stages - stage - 1, microbatches)
    order = [("F", i) for i in range(warm)]
    for i in range(microbatches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(microbatches - warm, microbatches)]


# -------------------------------------------------------------------------- overlap on a device
def test_overlap_stretches_both_and_the_rest_runs_at_full_speed() -> None:
    played = play(side_by_side(press=0.2, slowed=0.5, work_s=(1.0, 1.0)))
    assert played.finish_s[0] == pytest.approx(1.2)
    # 1.2 s at rate 1 / 1.5 leave 0.2 of the work
    assert played.finish_s[1] == pytest.approx(1.4)


def test_plain_ignores_overlap_and_links() -> None:
    graph = side_by_side(press=0.2, slowed=0.5, work_s=(1.0, 1.0))
    assert play(graph, fluid=False).finish_s == [1.0, 1.0]
    shared = transfers(((0, 1.0),), ((0, 1.0),))
    assert play(shared, fluid=False).makespan_s == 1.0


def test_the_largest_press_counts_and_other_devices_do_not() -> None:
    graph = side_by_side(press=0.2, slowed=0.0, work_s=(1.0, 10.0))
    graph.add_task(kind=COMM, streams=(graph.add_stream(0),), work_s=10.0, press=1.0)
    graph.add_task(kind=COMM, streams=(graph.add_stream(1),), work_s=10.0, press=9.0)
    assert play(graph).finish_s[0] == pytest.approx(2.0)


def test_work_on_two_devices_feels_the_heavier_one() -> None:
    graph = side_by_side(press=0.25, slowed=0.0, work_s=(0.0, 10.0))
    heavy, compute = graph.add_stream(1), graph.add_stream(1)
    graph.add_task(kind=COMM, streams=(heavy,), work_s=10.0, press=1.0)
    task = graph.add_task(kind=COMPUTE, streams=(0, compute), work_s=1.0)
    assert play(graph).finish_s[task] == pytest.approx(2.0)


def test_latency_is_not_stretched_but_presses() -> None:
    graph = TaskGraph()
    compute, network = graph.add_stream(0), graph.add_stream(0)
    graph.add_task(kind=COMPUTE, streams=(compute,), work_s=1.0)
    graph.add_task(kind=COMM, streams=(network,), latency_s=3.0, work_s=1.0, press=1.0, slowed=1.0)
    # the collective runs from 0 on: computation needs 2 s; its own latency and work are undisturbed
    assert play(graph).finish_s == pytest.approx([2.0, 4.0])


def test_back_to_back_kernels_slow_a_collective_as_one_long_kernel_does() -> None:
    graph = TaskGraph()
    compute, network = graph.add_stream(0), graph.add_stream(0)
    for _ in range(10):
        graph.add_task(kind=COMPUTE, streams=(compute,), work_s=0.1)
    task = graph.add_task(kind=COMM, streams=(network,), work_s=2.0, press=0.25, slowed=0.25)
    whole = play(side_by_side(press=0.25, slowed=0.25, work_s=(1.0, 2.0)))
    assert play(graph).finish_s[task] == pytest.approx(whole.finish_s[1], rel=1e-12)


# -------------------------------------------------------------------------------- shared links
def test_two_flows_on_one_link_take_twice_as_long() -> None:
    assert play(transfers(((0, 1.0),), ((0, 1.0),))).finish_s == [2.0, 2.0]


def test_flows_that_fit_together_do_not_slow_each_other() -> None:
    assert play(transfers(((0, 0.5),), ((0, 0.5),))).finish_s == [1.0, 1.0]
    assert play(transfers(((0, 1.0),), ((1, 1.0),))).finish_s == [1.0, 1.0]


def test_a_late_flow_shares_only_what_is_left() -> None:
    graph = transfers(((0, 1.0),), work_s=2.0)
    wait = graph.add_task(kind=HOST, streams=(), work_s=1.0)
    late = graph.add_task(kind=COMM, streams=(), work_s=2.0, preds=(wait,), links=((0, 1.0),))
    played = play(graph)
    assert played.finish_s[0] == pytest.approx(3.0)  # 1 alone, 2 at half the rate
    assert played.finish_s[late] == pytest.approx(4.0)


def test_no_bytes_move_during_the_latency_of_a_transfer() -> None:
    graph = transfers(((0, 1.0),))
    graph.add_task(kind=COMM, streams=(), latency_s=1.0, work_s=1.0, links=((0, 1.0),))
    assert play(graph).finish_s == [1.0, 2.0]


def test_three_flows_max_min() -> None:
    # flows 0 and 1 share link 0; flow 1 needs half of link 1; flow 2 gets what remains there
    flows = (((0, 1.0),), ((0, 1.0), (1, 0.5)), ((1, 1.0),))
    assert fair_rates(flows) == [0.5, 0.5, 0.75]
    assert play(transfers(*flows)).finish_s == pytest.approx([2.0, 2.0, 4.0 / 3.0])


def test_a_flow_behind_a_full_link_leaves_its_share_to_the_others() -> None:
    flows = (((0, 1.0),), ((0, 1.0),), ((0, 1.0), (1, 1.0)), ((1, 1.0),))
    assert fair_rates(flows) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_ten_tenths_fill_a_link_exactly() -> None:
    assert fair_rates([((0, 0.1),)] * 10) == [1.0] * 10
    assert fair_rates([((0, 1 / 49),)] * 49) == [1.0] * 49


def test_slowdown_and_share_multiply() -> None:
    graph = side_by_side(press=0.0, slowed=1.0, work_s=(100.0, 1.0))
    graph.links[1] = ((0, 1.0),)
    graph.add_task(kind=COMM, streams=(), work_s=100.0, links=((0, 1.0),))
    assert play(graph).finish_s[1] == pytest.approx(4.0)


def test_what_cannot_interact_is_found_before_the_start() -> None:
    graph = TaskGraph()
    stream = graph.add_stream(0)
    for _ in range(3):  # one stream: the link is never used by two at a time
        graph.add_task(kind=COMM, streams=(stream,), work_s=1.0, links=((0, 1.0),), press=0.5)
    assert interactions(graph) is None
    graph.add_task(kind=COMM, streams=(graph.add_stream(1),), work_s=1.0, links=((0, 1.0),))
    assert interactions(graph) is not None


# ------------------------------------------------------------------------------- what is refused
def test_deadlock_names_heads_waits_and_the_cycle() -> None:
    graph = TaskGraph()
    left, right = graph.add_stream(0), graph.add_stream(1)
    graph.add_task(kind=COMPUTE, streams=(left,), work_s=1.0, label="fine")
    graph.add_task(kind=COMM, streams=(left, right), work_s=1.0, label="gather A")
    graph.add_task(kind=COMM, streams=(left, right), work_s=1.0, label="gather B")
    graph.add_task(kind=COMPUTE, streams=(left,), work_s=1.0, label="victim")
    graph.order[right].reverse()  # one rank launches B before A
    for fluid in (True, False):
        with pytest.raises(InternalError) as raised:
            play(graph, fluid=fluid)
        text = str(raised.value)
        assert "3 of 4 tasks can never start" in text
        assert "'gather A' (task 1) waits for 'gather B' (task 2)" in text
        assert "'gather B' (task 2) waits for 'gather A' (task 1)" in text
        assert "'gather A' (task 1) -> 'gather B' (task 2) -> 'gather A' (task 1)" in text
        assert "fine" not in text


def test_deadlock_of_a_task_that_waits_for_itself() -> None:
    graph = TaskGraph()
    graph.add_task(kind=HOST, streams=(), work_s=1.0, preds=(0,), label="loop")
    with pytest.raises(InternalError, match=r"'loop' \(task 0\) -> 'loop' \(task 0\)"):
        play(graph)
    twice = TaskGraph()
    stream = twice.add_stream(0)
    twice.add_task(kind=COMPUTE, streams=(stream, stream), work_s=1.0, label="twice")
    with pytest.raises(InternalError, match="deadlock"):
        play(twice)


def test_deadlock_in_a_contended_graph() -> None:
    graph = side_by_side(press=0.2, slowed=0.5, work_s=(1.0, 1.0))
    graph.preds[0] = (1,)
    graph.preds[1] = (0,)
    with pytest.raises(InternalError, match="2 of 2 tasks can never start"):
        play(graph)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9])
@pytest.mark.parametrize("field", ["work_s", "latency_s", "press", "slowed"])
@pytest.mark.parametrize("fluid", [True, False])
def test_bad_numbers_are_refused_with_the_label(field: str, bad: float, fluid: bool) -> None:
    graph = side_by_side(press=0.1, slowed=0.1, work_s=(1.0, 1.0))
    graph.label[1] = "all-reduce of layer 3"
    getattr(graph, field)[1] = bad
    with pytest.raises(InternalError) as raised:
        play(graph, fluid=fluid)
    assert "all-reduce of layer 3" in str(raised.value)
    assert field in str(raised.value)


def test_all_problems_are_collected_but_the_list_stays_short() -> None:
    graph = transfers(*([((0, 1.0),)] * 30))
    graph.work_s = [math.nan] * 30
    with pytest.raises(InternalError) as raised:
        play(graph)
    assert len(raised.value.problems) == 9
    assert "and 22 more" in str(raised.value)


@pytest.mark.parametrize("links", [((0, 1.5),), ((0, math.nan),), ((0, -0.1),), ((0, 0.2),) * 2])
def test_bad_links_are_refused(links: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InternalError, match="link"):
        play(transfers(links))


def test_bad_indices_kinds_and_lengths_are_refused() -> None:
    graph = transfers((), ())
    graph.preds[1] = (-1,)
    with pytest.raises(InternalError, match="no such task"):
        play(graph)
    graph = transfers((), ())
    graph.order[0] = [2]
    with pytest.raises(InternalError, match="stream 0"):
        play(graph)
    graph = transfers(())
    graph.kind[0] = 7
    with pytest.raises(InternalError, match="unknown kind"):
        play(graph)
    graph = transfers(())
    graph.label.append("one too many")
    with pytest.raises(InternalError, match="label"):
        play(graph)
    graph = side_by_side(press=0.1, slowed=0.0, work_s=(1.0, 1.0))
    graph.press[0] = 0.1
    with pytest.raises(InternalError, match="no communication"):
        play(graph)
