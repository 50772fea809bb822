"""What a plan must satisfy: each conflict is named with its values and the nearest valid choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foretrain.frontends.spec import ModelSpec
from foretrain.strategy.checks import (
    MAX_MICROBATCHES,
    Numbers,
    check_plan,
    data_parallel,
    tensor_degrees,
)
from foretrain.strategy.choices import divisors, even_stages, nearest_choice
from foretrain.strategy.plan import Plan

SPEC = ModelSpec(
    name="toy",
    family="llama",
    layers=24,
    hidden=4096,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=16384,
    vocab=32000,
    max_positions=4096,
    positions="rotary",
)
NUMBERS = Numbers(num_devices=64, sequence=4096, global_batch=64, microbatch=1)


def messages(plan: Plan, spec: ModelSpec = SPEC, **numbers: Any) -> list[str]:
    return [str(problem) for problem in check_plan(spec, plan, replace(NUMBERS, **numbers))]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tp=8, pp=4, zero=1, sequence_parallel=True),
        Plan(tp=16),  # twice the key-value heads: each is kept by two ranks
        Plan(pp=4, interleave=2, schedule="interleaved"),
        Plan(pp=4, schedule="gpipe"),
        Plan(pp=5, tp=1, stages=(5, 5, 5, 5, 4)),
        Plan(preset="fsdp", zero=3, shard=8),
    ],
    ids=str,
)
def test_valid_plans_pass(plan: Plan) -> None:
    devices = 60 if plan.pp == 5 else 64
    batch = 60 if plan.pp == 5 else 64
    assert messages(plan, num_devices=devices, global_batch=batch) == []


def test_tp_7_names_heads_devices_and_the_nearest_choice() -> None:
    found = messages(Plan(tp=7), num_devices=8)
    assert found[0] == (
        "plan.tp: tp 7 x pp 1 = 7 does not divide the 8 devices of the cluster (got 7); "
        "allowed: 1, 2, 4, 8; nearest: tp 8"
    )
    assert found[1].startswith("plan.tp: tp 7 does not divide the 64 attention heads (got 7); ")
    assert "allowed: 1, 2, 4, 8; nearest: tp 8" in found[1]


def test_three_devices_for_two_stages() -> None:
    (found,) = messages(Plan(pp=2), num_devices=3, global_batch=3)
    assert found == (
        "plan.pp: tp 1 x pp 2 = 2 does not divide the 3 devices of the cluster (got 2); "
        "allowed: 1, 3; nearest: pp 3"
    )


def test_degrees_beyond_the_cluster_and_a_wrong_dp() -> None:
    (found,) = messages(Plan(tp=8, pp=4), num_devices=16)
    assert "tp 8 x pp 4 = 32 does not divide the 16 devices" in found
    (found,) = messages(Plan(tp=8, pp=4, dp=4))
    assert "x dp 4 = 128, but the cluster has 64 devices (got 4); allowed: 2" in found


CONFLICTS: list[tuple[Plan, dict[str, Any], dict[str, Any], str]] = [
    (Plan(tp=8), {}, {"heads": 12, "kv_heads": 12}, "does not divide the 12 attention heads"),
    (Plan(tp=8), {}, {"kv_heads": 3, "heads": 48}, "no divisor or multiple of the 3 key-value"),
    (Plan(tp=8), {}, {"ffn": 11004}, "tp 8 does not divide the MLP width 11004"),
    (Plan(tp=8), {}, {"vocab": 50257}, "--set model.vocab=50264"),
    (Plan(tp=8, sequence_parallel=True), {"sequence": 4090}, {}, "nearest: 4088 or 4096"),
    (Plan(pp=16), {}, {}, "pp 16 = 16 virtual stages do not divide the 24 layers evenly"),
    (Plan(pp=16), {}, {}, "stages: [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]"),
    (Plan(pp=4, interleave=4), {}, {}, "allowed: 1, 2, 3, 6; nearest: interleave 3"),
    (Plan(pp=2, stages=(12,)), {}, {}, "stages has 1 entries, pp 2 needs 2"),
    (Plan(pp=2, stages=(12, 13)), {}, {}, "stages add up to 25 layers, toy has 24"),
    (Plan(), {"global_batch": 100}, {}, "microbatch x dp = 1 x 64 = 64 (got 100)"),
    (Plan(), {"global_batch": 100}, {}, "nearest: 64 or 128"),
    (Plan(), {"global_batch": 3}, {}, "nearest: 64"),
    (Plan(pp=4, interleave=2), {"global_batch": 32}, {}, "2 micro-batches are not a multiple of"),
    (Plan(pp=4, interleave=2, schedule="1f1b"), {}, {}, "schedule 1f1b has one chunk per rank"),
    (Plan(pp=4, schedule="interleaved"), {}, {}, "needs several chunks per rank"),
    (Plan(pp=4, in_flight=5), {}, {}, "a step has 4 micro-batches (got 5); allowed: 1 to 4"),
    (Plan(pp=4, in_flight=(4, 3)), {}, {}, "in_flight has 2 entries, pp is 4"),
    (Plan(shard=48), {}, {}, "shard 48 does not divide the 64 data-parallel ranks"),
    (Plan(preset="ddp", zero=3), {}, {}, "preset ddp has no ZeRO stage 3"),
    (Plan(preset="deepspeed", pp=2, zero=3), {}, {}, "with pipeline stages has no ZeRO stage 3"),
    (Plan(), {"global_batch": 64 * MAX_MICROBATCHES * 2}, {}, "micro-batches per step"),
    (Plan(), {"sequence": 4097}, {"positions": "learned"}, "longer than the 4096 learned"),
]


@pytest.mark.parametrize(("plan", "numbers", "spec", "message"), CONFLICTS)
def test_every_conflict_is_named(
    plan: Plan, numbers: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    found = messages(plan, replace(SPEC, **spec), **numbers)
    assert any(message in text for text in found), found


def test_all_conflicts_are_found_together() -> None:
    plan = Plan(tp=16, pp=4, shard=3, zero=2, preset="ddp", in_flight=9)
    found = messages(plan, replace(SPEC, heads=24, kv_heads=24, layers=30), global_batch=7)
    for word in ("attention heads", "30 layers", "ZeRO stage 2", "shard 3", "in_flight"):
        assert any(word in text for text in found), word


def test_a_rotary_limit_is_no_error() -> None:
    assert messages(Plan(), sequence=1_000_000) == []


def test_helpers() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert even_stages(10, 4) == [3, 3, 2, 2]
    assert nearest_choice(7, [1, 2, 4, 8]) == 8
    assert nearest_choice(3, [1, 2, 4, 8]) == 4
    assert tensor_degrees(SPEC, 24) == [1, 2, 4, 8]
    assert data_parallel(Plan(tp=8, pp=2), 64) == 4
    assert data_parallel(Plan(tp=8, pp=16), 64) is None
