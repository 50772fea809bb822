"""Steps that can be computed by hand: only layers cost something, communication is free.

docs/explain/pipeline.md derives the formulas.
"""

from __future__ import annotations

import pytest

from foretrain.program import Program
from foretrain.simulator.simulate import simulate
from foretrain.strategy.plan import Overlap, Plan
from support import Small, compile_small, last_parts, layer_times, llama, step_seconds

LAYERS = 24
F, B = 3.0, 7.0  # seconds of one layer


def pipeline(
    pp: int, m: int, *, p2p: bool | None = None, layers: int = LAYERS, **knobs: object
) -> Program:
    plan = Plan(pp=pp, zero=0, overlap=Overlap(p2p=p2p), **knobs)  # type: ignore[arg-type]
    run: Small = compile_small(llama(layers=layers), plan, pp, accumulation=m, microbatch=1)
    return run.program


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p2p", [True, False])
@pytest.mark.parametrize(
    ("pp", "m"), [(1, 3), (2, 1), (2, 2), (2, 5), (3, 7), (4, 4), (6, 2), (8, 12)]
)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_pairs(
    schedule: str, p2p: bool, pp: int, m: int
) -> None:
    program = pipeline(pp, m, p2p=p2p, schedule=schedule)
    per_stage = LAYERS // pp
    expected = (m + pp - 1) * per_stage * (F + B)
    assert step_seconds(program, layer_times(program, F, B)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 2.0), (5.0, 1.0), (1.0, 0.0)])
def test_the_ratio_of_forward_and_backward_does_not_matter(f: float, b: float) -> None:
    for schedule in ("gpipe", "1f1b"):
        for p2p in (True, False):
            program = pipeline(4, 6, p2p=p2p, schedule=schedule)
            expected = (6 + 4 - 1) * LAYERS / 4 * (f + b)
            found = step_seconds(program, layer_times(program, f, b))
            assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("pp", "m", "v"), [(2, 2, 2), (2, 8, 2), (2, 4, 3), (3, 3, 2), (3, 6, 4), (4, 8, 2), (4, 16, 3)]
)
def test_interleaving_divides_the_fill_by_the_chunks(pp: int, m: int, v: int) -> None:
    program = pipeline(pp, m, p2p=True, interleave=v)
    f, b = F * LAYERS / pp, B * LAYERS / pp  # per stage, all its chunks
    simulated = simulate(program, layer_times(program, F, B))
    ideal = m * (f + b)
    assert simulated.step_s == pytest.approx(ideal + (pp - 1) * (f + b) / v, rel=1e-12)
    bubble = sum(c.bubble_s for c in simulated.classes) / pp
    assert bubble / ideal == pytest.approx((pp - 1) / (v * m))
    assert bubble / simulated.step_s == pytest.approx((pp - 1) / (v * m + pp - 1))


@pytest.mark.parametrize(("pp", "m", "v"), [(2, 4, 2), (4, 8, 2), (3, 3, 2)])
def test_transfers_that_block_never_make_interleaving_faster(pp: int, m: int, v: int) -> None:
    free = pipeline(pp, m, interleave=v, layers=pp * v, p2p=True)
    blocking = pipeline(pp, m, interleave=v, layers=pp * v, p2p=False)
    assert step_seconds(blocking, layer_times(blocking, F, B)) >= step_seconds(
        free, layer_times(free, F, B)
    ) * (1 - 1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (4, 3), (4, 12)])
@pytest.mark.parametrize("flat", [False, True])
def test_the_bubble_is_p_minus_1_parts_of_the_step(
    schedule: str, pp: int, m: int, flat: bool
) -> None:
    program = pipeline(pp, m, schedule=schedule)
    simulated = simulate(program, layer_times(program, F, B), flat=flat)
    for stage in simulated.classes:
        assert stage.bubble_s / simulated.step_s == pytest.approx((pp - 1) / (m + pp - 1))
        assert stage.busy_s + stage.bubble_s == pytest.approx(simulated.step_s)


def test_one_stage_has_no_bubble() -> None:
    program = pipeline(1, 4)
    simulated = simulate(program, layer_times(program, F, B))
    assert last_parts(simulated) == {
        **dict.fromkeys(last_parts(simulated), 0.0),
        "compute": pytest.approx(4 * LAYERS * (F + B)),
    }


# -- unequal stages ------------------------------------------------------------------------------


def test_the_slowest_stage_sets_the_pace_of_gpipe() -> None:
    """Stages of 1, 4 and 1 layers: fill and drain once, m passes of the slow one."""
    m = 5
    program = pipeline(3, m, schedule="gpipe", stages=(1, 4, 1), layers=6)
    expected = (m * 4 + 2 * 1) * F + (m * 4 + 2 * 1) * B
    assert step_seconds(program, layer_times(program, F, B)) == pytest.approx(expected)


def test_the_slowest_stage_of_1f1b() -> None:
    """The last stage is slow: it works without a pause from its first to its last micro-batch."""
    m = 6
    program = pipeline(3, m, stages=(1, 1, 4), layers=6)
    expected = (2 + 4 * m) * (F + B)
    assert step_seconds(program, layer_times(program, F, B)) == pytest.approx(expected)


def test_empty_stages_pass_the_micro_batches_on() -> None:
    program = pipeline(2, 3, stages=(4, 0), layers=4)
    assert step_seconds(program, layer_times(program, F, B)) == pytest.approx(3 * 4 * (F + B))


# -- in-flight limits ----------------------------------------------------------------------------


def sweep(limits: range, pp: int, m: int, **knobs: object) -> tuple[list[float], list[float]]:
    """Step times and peaks of the first stage for limits of micro-batches (or chunks) in flight."""
    times: list[float] = []
    memory: list[float] = []
    for limit in limits:
        program = pipeline(pp, m, in_flight=limit, **knobs)
        simulated = simulate(program, layer_times(program, F, B))
        times.append(simulated.step_s)
        memory.append(simulated.peaks[0].total)
    return times, memory


@pytest.mark.parametrize("p2p", [True, False])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 6), (4, 8)])
def test_a_lower_limit_in_flight_costs_time_and_saves_memory(p2p: bool, pp: int, m: int) -> None:
    """From 1 (no two stages work at once) to p (1F1B): time falls, memory rises."""
    times, memory = sweep(range(1, pp + 1), pp, m, p2p=p2p)
    pair = LAYERS / pp * (F + B)
    assert times[0] == pytest.approx(m * pp * pair)
    assert times[-1] == pytest.approx((m + pp - 1) * pair)
    assert times == sorted(set(times), reverse=True)
    assert memory == sorted(set(memory))


def test_a_limit_beyond_p_changes_nothing() -> None:
    assert pipeline(3, 6, in_flight=6).classes == pipeline(3, 6).classes


def test_limits_per_stage() -> None:
    """(4, 3, 2, 1) is 1F1B; what stage 0 lets through bounds the stages behind it."""
    usual = pipeline(4, 8)
    stated = pipeline(4, 8, in_flight=(4, 3, 2, 1))
    assert usual.classes == stated.classes
    narrow = pipeline(4, 8, in_flight=(1, 4, 4, 4))
    one = pipeline(4, 8, in_flight=1)
    assert step_seconds(narrow, layer_times(narrow, F, B)) == pytest.approx(
        step_seconds(one, layer_times(one, F, B))
    )
