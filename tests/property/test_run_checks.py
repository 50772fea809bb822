"""Properties of the plan checks: what they suggest is valid, and what they accept adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.frontends.spec import ModelSpec
from foretrain.run.aliases import PLAN_ALIASES, PLAN_KEYS, TRAINING_ALIASES, TRAINING_KEYS
from foretrain.run.batch import settle_batch
from foretrain.run.load import load_run
from foretrain.strategy.checks import (
    Numbers,
    check_degrees,
    check_plan,
    check_stages,
    check_tensor_parallel,
    data_parallel,
)
from foretrain.strategy.choices import even_stages
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
    numbers = Numbers(num_devices=devices, sequence=None, global_batch=1, microbatch=1)
    problems = check_tensor_parallel(SPEC, plan, numbers)
    for problem in problems:
        if "attention heads" in problem.what:
            better = int(problem.way_out.rsplit(" ", 1)[1])
            assert devices % better == 0
            assert not check_tensor_parallel(
                replace(SPEC, vocab=better * 1000), replace(plan, tp=better), numbers
            )


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


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 130)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(
        ["full", "gpipe", "1f1b", "fsdp", "bf16", "8,8", "2M4P1D", "none", "[", "adam"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["mode", "grad", "layers.*", "compute", "x"]), inner)
    ),
    max_leaves=4,
)
plans = st.dictionaries(st.sampled_from([*PLAN_KEYS, *PLAN_ALIASES, "junk"]), values, max_size=6)
trainings = st.dictionaries(
    st.sampled_from([*TRAINING_KEYS, *TRAINING_ALIASES, "junk"]), values, max_size=5
)


@given(
    plan=plans | scalars,
    training=trainings | scalars,
    stack=st.none() | st.just("fsdp") | scalars,
    overrides=st.dictionaries(
        st.sampled_from(
            ["plan.tp", "plan.overlap.grad", "training.precision.master", "model.layers"]
        ),
        values,
        max_size=2,
    ),
)
def test_any_content_gives_a_run_or_a_clear_error(
    plan: Any, training: Any, stack: Any, overrides: dict[str, Any]
) -> None:
    run = {
        "model": "llama-3-8b",
        "training": training,
        "plan": plan,
        "cluster": "2x8 h100-sxm, 8x400G ib",
        "stack": stack,
    }
    try:
        loaded = load_run(run, overrides=overrides)
    except InputError as error:
        refusal = str(error)
    else:
        batch, dp = loaded.training, loaded.plan.dp
        assert dp is not None
        assert batch.accumulation(dp) * batch.microbatch * dp == batch.global_batch
        refusal = "none"
    assert refusal.strip()
