"""What a tree, overrides and the optimizer say of the host goes through the checks of the plan."""

from __future__ import annotations

import copy

import pytest
import yaml

from foretrain.errors import InputError
from foretrain.predict import predict
from foretrain.report.explain import explain
from foretrain.run.load import load_run

RUN = {
    "model": {"family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "ffn": 2816,
              "vocab": 32000},
    "training": {"sequence": 1024, "global_batch": 8, "microbatch": 1, "precision": "bf16"},
    "cluster": "1x8 h100-sxm",
    "plan": {"preset": "megatron"},
}  # fmt: skip


def run(plan=None, **training):
    document = copy.deepcopy(RUN)
    document["plan"] |= plan or {}
    document["training"] |= training
    return load_run(document)


def tree(**runtime):
    plan = yaml.safe_load(explain(run(), "plan"))
    plan["tree"]["runtime"] |= runtime
    return plan


@pytest.mark.parametrize(
    ("runtime", "said"),
    [
        ({"offload": "foo"}, "runtime.offload"),
        ({"offload_layers": -1}, "runtime.offload_layers"),
        ({"offload_layers": 99}, "last of the 4 layers"),
        ({"offload": "optimizer", "offload_fraction": -1.0}, "runtime.offload_fraction"),
        ({"offload": "optimizer", "offload_fraction": 5.0}, "runtime.offload_fraction"),
        ({"offload": "optimizer", "offload_fraction": float("nan")}, "runtime.offload_fraction"),
        ({"offload_fraction": 0.5}, "unless offload is optimizer"),
        ({"offload": "parameters"}, "ZeRO stage 3"),
        ({"staged_buckets": -1.0}, "runtime.staged_buckets"),
    ],
)
def test_a_tree_that_offloads_what_cannot_be_is_refused(runtime, said):
    with pytest.raises(InputError, match=said):
        run(tree(**runtime))


def test_a_tree_that_offloads_is_the_plan_that_does():
    for runtime, plan in (
        ({"offload_layers": 2}, {"cpu_offloading_num_layers": 2}),
        ({"offload": "optimizer", "offload_fraction": 0.5},
         {"offload": "optimizer", "optimizer_offload_fraction": 0.5}),
    ):  # fmt: skip
        given, stated = run(tree(**runtime)), run(plan)
        assert given.plan.offload == stated.plan.offload
        assert predict(given).step_time_s.value == predict(stated).step_time_s.value


def test_recompute_of_single_layers_does_not_go_with_activations_on_the_host():
    overrides = {"layers.3": {"recompute": "full"}}
    with pytest.raises(InputError, match="do not go with recompute"):
        run({"cpu_offloading_num_layers": 2, "overrides": overrides})
    plan = tree(offload_layers=2)
    plan["tree"]["nodes"].append({"pattern": "layers.3", "recompute": "full"})
    with pytest.raises(InputError, match="do not go with recompute"):
        run(plan)


def test_nothing_is_offloaded_where_nothing_is_updated():
    idle = run({"offload": "optimizer"}, optimizer="none")
    assert idle.plan.offload == "none"
    assert any("plan.offload has no effect" in line for line in idle.warnings)
    assert predict(idle).step_time_s == predict(run(optimizer="none")).step_time_s


def test_the_plan_that_explain_prints_keeps_expandable_segments():
    stated = run({"expandable_segments": True})
    again = run(yaml.safe_load(explain(stated, "plan")))
    assert predict(again).memory.device_used_bytes == predict(stated).memory.device_used_bytes
    assert predict(again).memory.device_used_bytes < predict(run()).memory.device_used_bytes


def test_a_share_of_zero_is_called_too_small_and_not_no_number():
    with pytest.raises(InputError, match="must be above 0"):
        run({"offload": "optimizer", "optimizer_offload_fraction": 0})
