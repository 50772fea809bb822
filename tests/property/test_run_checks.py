"""Properties of the plan checks: what they suggest is valid, and what they accept adds up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from foretrain.frontends.spec import ModelSpec
from foretrain.run.batch import settle_batch
from foretrain.strategy.checks import (
    Numbers,
    check_degrees,
    check_plan,
    check_stages,
    check_tensor_parallel,
    data_parallel,
    even_stages,
)
from foretrain.strategy.plan import Plan

SPEC = ModelSpec(
    name="toy",
    family="llama",
    layers=24,
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    ffn=3072,
    vocab=50304,
    max_positions=None,
)
small = st.integers(min_value=1, max_value=32)


@given(tp=small, devices=small)
def test_the_nearest_tensor_degree_is_valid(tp: int, devices: int) -> None:
    plan = Plan(tp=tp)
    problems = check_tensor_parallel(SPEC, plan, devices, None)
    for problem in problems:
        if "attention heads" in problem.what:
            better = int(problem.way_out.rsplit(" ", 1)[1])
            assert devices % better == 0
            assert not check_tensor_parallel(replace(SPEC, vocab=better * 1000), replace(plan, tp=better), devices, None)


@given(pp=small, interleave=st.integers(1, 6), layers=st.integers(1, 96))
def test_suggested_stages_are_accepted(pp: int, interleave: int, layers: int) -> None:
    spec = replace(SPEC, layers=layers)
    plan = Plan(pp=pp, interleave=interleave)
    problems = check_stages(spec, plan)
    assert bool(problems) == (layers % (pp * interleave) != 0)
    if "stages: [" in "".join(p.way_out for p in problems):
        stages = tuple(even_stages(layers, pp * interleave))
        assert not check_stages(spec, replace(plan, stages=stages))


@given(tp=small, pp=small, dp=st.none() | small, devices=st.integers(1, 256))
def test_degrees_pass_exactly_when_their_product_is_the_cluster(
    tp: int, pp: int, dp: int | None, devices: int
) -> None:
    plan = Plan(tp=tp, pp=pp, dp=dp)
    derived = data_parallel(plan, devices)
    assert (check_degrees(SPEC, plan, devices) == []) == (derived is not None)
    if derived is not None:
        assert tp * pp * derived == devices
        assert dp in (None, derived)


@given(
    global_batch=st.none() | st.integers(1, 512),
    microbatch=st.none() | st.integers(1, 16),
    accumulation=st.none() | st.integers(1, 16),
    dp=st.integers(1, 16),
    pp=st.integers(1, 4),
)
def test_batch_words_always_multiply(
    global_batch: int | None, microbatch: int | None, accumulation: int | None, dp: int, pp: int
) -> None:
    problems: list[object] = []
    batch = settle_batch(global_batch, microbatch, accumulation, dp=dp, pp=pp, problems=problems)  # type: ignore[arg-type]
    assert global_batch in (None, batch.global_batch)
    assert microbatch in (None, batch.microbatch)
    numbers = Numbers(
        num_devices=dp, sequence=None, global_batch=batch.global_batch, microbatch=batch.microbatch
    )
    if not problems and not check_plan(SPEC, Plan(), numbers):
        steps = numbers.microbatches(dp)
        assert steps * batch.microbatch * dp == batch.global_batch
        assert accumulation in (None, steps)
