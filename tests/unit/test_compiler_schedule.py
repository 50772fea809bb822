"""Pipeline schedules as lists of slots: order, completeness, micro-batches in flight."""

from __future__ import annotations

import pytest

from foretrain.compiler.schedule import SCHEDULES, Slot
from foretrain.errors import PlanError
from foretrain.run.load import load_run
from foretrain.strategy.plan import SCHEDULES as NAMES

SHAPES = [(1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 8, 1), (4, 2, 1), (4, 4, 1), (4, 16, 1), (5, 3, 1)]
INTERLEAVED = [(2, 2, 2), (2, 8, 2), (3, 6, 2), (4, 4, 3), (4, 16, 2), (2, 4, 5)]


def slots(kind: str, stage: int, pp: int, m: int, v: int = 1) -> list[Slot]:
    return SCHEDULES[kind](stage, pp, m, v, None)


def in_flight(order: list[Slot]) -> int:
    """The most forwards whose backward has not run yet."""
    level = most = 0
    for slot in order:
        level += 1 if slot.phase == "F" else -1
        most = max(most, level)
    return most


def test_every_schedule_has_a_name_in_the_plan() -> None:
    assert set(SCHEDULES) == set(NAMES)


CASES = [
    *(("gpipe", *shape) for shape in SHAPES + INTERLEAVED),
    *(("1f1b", *shape) for shape in SHAPES),
    *(("interleaved", *shape) for shape in INTERLEAVED),
]


@pytest.mark.parametrize(("kind", "pp", "m", "v"), CASES)
def test_every_micro_batch_passes_every_chunk_once_in_each_direction(
    kind: str, pp: int, m: int, v: int
) -> None:
    every = {(phase, i, c) for phase in "FB" for i in range(m) for c in range(v)}
    for stage in range(pp):
        order = slots(kind, stage, pp, m, v)
        assert len(order) == 2 * m * v
        assert set(order) == every
        for i in range(m):
            for c in range(v):
                assert order.index(Slot("F", i, c)) < order.index(Slot("B", i, c))


@pytest.mark.parametrize(("kind", "pp", "m", "v"), CASES)
def test_a_schedule_can_be_executed(kind: str, pp: int, m: int, v: int) -> None:
    """Stages run their slots in order, each when its input has arrived: all must get through."""
    waiting = [slots(kind, stage, pp, m, v) for stage in range(pp)]
    done: set[tuple[str, int, int]] = set()
    last = pp * v - 1

    def ready(stage: int, slot: Slot) -> bool:
        virtual = slot.chunk * pp + stage
        if slot.phase == "F":
            return virtual == 0 or ("F", slot.microbatch, virtual - 1) in done
        return virtual == last or ("B", slot.microbatch, virtual + 1) in done

    progress = True
    while progress:
        progress = False
        for stage, queue in enumerate(waiting):
            while queue and ready(stage, queue[0]):
                slot = queue.pop(0)
                done.add((slot.phase, slot.microbatch, slot.chunk * pp + stage))
                progress = True
    assert not any(waiting)


@pytest.mark.parametrize(("pp", "m", "v"), SHAPES)
def test_in_flight_under_1f1b_and_gpipe(pp: int, m: int, v: int) -> None:
    for stage in range(pp):
        assert in_flight(slots("1f1b", stage, pp, m)) == min(m, pp - stage)
        assert in_flight(slots("gpipe", stage, pp, m)) == m


@pytest.mark.parametrize(("pp", "m", "v"), INTERLEAVED)
def test_in_flight_under_interleaving(pp: int, m: int, v: int) -> None:
    """min(m v, 2 (p - i - 1) + (v - 1) p + 1) chunks of L / (p v) layers."""
    for stage in range(pp):
        expected = min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1)
        assert in_flight(slots("interleaved", stage, pp, m, v)) == expected


def test_1f1b_alternates_between_fill_and_drain() -> None:
    order = "".join(slot.phase for slot in slots("1f1b", 1, 4, 6))
    assert order == "FFF" + "BF" * 3 + "BBB"
    numbers = [slot.microbatch for slot in slots("1f1b", 1, 4, 6)]
    assert numbers == [0, 1, 2, 0, 3, 1, 4, 2, 5, 3, 4, 5]


def test_gpipe_runs_backward_in_reverse() -> None:
    assert slots("gpipe", 0, 2, 2) == [
        Slot("F", 0, 0), Slot("F", 1, 0), Slot("B", 1, 0), Slot("B", 0, 0),
    ]  # fmt: skip


def test_interleaving_goes_through_the_chunks_in_groups_of_p() -> None:
    """Megatron's order: p micro-batches of chunk 0, the same p of chunk 1, then the next p."""
    order = slots("interleaved", 0, 2, 4, 2)
    forwards = [(s.microbatch, s.chunk) for s in order if s.phase == "F"]
    backwards = [(s.microbatch, s.chunk) for s in order if s.phase == "B"]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


RUN = {
    "model": {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "vocab": 256},
    "training": {"sequence": 64, "microbatch": 1, "global_batch": 8},
    "cluster": "1x4 h100-sxm",
}


def test_interleaving_needs_whole_groups_of_micro_batches() -> None:
    plan = {"preset": "megatron", "pp": 4, "interleave": 2}
    load_run({**RUN, "plan": plan})
    training = {"sequence": 64, "microbatch": 1, "global_batch": 6}
    with pytest.raises(PlanError, match=r"6 micro-batches are not a multiple of pp 4") as error:
        load_run({**RUN, "training": training, "plan": plan})
    (problem,) = error.value.problems
    assert problem.where == "training.global_batch"
    assert "4 or 8" in problem.way_out


def test_a_limit_in_flight_does_not_go_with_interleaving() -> None:
    plan = {"preset": "megatron", "pp": 4, "in_flight": 2}
    assert load_run({**RUN, "plan": plan}).plan.in_flight == 2
    with pytest.raises(PlanError, match="does not go with interleaving"):
        load_run({**RUN, "plan": {**plan, "interleave": 2}})


def test_a_limit_bounds_what_is_in_flight() -> None:
    for stage in range(4):
        for limit in (1, 2, 3, 4, 9):
            order = SCHEDULES["1f1b"](stage, 4, 8, 1, (limit,) * 4)
            assert in_flight(order) == min(4 - stage, limit)
    # a stage gets no more than the stages before it let through
    assert in_flight(SCHEDULES["1f1b"](1, 4, 8, 1, (1, 3, 2, 1))) == 1
