"""Keys that cannot act on a run are named under warnings, and really change nothing."""

from typing import Any

import pytest

import foretrain

MODEL = {"family": "llama", "layers": 4, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 32000}


def run(cluster: str, batch: int, **plan: Any):
    return foretrain.load_run(
        {
            "model": MODEL,
            "training": {"sequence": 256, "global_batch": batch, "microbatch": 1},
            "plan": {"preset": "megatron", **plan},
            "cluster": cluster,
        }
    )


def idle(spec) -> set[str]:
    return {line.split(" has no effect")[0] for line in spec.warnings if "no effect" in line}


@pytest.mark.parametrize(
    ("cluster", "batch", "plan", "key", "value", "named"),
    [
        ("1x4 a100-sxm-80gb", 4, {"tp": 4}, "order", ["tp", "dp"], "plan.order"),
        ("1x4 a100-sxm-80gb", 4, {"tp": 4}, "bucket_mib", 10, "plan.bucket_mib"),
        ("1x4 a100-sxm-80gb", 4, {"tp": 4}, "zero", 1, "plan.zero"),
        ("1x1 a100-sxm-80gb", 4, {"preset": "fsdp"}, "no_sync", True, "plan.no_sync"),
        ("1x4 a100-sxm-80gb", 4, {}, "overrides", {"head": {"reshard": True}},
         "plan.overrides['head']"),
        ("1x4 a100-sxm-80gb", 8, {"preset": "fsdp"}, "bucket_mib", 10, "plan.bucket_mib"),
        ("1x4 a100-sxm-80gb", 4, {}, "assignment", "round-robin", "plan.assignment"),
        ("1x4 a100-sxm-80gb", 4, {}, "no_sync", False, "plan.no_sync"),
        ("1x4 a100-sxm-80gb", 4, {}, "overlap", {"tp": True}, "plan.overlap.tp"),
        ("1x4 a100-sxm-80gb", 4, {}, "overlap", {"p2p": True}, "plan.overlap.p2p"),
        ("1x4 a100-sxm-80gb", 4, {"tp": 4}, "overlap", {"grad": True}, "plan.overlap.grad"),
        ("1x4 a100-sxm-80gb", 4, {}, "overlap", {"param": True}, "plan.overlap.param"),
        ("1x4 a100-sxm-80gb", 4, {}, "overlap", {"tables": False}, "plan.overlap.tables"),
        ("1x4 a100-sxm-80gb", 4, {}, "overrides",
         {"layers.*.mlp.down": {"computation": {"in": "tp"}}},
         "plan.overrides['layers.*.mlp.down']"),
    ],
)  # fmt: skip
def test_a_key_without_an_effect_says_so(cluster, batch, plan, key, value, named):
    stated, plain = run(cluster, batch, **plan, **{key: value}), run(cluster, batch, **plan)
    assert idle(stated) == {named}
    assert not idle(plain)
    mine, other = foretrain.predict(stated), foretrain.predict(plain)
    assert mine.step_time_s.value == pytest.approx(other.step_time_s.value, rel=1e-9)
    assert mine.memory.parts_bytes == other.memory.parts_bytes


@pytest.mark.parametrize(
    ("training", "plan", "named"),
    [
        ({"table_optimizer": "adam"}, {"preset": "ddp"}, "training.table_optimizer"),
        ({}, {"preset": "ddp", "assignment": "round-robin"}, "plan.assignment"),
        ({}, {"preset": "dlrm", "assignment": "round-robin"}, None),
        ({"table_optimizer": "adam"}, {"preset": "dlrm"}, None),
    ],
)
def test_keys_of_tables(training, plan, named):
    tables = {"rows": [1000, 40000, 900], "dim": 16, "pooling": [1, 20, 3]}
    spec = foretrain.load_run(
        {
            "model": {"family": "dlrm", "dense": 13, "bottom": [64, 16], "top": [64, 1],
                      "tables": tables},
            "training": {"global_batch": 1024, **training},
            "plan": plan,
            "cluster": "1x4 a100-sxm-80gb",
        }
    )  # fmt: skip
    assert idle(spec) == ({named} if named else set())


def test_a_key_with_an_effect_says_nothing():
    cluster = "2x8 a100-sxm-80gb, 8x200G ib"
    plan = {"tp": 2, "pp": 2, "zero": 1, "order": ["dp", "pp", "tp"], "bucket_mib": 10}
    plan |= {"overlap": {"tp": True, "p2p": True, "grad": True, "param": True}}
    plan |= {"overrides": {"layers.*.mlp.down": {"computation": {"in": "tp"}}}}
    assert not idle(run(cluster, 16, **plan))
    assert not idle(run(cluster, 16, overlap=True))
