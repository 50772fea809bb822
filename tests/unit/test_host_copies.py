"""Copies between device and host: their own time, and what they meet on the link of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foretrain.cost.calibration import load
from foretrain.cost.model import build_cost_model
from foretrain.cost.slot import crossing_s
from foretrain.hardware import parse_cluster
from foretrain.predict import CATEGORIES, compile_run, predict
from foretrain.program import CommEvent
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.fairness import fair_rates
from foretrain.simulator.links import Links
from foretrain.simulator.segment_play import EventTimes
from foretrain.simulator.simulate import event_times, simulate

SIZE = 1e9


def run_of(cluster: str, **plan: Any) -> RunSpec:
    return load_run(
        {
            "model": {"family": "llama", "layers": 8, "hidden": 1024, "heads": 16, "vocab": 2048},
            "training": {"sequence": 1024, "microbatch": 2, "global_batch": 4},
            "plan": {"preset": "megatron", "dp": 1, **plan},
            "cluster": cluster,
        }
    )


def with_host_link(run: RunSpec, bytes_s: float) -> RunSpec:
    device = replace(run.cluster.device, host_link=bytes_s)
    return replace(run, cluster=replace(run.cluster, device=device))


def event(collective: Any, ranks: tuple[int, ...]) -> CommEvent:
    return CommEvent(collective=collective, bytes=SIZE, dtype="bf16", ranks=ranks)


def seconds(run: RunSpec, *, meet: bool = True) -> float:
    """The step, also as if nothing met on the links between devices and nodes."""
    program = compile_run(run).program
    model = build_cost_model(run.cluster, run.stack)
    overlap = {name: model.overlap(name) for name in CATEGORIES}
    times = event_times(model.price(program.events), overlap, plain=False)
    return simulate(program, times if meet else replace(times, crossing={})).step_s


@pytest.mark.parametrize("flat", [False, True])
def test_copies_take_their_own_time_where_nothing_hides_them(flat: bool) -> None:
    """Down and up again, one after the other: 2 x bytes / rate, once computation is tiny."""
    run = with_host_link(run_of("1x1 a10", tp=1, cpu_offloading_num_layers=7), 1e6)
    result = predict(run, flat=flat)
    kept = sum(c.host_bytes["activations"] for c in result.program.classes)
    microbatches = 2
    copies = 2 * microbatches * kept / (load("offload")["copy_share"] * 1e6)
    assert result.step_time_s.value == pytest.approx(copies, rel=1e-3)


def test_few_layers_hide_their_copies() -> None:
    """One of eight layers has seven others to go down and up in."""
    run = run_of("1x1 a10", tp=1)
    one = run_of("1x1 a10", tp=1, cpu_offloading_num_layers=1)
    assert seconds(one) == pytest.approx(seconds(run), rel=0.01)


def test_collectives_over_the_slot_slow_copies_and_are_slowed() -> None:
    run = run_of("1x2 a10", tp=2, cpu_offloading_num_layers=7)
    assert seconds(run) > 1.02 * seconds(run, meet=False)
    assert seconds(run) == pytest.approx(predict(run, flat=True).step_time_s.value, rel=0.005)


def test_collectives_on_nvlink_do_not_meet_copies() -> None:
    run = run_of("1x2 a100-sxm-80gb", tp=2, cpu_offloading_num_layers=7)
    assert seconds(run) == seconds(run, meet=False)


def test_without_copies_a_ring_on_the_slot_is_what_it_was() -> None:
    run = run_of("1x2 a10", tp=2)
    assert seconds(run) == seconds(run, meet=False)


def test_what_crosses_the_link_of_a_device() -> None:
    boxes = parse_cluster("2x4 a10, 1x100G ib")
    assert crossing_s(event("all_reduce", (0, 1)), boxes) == pytest.approx(SIZE / 24e9)
    assert crossing_s(event("all_gather", tuple(range(8))), boxes) == pytest.approx(
        SIZE * 7 / 8 / 24e9
    )
    pods = parse_cluster("2x8 h100-sxm, 8x400G ib")
    assert crossing_s(event("all_reduce", tuple(range(8))), pods) == 0.0
    assert crossing_s(event("all_reduce", (0,)), pods) == 0.0
    # a ring enters a node once, and its channels divide over the NICs of eight members
    ring = crossing_s(event("all_reduce", tuple(range(16))), pods)
    assert ring == pytest.approx(SIZE * 2 * 15 / 16 / 8 / 48e9)
    one_nic = parse_cluster("2x8 h100-sxm, 1x400G ib")
    assert crossing_s(event("all_reduce", tuple(range(16))), one_nic) == pytest.approx(8 * ring)
    # of an all-to-all half stays in the node
    assert crossing_s(event("all_to_all", tuple(range(16))), pods) == pytest.approx(SIZE / 2 / 48e9)
    assert crossing_s(event("send_recv", (0, 8)), pods) == pytest.approx(SIZE / 48e9)


def links_of(*events: CommEvent, cluster: str = "1x2 a10") -> tuple[Links, EventTimes]:
    run = run_of(cluster, tp=1, dp=None)
    prices = build_cost_model(parse_cluster(cluster), run.stack).price(list(events))
    times = event_times(prices, {}, plain=False)
    return Links(times), times


def test_directions_are_apart_and_two_on_one_direction_share() -> None:
    copies = [event(kind, (0,)) for kind in ("device_to_host", "host_to_device")]
    links, times = links_of(*copies, event("all_reduce", (0, 1)))
    down, up = (links.uses(0, "other", i) for i in (0, 1))
    ring = links.uses(0, "tp", 2)
    assert fair_rates([down, up]) == [1.0, 1.0]
    share = load("offload")["copy_share"]
    assert [fraction for _, fraction in down] == pytest.approx([share], rel=1e-3)
    assert fair_rates([down, down]) == pytest.approx([0.5 / share] * 2, rel=1e-3)
    rates = fair_rates([down, ring])
    assert max(rates) < 1.0
    assert fair_rates([down, links.uses(1, "tp", 2)]) == [1.0, 1.0]  # the slot of another device
    assert times.latency[0] < 0.01 * times.value[0]


def test_a_copy_and_a_collective_end_later_together() -> None:
    """What a slot carries is conserved: rate x fraction adds up to one."""
    links, _ = links_of(event("device_to_host", (0,)), event("all_reduce", (0, 1)))
    uses = [links.uses(0, "other", 0), links.uses(0, "tp", 1)]
    (out,) = uses[0]
    fractions = [dict(use)[out[0]] for use in uses]
    rates = fair_rates(uses)
    assert sum(r * f for r, f in zip(rates, fractions, strict=True)) == pytest.approx(1.0)
