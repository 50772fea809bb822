"""Odd input that once ended as an internal error, hung, or was taken without a word."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from foretrain import InputError, load_run, predict
from foretrain.cli.main import main
from foretrain.cli.output import json_text
from foretrain.predict import compile_run
from foretrain.report.json_form import to_json
from foretrain.strategy.text import tree_mapping

RUN: dict[str, Any] = {
    "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 1024},
    "training": {"sequence": 128, "global_batch": 16, "microbatch": 1},
    "plan": {"preset": "megatron", "tp": 2, "pp": 2},
    "cluster": "1x8 h100-sxm",
}


def with_plan(**plan: Any) -> dict[str, Any]:
    return {**RUN, "plan": {**RUN["plan"], **plan}}


def tree() -> dict[str, Any]:
    return tree_mapping(compile_run(load_run(RUN)).tree)


def damaged(path: str, value: object) -> dict[str, Any]:
    result: Any = copy.deepcopy(tree())
    *parents, last = path.split(".")
    inner = result
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mesh", [["pp", 2], ["tp", 0], ["cp", 1], ["dp_shard", 2], ["dp_replicate", 1]]),
        ("mesh", [["pp", 2]]),
        ("mesh", {"pp": 2}),
        ("schedule.pp", -1),
        ("schedule.pp", None),
        ("schedule.pp", 4),
        ("schedule.kind", "tp"),
        ("schedule.interleave", [[1]]),
        ("schedule.stages", [4]),
        ("runtime.bucket_bytes", 0),
        ("runtime.bucket_bytes", float("nan")),
        ("runtime.overlap_grad", {}),
        ("runtime.prefetch", -1),
        ("data_axes", ["dp"]),
        ("nodes", [{"pattern": "", "reshard": "maybe"}]),
        ("nodes", 5),
    ],
)
def test_a_damaged_tree_is_refused(path: str, value: object) -> None:
    with pytest.raises(InputError):
        load_run({**RUN, "plan": {"preset": "megatron", "tree": damaged(path, value)}})


@pytest.mark.parametrize(
    "knob",
    [
        {"recompute": "full"},
        {"zero": 1},
        {"sequence_parallel": True},
        {"shard": 2},
        {"bucket_mib": 1},
        {"overlap": {"grad": True}},
    ],
    ids=str,
)
def test_a_knob_beside_a_tree_that_says_otherwise_is_refused(knob: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"plan\.tree"):
        load_run({**RUN, "plan": {"preset": "megatron", "tree": tree(), **knob}})


def test_the_plan_says_what_its_tree_does() -> None:
    given = with_plan(zero=1, sequence_parallel=True, recompute="full")
    first = load_run(given)
    again = load_run(
        {**RUN, "plan": {"preset": "megatron", "tree": tree_mapping(compile_run(first).tree)}}
    )
    assert (again.plan.zero, again.plan.sequence_parallel) == (1, True)
    assert again.plan.recompute == first.plan.recompute
    assert not [line for line in again.assumptions if line.startswith(("zero", "recompute"))]
    assert predict(again).step_time_s == predict(first).step_time_s


@pytest.mark.parametrize(
    "node",
    [
        {"layers.*.mlp": {"recompute": "full"}},
        {"layers.*.mlp": {"computation": 5}},
        {"layers.*.mlp": {"memory": {"weight": 5}}},
        {"layers.*.mlp": {"memory": 5}},
        {"layers.0": {"recompute": 5}},
        {"layers.*": {"keep_gathered": 5}},
        {"layers.*": {"reshard": "maybe"}},
    ],
    ids=str,
)
def test_an_override_of_the_wrong_form_is_refused(node: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        predict(load_run(with_plan(overrides=node)))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**RUN["model"], "layers": 100_000}},
        {"cluster": "100000x8 h100-sxm, 8x400G ib"},
        {"training": {"sequence": 128, "global_batch": 400_000, "microbatch": 1}},
        {"plan": {"preset": "megatron", "order": ["pp", "dp", "cp", "tp", "dp_shard"]}},
        {"plan": {"preset": "fsdp", "pp": 2, "schedule": "gpipe", "interleave": 2}},
    ],
    ids=["layers", "devices", "micro-batches", "order", "gpipe with chunks"],
)
def test_what_would_run_for_ever_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        load_run({**RUN, **change})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", b'plan: {tp: !!int ""}'),
        ("run.yaml", b"plan: {sequence_parallel: !!bool maybe}"),
        ("run.json", b'{"plan": {"tp": ' + b"9" * 5000 + b"}}"),
        ("run.yaml", b"plan: " + b"9" * 5000 + b"M"),
    ],
    ids=["tag int", "tag bool", "huge number", "huge degree"],
)
def test_an_odd_file_ends_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["predict", str(path)]) == 1
    assert len(capsys.readouterr().err) < 5000


def test_a_broken_gzip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\0\0\0\0\0\xff" + b"\xff" * 40)
    assert main(["validate", "runs", str(path)]) == 1


@pytest.mark.parametrize("target", ["/dev/full", "x" * 300], ids=["full disk", "long name"])
def test_a_target_that_takes_nothing_is_bad_input(target: str) -> None:
    flags = ["--model", "gpt2-124m", "--sequence", "128", "--cluster", "1x1 a100-sxm-80gb"]
    assert main(["predict", *flags, "--json", target]) == 1


def test_hardware_flops_add_what_is_computed_again_and_nothing_else() -> None:
    """Unfused attention computes the full square: more time, not more FLOP in HFU."""
    plain = predict(load_run({**with_plan(), "stack": "megatron"}))
    again = predict(load_run({**with_plan(recompute="full"), "stack": "megatron"}))
    assert plain.hfu == plain.mfu
    assert again.hfu > again.mfu


@pytest.mark.parametrize("section", ["model", "training", "plan", "cluster", "stack"])
def test_keys_that_are_no_texts_are_refused(section: str) -> None:
    """`cluster: {1: 2}` ended as an internal error."""
    with pytest.raises(InputError):
        load_run({**RUN, section: {1: 2}})


@pytest.mark.parametrize("preset", ["megatron", "ddp", "fsdp", "deepspeed"])
def test_a_tree_is_part_of_the_json_of_its_run(preset: str, tmp_path: Path) -> None:
    """DDP copies all buckets: their number was infinite, which JSON cannot hold."""
    plain = {**RUN, "plan": {"preset": preset}}
    expanded = tree_mapping(compile_run(load_run(plain)).tree)
    run = load_run({**RUN, "plan": {"preset": preset, "tree": expanded}})
    path = tmp_path / "run.json"
    path.write_text(json_text(to_json(predict(run), run)), encoding="utf-8")
    again = load_run({**json.loads(path.read_text(encoding="utf-8"))["run"]})
    assert predict(again).memory == predict(load_run(plain)).memory


def test_a_tree_with_context_parallelism_reads_back_to_the_same_run() -> None:
    """Its cp was lost: the run had twice the data-parallel ranks and half the micro-batches."""
    plain = with_plan(tp=1, pp=1, cp=2)
    run = load_run(plain)
    again = load_run({**plain, "plan": {"preset": "megatron",
                                        "tree": tree_mapping(compile_run(run).tree)}})  # fmt: skip
    assert (again.plan.cp, again.plan.dp) == (2, run.plan.dp)
    assert predict(again).step_time_s == predict(run).step_time_s
    assert predict(again).memory == predict(run).memory
