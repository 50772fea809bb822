"""Explain: every stage prints, WHAT filters, and what names nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from foretrain.errors import InputError
from foretrain.predict import predict
from foretrain.report.explain import cost_text, explain, memory_text
from foretrain.report.patterns import matches
from foretrain.report.program_text import program_text
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.units import format_bytes, format_flop
from report_sample import sample_program, sample_result, sample_run


@pytest.fixture(scope="module")
def small() -> RunSpec:
    """Two stages of a small model, real from end to end."""
    model = {"family": "llama", "layers": 4, "hidden": 512, "heads": 8, "vocab": 32000}
    return load_run(
        {
            "model": model,
            "training": {"sequence": 1024, "global_batch": 8, "microbatch": 1},
            "plan": {"tp": 2, "pp": 2},
            "cluster": "1x4 a100-sxm-80gb",
            "stack": "megatron-te",
        }
    )


@pytest.mark.parametrize(
    ("label", "what", "path"),
    [
        ("layers.*.mlp.up", "layers.*.mlp", ""),
        ("layers.*.mlp.up+mlp.gate", "layers.*.mlp.gate", ""),
        ("mlp.up+mlp.gate", "layers.*.mlp.gate", "layers.0"),
        ("layers.*.mlp.up", "layers.3.mlp.up", ""),
        ("d.mlp.norm.out.2 reduce-scatter", "layers.*.mlp.norm", "layers.0"),
        ("x reduce-scatter", "*reduce*", ""),
        ("stage 1", "stage 1", ""),
        ("embedding.word", "embedding.word", "embedding"),
    ],
)
def test_names_find_labels(label: str, what: str, path: str):
    assert matches(label, what, path=path)


@pytest.mark.parametrize(
    ("label", "what", "path"),
    [
        ("layers.*.mlp.up", "layers.*.attention", ""),
        ("layers.*.mlp.up", "layers.*.mlp.upper", ""),
        ("mlp.up", "head", "layers.0"),
        ("stage 11", "stage 1", ""),
    ],
)
def test_names_do_not_find_other_labels(label: str, what: str, path: str):
    assert not matches(label, what, path=path)


def test_the_program_prints_events_segments_and_classes():
    text = program_text(sample_program())
    for words in (
        "mesh: pp 2 x tp 2 = 4 ranks",
        "e0  gemm forward bf16  b=1 m=2048 n=4096 k=4096",
        "2  layers.reduce: e2, on tp",
        "class stage 1: ranks 2-3",
        "runs s0 x3, after 0",
        "key f0, posted",
    ):
        assert words in text


def test_a_pattern_keeps_only_what_it_names():
    text = program_text(sample_program(), "*reduce*")
    assert "all_reduce" in text
    assert "gemm" not in text
    assert "send" not in text
    only = program_text(sample_program(), "stage 1")
    assert "class stage 0" not in only
    assert "class stage 1" in only


def test_the_program_text_is_the_same_every_time(small: RunSpec):
    assert explain(small, "program") == explain(small, "program")


def test_cost_lists_price_band_count_share_formula_and_source():
    text = cost_text(sample_result(), "gemm*")
    assert "3 ms (90 % band 2.7 ms to 3.6 ms) x 5 = 15 ms, 46.88 %, fitted" in text
    assert "= floor + max(flops / peak, bytes / bandwidth)" in text
    assert "layernorm" not in text
    assert "send_recv 8 MB" in cost_text(sample_result()).split("Guessed constants")[1]


def test_memory_lists_parts_per_class_and_the_moment():
    text = memory_text(sample_result(), sample_run())
    assert "peak in backward of microbatch 0" in text
    assert "stage 1 (ranks 2-3): live tensors at the peak, first backward" in text
    assert "stage 1" not in memory_text(sample_result(), sample_run(), "stage 0")


@pytest.mark.parametrize("stage", ["graph", "plan", "program", "cost", "memory"])
def test_every_stage_of_a_real_run_prints(small: RunSpec, stage: str):
    assert len(explain(small, stage).splitlines()) > 10


@pytest.mark.parametrize(
    ("stage", "what", "word", "absent"),
    [
        ("graph", "layers.*.mlp", "op mlp.up", "attention.core:"),
        ("program", "layers.*.attention", "attention.core", "mlp.act"),
        ("cost", "layers.*.mlp", "mlp.down", "attention.core"),
        ("memory", "stage 1", "stage 1", "stage 0 (ranks 0-1): live"),
    ],
)
def test_what_filters_a_real_run(small: RunSpec, stage: str, what: str, word: str, absent: str):
    text = explain(small, stage, what)
    assert word in text
    assert absent not in text


@pytest.mark.parametrize("stage", ["graph", "program", "cost", "memory"])
def test_a_name_of_nothing_is_refused(small: RunSpec, stage: str):
    with pytest.raises(InputError, match="nonsense"):
        explain(small, stage, "nonsense")


def test_an_unknown_stage_is_refused(small: RunSpec):
    with pytest.raises(InputError, match="graph, plan, program, cost, memory"):
        explain(small, "everything")


def test_the_plan_reads_back_to_the_same_prediction(examples: Path):
    run = load_run(examples / "llama2-7b-fsdp.yaml")
    tree = yaml.safe_load(explain(run, "plan"))["tree"]
    again = load_run(examples / "llama2-7b-fsdp.yaml", overrides={"plan.tree": tree})
    assert predict(again).step_time_s == predict(run).step_time_s


@pytest.mark.parametrize(
    ("value", "size", "work"),
    [
        (4, "4 B", "4 FLOP"),
        (16_384, "16.4 kB", "16.4 kFLOP"),
        (8.82e9, "8.82 GB", "8.82 GFLOP"),
        (1.5e15, "1.5 PB", "1.5 PFLOP"),
    ],
)
def test_sizes_and_work_have_units_that_exist(value: float, size: str, work: str) -> None:
    assert format_bytes(value) == size
    assert format_flop(value) == work
