"""How software reduces gradients and hands out new weights, and collectives that are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.cost.calibration import load
from foretrain.cost.host import host_seconds
from foretrain.hardware import parse_cluster
from foretrain.predict import predict
from foretrain.program import CommEvent, ComputeEvent
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.run.stacks import load_stack
from foretrain.simulator.result import EventCost, Result

NANOTRON = load_stack("nanotron")
#: The weights of `run_of`: nine per layer; word embedding, final norm, head.
WEIGHTS = 4 * 9 + 1 + 2


def run_of(zero: int, **stack: object) -> RunSpec:
    run = load_run(
        {
            "model": {
                "family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8,
                "ffn": 2816, "vocab": 32768,
            },
            "training": {
                "sequence": 2048, "global_batch": 64, "microbatch": 1, "precision": "bf16",
                "optimizer": "adamw",
            },
            "plan": {"preset": "megatron", "tp": 2, "zero": zero, "sequence_parallel": True},
            "cluster": "2x8 h100-sxm, 32x100G efa",
            "stack": "nanotron",
        }
    )  # fmt: skip
    return replace(run, stack=replace(run.stack, **stack))  # type: ignore[arg-type]


def of_data(result: Result) -> dict[str, list[EventCost]]:
    """The collectives of more than the gradient norm over the eight replicas, by kind."""
    found: dict[str, list[EventCost]] = {}
    for item in result.events:
        event = item.event
        if isinstance(event, CommEvent) and len(event.ranks) == 8 and event.bytes > 8.0:
            found.setdefault(event.collective, []).append(item)
    return found


def moved(items: list[EventCost]) -> float:
    total = 0.0
    for item in items:
        assert isinstance(item.event, CommEvent)
        total += item.count * item.event.count * item.event.bytes
    return total


def test_zero_1_of_nanotron_reduces_whole_gradients_at_once() -> None:
    whole = of_data(predict(run_of(1)))
    assert set(whole) == {"all_reduce", "all_gather"}
    assert len(whole["all_reduce"]) == 2  # norms are sums over tp too: apart
    assert all(isinstance(i.event, CommEvent) and i.event.count == 1 for i in whole["all_reduce"])
    shards = of_data(predict(run_of(1, whole_gradients=False)))
    assert set(shards) == {"reduce_scatter", "all_gather"}
    # fp32 gradients and bf16 weights of the same parameters
    assert moved(whole["all_reduce"]) == pytest.approx(moved(shards["reduce_scatter"]), rel=1e-3)
    assert moved(whole["all_reduce"]) == pytest.approx(2 * moved(whole["all_gather"]), rel=1e-3)


def test_without_zero_nanotron_hides_the_reduction_behind_the_last_backward() -> None:
    hidden, shown = predict(run_of(0)), predict(run_of(0, whole_gradients=False))
    assert moved(of_data(hidden)["all_reduce"]) == pytest.approx(
        moved(of_data(shown)["all_reduce"]), rel=1e-3
    )
    exposed = [r.time_parts.exposed_communication["dp"] for r in (hidden, shown)]
    assert exposed[0] < 0.5 * exposed[1]


def test_gathered_weights_are_taken_apart_one_by_one() -> None:
    result = predict(run_of(1))
    events = [item.event for item in result.events if isinstance(item.event, ComputeEvent)]
    (apart,) = [event for event in events if event.op == "weight_parts"]
    assert apart.get("copies") == 8 * WEIGHTS
    assert host_seconds(apart, apart.get("copies"), NANOTRON) == pytest.approx(
        8 * WEIGHTS * (NANOTRON.host_launch_us + NANOTRON.zero_gather_us) * 1e-6
    )
    assert not any(
        isinstance(item.event, ComputeEvent) and item.event.op == "weight_parts"
        for item in predict(run_of(0)).events
    )


def test_owners_broadcast_their_weights_one_after_another() -> None:
    shards = of_data(predict(run_of(1)))["all_gather"]
    owners = of_data(predict(run_of(1, owner_broadcasts=True)))
    assert set(owners) == {"all_reduce", "broadcast"}
    assert all(isinstance(i.event, CommEvent) and i.event.count == 8 for i in owners["broadcast"])
    assert moved(owners["broadcast"]) == pytest.approx(moved(shards))


def test_there_are_no_more_owners_than_weights() -> None:
    run = run_of(1, owner_broadcasts=True)
    wide = replace(
        run,
        training=replace(run.training, global_batch=1024),
        cluster=parse_cluster("64x8 h100-sxm, 32x100G efa"),
    )
    counts = {
        item.event.count
        for item in predict(wide).events
        if isinstance(item.event, CommEvent) and item.event.collective == "broadcast"
    }
    assert counts == {WEIGHTS}


def test_gradients_are_copied_to_their_buckets_and_back() -> None:
    def extra(passes: float) -> float:
        return predict(run_of(1, bucket_passes=passes)).step_time_s.value - plain

    plain = predict(run_of(1)).step_time_s.value
    assert extra(6.0) > 0.0
    # twice the passes take twice as long but for the launch
    assert extra(12.0) == pytest.approx(2.0 * extra(6.0), rel=0.05)


def test_a_check_takes_longer_with_every_rank_and_more_on_other_nodes() -> None:
    step = load("step")
    checked = replace(NANOTRON, checked_collectives=True)

    def more(ranks: tuple[int, ...], collective: str = "all_gather", count: int = 1) -> float:
        event = CommEvent(collective=collective, bytes=1e6, dtype="bf16", ranks=ranks, count=count)  # type: ignore[arg-type]
        usual, longer = (host_seconds(event, count, s, 8) for s in (NANOTRON, checked))
        return (longer - usual) * 1e6

    base, near, far = (float(step[f"check_{key}_us"]) for key in ("base", "near", "far"))
    assert more((0, 1)) == pytest.approx(base + near)
    assert more(tuple(range(8))) == pytest.approx(base + 7 * near)
    assert more(tuple(range(16))) == pytest.approx(base + 7 * near + 8 * far)
    assert more((0, 8, 16)) == pytest.approx(base + 2 * far)
    assert more((0, 1), count=3) == pytest.approx(3 * (base + near))
    assert more((0, 8), collective="send_recv") == 0.0


def test_checks_make_a_small_step_wait_for_the_host() -> None:
    usual, checked = (predict(run_of(0, checked_collectives=c)) for c in (False, True))
    layers, microbatches, collectives = 4, 8, 10
    step = load("step")
    check_s = 1e-6 * (float(step["check_base_us"]) + float(step["check_near_us"]))
    assert checked.step_time_s.value > usual.step_time_s.value
    assert checked.step_time_s.value > layers * microbatches * collectives * check_s


def test_a_host_that_waits_for_every_launch_hides_nothing() -> None:
    def step(host_op_us: float, blocking: bool) -> float:
        run = run_of(0, launch_blocking=blocking, host_op_us=host_op_us, host_op_us_by={})
        return predict(run).step_time_s.value

    # device-bound: launches cost little unless they block, then every one of them counts
    assert step(1.0, True) > step(1.0, False)
    more = step(2.0, True) - step(1.0, True)
    assert more > 2.0 * abs(step(2.0, False) - step(1.0, False))
    assert step(3.0, True) - step(2.0, True) == pytest.approx(more, rel=1e-6)


def test_older_libraries_slow_kernels_only() -> None:
    now, then = (predict(run_of(1, kernel_factor=factor)) for factor in (1.0, 1.5))
    kernels = [
        (a.value_s, b.value_s)
        for a, b in zip(now.events, then.events, strict=True)
        if isinstance(a.event, ComputeEvent) and a.event.op == "gemm"
    ]
    assert kernels
    assert all(a < b <= 1.5 * a + 1e-12 for a, b in kernels)
    transfers = [
        (a.value_s, b.value_s)
        for a, b in zip(now.events, then.events, strict=True)
        if isinstance(a.event, CommEvent)
    ]
    assert all(a == b for a, b in transfers)
