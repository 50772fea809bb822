"""Roles of a precision: each has its effect, or says that it has none; words of Megatron-LM."""

from typing import Any

import pytest

import foretrain
from foretrain.compiler.optimizer import OPTIMIZERS
from foretrain.errors import InputError
from foretrain.run.idle_roles import NO_MOMENTS, TWO_MOMENTS

MODEL = {"family": "llama", "layers": 4, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 32000}


def run(training: dict[str, Any], cluster: str = "1x8 h100-sxm", **plan: Any):
    return foretrain.load_run(
        {
            "model": MODEL,
            "training": {"sequence": 512, "global_batch": 32, "microbatch": 1, **training},
            "plan": {"preset": "megatron", "zero": 1, **plan},
            "cluster": cluster,
        }
    )


def sent_bytes(spec) -> float:
    """Bytes of the reductions of gradients in one step."""
    program = foretrain.predict(spec).program
    counts = program.event_counts()
    return sum(
        program.events[i].bytes * program.events[i].count * count
        for i, count in counts.items()
        if getattr(program.events[i], "collective", "") in ("reduce_scatter", "all_reduce")
    )


def idle(spec) -> list[str]:
    return [line for line in spec.warnings if "has no effect" in line]


def test_grad_reduce_decides_what_is_sent_and_accumulate_what_is_kept():
    wide = run({"precision": {"compute": "bf16"}})
    sent = run({"precision": {"compute": "bf16", "grad_reduce": "bf16"}})
    kept = run({"precision": {"compute": "bf16", "grad_accumulate": "bf16"}})
    assert sent_bytes(sent) == pytest.approx(0.5 * sent_bytes(wide), rel=1e-3)
    assert sent_bytes(kept) == pytest.approx(sent_bytes(wide), rel=1e-3)

    def gradients(spec) -> float:
        return foretrain.predict(spec).memory.parts_bytes["gradients"]

    assert gradients(sent) == gradients(wide)
    assert gradients(kept) == 0.5 * gradients(wide)


@pytest.mark.parametrize(
    ("training", "cluster", "plan", "role"),
    [
        ({"precision": {"compute": "bf16", "grad": "bf16"}}, "1x8 h100-sxm", {}, "grad"),
        ({"precision": {"grad_reduce": "bf16"}}, "1x1 h100-sxm", {}, "grad_reduce"),
        ({"precision": {"moments": "bf16"}, "optimizer": "sgd"}, "1x8 h100-sxm", {}, "moments"),
        ({"precision": {"second_moment": "bf16"}, "optimizer": "adagrad"}, "1x8 h100-sxm", {},
         "second_moment"),
        ({"precision": {"master": "fp16"}, "optimizer": "none"}, "1x8 h100-sxm", {}, "master"),
    ],
)  # fmt: skip
def test_a_role_without_an_effect_says_so(training, cluster, plan, role):
    spec = run(training, cluster, **plan)
    named = [line.split()[0] for line in idle(spec)]
    assert [name for name in named if name != "plan.zero"] == [f"training.precision.{role}"]
    plain = run({**training, "precision": {"compute": "bf16"}}, cluster, **plan)
    mine, other = foretrain.predict(spec), foretrain.predict(plain)
    assert mine.memory.device_used_bytes == other.memory.device_used_bytes
    assert mine.step_time_s.value == pytest.approx(other.step_time_s.value, rel=1e-4)


def test_a_role_with_an_effect_says_nothing():
    roles = {"compute": "bf16", "grad": "fp32", "grad_reduce": "bf16", "moments": "bf16"}
    assert not idle(run({"precision": roles}, preset="fsdp", zero=3))
    assert not idle(run({"precision": roles}, preset="ddp", zero=0))
    assert not idle(run({"precision": roles}, zero=2))


def test_the_lists_of_moments_are_those_of_the_compiler():
    none = {word for word, rule in OPTIMIZERS.items() if not rule.moments or rule.moment_bytes}
    two = {w for w, r in OPTIMIZERS.items() if r.moments == 2 and r.moment_bytes is None}
    assert (set(NO_MOMENTS), set(TWO_MOMENTS)) == (none, two)


@pytest.mark.parametrize("role", ["grad", "grad_reduce", "grad_accumulate", "master"])
def test_gradients_and_master_copies_have_16_bits_at_least(role):
    with pytest.raises(InputError, match=rf"precision\.{role}: no software keeps"):
        run({"precision": {"compute": "bf16", role: "fp8"}})


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ({"grad_reduce_in_bf16": True}, {"grad_reduce": "bf16", "grad_accumulate": "bf16"}),
        ({"grad_reduce_in_bf16": False}, {"grad_reduce": "fp32", "grad_accumulate": "fp32"}),
        ({"precision": "fp16", "--accumulate-allreduce-grads-in-fp32": True},
         {"grad_reduce": "fp32", "grad_accumulate": "fp32", "compute": "fp16"}),
        ({"main_grads_dtype": "torch.bfloat16", "grad_reduce_in_bf16": True},
         {"grad_reduce": "bf16", "grad_accumulate": "bf16"}),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "precision": "bf16",
          "exp_avg_sq_dtype": "uint8"},
         {"master": "remainder", "moments": "bf16", "second_moment": "fp8"}),
        ({"main_params_dtype": "fp32", "use_precision_aware_optimizer": True},
         {"master": "remainder"}),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, {"master": "fp16"}),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False},
         {"master": "fp32"}),
        ({"exp_avg_dtype": "bf16", "precision": {"compute": "fp16", "master": "fp16"}},
         {"moments": "bf16", "compute": "fp16", "master": "fp16"}),
    ],
)  # fmt: skip
def test_words_of_megatron(words, roles):
    found = run(words).training.roles
    assert {role: getattr(found, role) for role in roles} == roles


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"grad_reduce_in_fp32": False}, "say which"),
        ({"grad_reduce_in_bf16": "perhaps"}, "must be true or false"),
        ({"main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True}, "given twice"),
        ({"precision": {"master": "fp32"}, "use_precision_aware_optimizer": True}, "given twice"),
        ({"optimizer_cpu_offload": True}, r"write it as plan\.optimizer_cpu_offload"),
    ],
)
def test_words_of_megatron_that_are_refused(words, message):
    with pytest.raises(InputError, match=message):
        run(words)


def test_words_of_megatron_in_overrides():
    spec = foretrain.load_run(
        {
            "model": MODEL,
            "training": {"sequence": 512, "global_batch": 32},
            "plan": {"preset": "megatron"},
            "cluster": "1x8 h100-sxm",
        },
        overrides=["training.grad_reduce_in_bf16=true", "plan.optimizer_cpu_offload=true"],
    )
    assert spec.training.roles.grad_accumulate == "bf16"
    assert spec.plan.offload == "optimizer"


def test_a_dump_of_megatron_without_offload():
    spec = run({}, optimizer_cpu_offload=False, optimizer_offload_fraction=0.0)
    assert spec.plan.offload == "none"
    assert spec.plan.optimizer_offload_fraction == 1.0
    assert [line.split()[0] for line in idle(spec)] == ["plan.optimizer_offload_fraction"]
    half = run({}, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert (half.plan.offload, half.plan.optimizer_offload_fraction) == ("optimizer", 0.5)
