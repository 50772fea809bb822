"""The JSON form: fixed names, parts that sum, finite numbers, a run that reads back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import InternalError
from foretrain.report.json_form import to_json
from foretrain.report.run_form import run_form
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Band
from report_sample import sample_parts, sample_result, sample_run

KEYS = [
    "schema", "run", "step_time_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_device",
    "model_flops_per_step", "mfu", "hfu", "fits", "bubble_fraction", "memory", "time_parts_s",
    "ranks", "provenance", "assumptions", "warnings",
]  # fmt: skip
MEMORY = [
    "capacity_gib", "usable_gib", "peak_allocated_gib", "peak_reserved_gib", "device_used_gib",
    "device_used_low_gib", "device_used_high_gib",
    "worst_rank", "moment", "parts_gib",
    "host_used_gib",
]  # fmt: skip
PARTS = [
    "compute", "recompute", "optimizer", "exposed_communication", "bubble", "host", "wait", "other",
]  # fmt: skip


def form(**changes: Any) -> dict[str, Any]:
    """The JSON form of the sample, after a round trip through strict JSON."""
    value = to_json(sample_result(**changes), sample_run())
    return json.loads(json.dumps(value, allow_nan=False))


def summed(parts: dict[str, Any]) -> float:
    """The sum of the time parts."""
    plain = sum(value for name, value in parts.items() if name != "exposed_communication")
    return plain + sum(parts["exposed_communication"].values())


def test_names_are_those_of_the_contract():
    value = form()
    assert list(value) == KEYS
    assert value["schema"] == 1
    assert list(value["memory"]) == MEMORY
    assert list(value["time_parts_s"]) == PARTS
    assert list(value["time_parts_s"]["exposed_communication"]) == [
        "tp",
        "cp",
        "ep",
        "pp",
        "dp",
        "copy",
    ]
    assert list(value["step_time_s"]) == ["value", "low", "high"]
    for rank_class in value["ranks"]:
        assert list(rank_class) == [
            "class", "ranks", "busy_s", "exposed_s", "idle_s", "peak_allocated_gib",
        ]  # fmt: skip


def test_parts_sum_to_their_totals():
    value = form()
    assert summed(value["time_parts_s"]) == pytest.approx(value["step_time_s"]["value"], rel=1e-9)
    memory = value["memory"]
    assert sum(memory["parts_gib"].values()) == pytest.approx(memory["device_used_gib"], rel=1e-9)


def test_a_rounding_gap_is_booked_as_other():
    value = form(step_time_s=Band(value=0.1 * (1 + 1e-7), low=0.08, high=0.12))
    assert summed(value["time_parts_s"]) == pytest.approx(value["step_time_s"]["value"], rel=1e-9)


def test_parts_that_do_not_sum_are_our_fault():
    with pytest.raises(InternalError, match="time parts sum to"):
        form(time_parts=sample_parts(0.09))


def test_an_axis_without_a_name_counts_as_other():
    parts = sample_parts()
    exposed = {"tp": parts.exposed_communication["tp"], "edp": 0.1 / 27}
    value = form(time_parts=replace(parts, exposed_communication=exposed))
    assert value["time_parts_s"]["exposed_communication"]["pp"] == 0.0
    assert value["time_parts_s"]["other"] == pytest.approx(0.2 / 27)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(bad: float):
    with pytest.raises(InternalError, match="hfu"):
        to_json(sample_result(hfu=bad), sample_run())


def test_tokens_are_null_without_tokens():
    value = form(tokens_per_s=None, tokens_per_s_per_device=None)
    assert value["tokens_per_s"] is None
    assert value["tokens_per_s_per_device"] is None


def test_ranks_are_full_sorted_lists():
    assert [entry["ranks"] for entry in form()["ranks"]] == [[0, 1], [2, 3]]


def same(first: RunSpec, second: RunSpec) -> None:
    """Both runs mean the same; where the model's shape comes from is not part of it."""
    assert _shape(first) == _shape(second)
    for name in ("training", "plan", "cluster", "stack"):
        assert getattr(first, name) == getattr(second, name), name
    assert second.warnings == first.warnings


def _shape(run: RunSpec) -> Any:
    return replace(run.model, source="", num_parameters=None, assumed=())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"training.precision": "fp32"},
        {"training.precision": "pure-bf16", "training.optimizer": "sgd"},
        {"plan.recompute": {"mode": "full", "layers": 2}},
        {"plan.overlap.grad": True, "plan.bucket_mib": 64},
        {"plan.overrides": {"layers.*.mlp": {"recompute": "full"}}},
    ],
)
@pytest.mark.parametrize("name", ["gpt3-175b-64xa100", "llama2-7b-fsdp", "llama3-70b-64xh100"])
def test_the_run_reads_back_to_the_same_run(examples: Path, name: str, overrides: dict[str, Any]):
    run = load_run(examples / f"{name}.yaml", overrides=overrides)
    form = json.loads(json.dumps(run_form(run)))
    again = load_run(form)
    same(run, again)
    assert run_form(again) == form


def test_the_run_states_every_degree_and_batch_word(examples: Path):
    value = run_form(load_run(examples / "llama2-7b-fsdp.yaml"))
    assert value["plan"]["dp"] == 8
    assert value["plan"]["zero"] == 3
    assert value["training"]["global_batch"] == 64
    assert value["training"]["microbatch"] == 2
    assert value["training"]["precision"]["master"] == "none"
    assert value["cluster"].startswith("1x8 a100-sxm-80gb")
    assert value["model"]["name"] == "llama-2-7b"
