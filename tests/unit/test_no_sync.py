"""`plan.no_sync`: sharded gradients are summed whole and reduced once per step."""

from typing import Any

import pytest

import foretrain
from foretrain.errors import InputError
from foretrain.predict import compile_run
from foretrain.program import Program
from foretrain.strategy.text import tree_mapping

MODEL = {"family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "ffn": 2816, "vocab": 32000}
MICRO_STEPS = 4


def spec(batch: int = 8 * MICRO_STEPS, *, stack: str = "torchtitan", **plan: Any):
    return foretrain.load_run(
        {
            "model": MODEL,
            "training": {"sequence": 512, "global_batch": batch, "microbatch": 1},
            "plan": {"preset": "fsdp", **plan},
            "cluster": "1x8 h100-sxm",
            "stack": stack,
        }
    )


def moved(program: Program, collective: str) -> float:
    """Bytes of one kind of collective in one step."""
    total = 0.0
    for i, times in program.event_counts().items():
        event = program.events[i]
        if getattr(event, "collective", "") == collective and event.bytes > 1000:
            total += event.bytes * event.count * times
    return total


@pytest.mark.parametrize("plan", [{}, {"zero": 2}, {"shard": 4}])
def test_reductions_once_per_step(plan):
    each, once = (foretrain.predict(spec(**plan, no_sync=n)) for n in (None, True))
    assert moved(each.program, "reduce_scatter") == pytest.approx(
        MICRO_STEPS * moved(once.program, "reduce_scatter"), rel=1e-3
    )
    for other in ("all_gather", "all_reduce"):
        assert moved(each.program, other) == pytest.approx(moved(once.program, other), rel=1e-3)


def test_whole_gradients_are_held():
    run = spec(no_sync=True)
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    parameters = 4 * layer + 2 * 32000 * 1024 + 1024
    parts = foretrain.predict(run).memory.parts_bytes
    assert parts["gradients"] == pytest.approx(4.0 * parameters, rel=1e-3)
    each = foretrain.predict(spec()).memory.parts_bytes
    # a shard, and at the peak at most the new gradients of a unit or two
    assert each["gradients"] < parts["gradients"] / 2
    assert parts["optimizer"] == each["optimizer"]


def test_sums_have_the_dtype_of_the_reduction():
    assert spec(no_sync=True).training.roles.grad_accumulate == "fp32"
    assert spec(no_sync=True, stack="fsdp").training.roles.grad_accumulate == "bf16"
    assert spec(stack="fsdp").training.roles.grad_accumulate == "fp32"
    assert any("summed in bf16" in line for line in spec(no_sync=True, stack="fsdp").assumptions)


def test_accelerate_says_it_the_other_way_round():
    assert spec(sync_each_batch=False).plan.no_sync is True
    assert spec(sync_each_batch=True).plan.no_sync is False
    with pytest.raises(InputError, match="given twice"):
        spec(sync_each_batch=True, no_sync=True)


@pytest.mark.parametrize(
    ("batch", "plan", "why"),
    [
        (8, {}, "one micro-batch"),
        (32, {"preset": "ddp"}, "once per step anyway"),
        (32, {"preset": "megatron", "zero": 1}, "once per step anyway"),
    ],
)
def test_without_an_effect_it_says_so(batch, plan, why):
    run = spec(batch, no_sync=True, **plan)
    assert run.plan.no_sync is None
    assert any(line.startswith("plan.no_sync has no effect") and why in line
               for line in run.warnings)  # fmt: skip
    plain = foretrain.predict(spec(batch, **plan))
    assert foretrain.predict(run).step_time_s == plain.step_time_s


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"preset": "deepspeed", "zero": 2, "no_sync": True}, "DeepSpeed refuses no_sync"),
        ({"preset": "ddp", "no_sync": False}, "after every micro-batch is not modelled"),
        ({"no_sync": "often"}, "must be true or false"),
    ],
)
def test_what_is_refused(plan, message):
    with pytest.raises(InputError, match=message):
        spec(**plan)


def test_the_expanded_tree_reads_back_to_the_same_run():
    run = spec(no_sync=True)
    first = foretrain.predict(run)
    again = spec(tree=tree_mapping(compile_run(run).tree))
    assert (again.plan.no_sync, again.plan.zero) == (True, 3)
    second = foretrain.predict(again)
    assert second.step_time_s == first.step_time_s
    assert second.memory == first.memory
