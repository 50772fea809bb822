"""Measured values as people write them, and the command that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.analysis.fit_measured import measured_step_s
from foretrain.cli.main import main
from foretrain.errors import InputError
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec

RUN = """
model: {family: gpt, layers: 12, hidden: 2048, heads: 16, vocab: 51200}
training: {sequence: 1024, global_batch: 64, microbatch: 4, precision: bf16, optimizer: adamw}
plan: {preset: megatron, tp: %d}
cluster: 1x8 a100-sxm-80gb
"""
TOKENS = 64 * 1024


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    path = tmp_path_factory.mktemp("fit") / "run.yaml"
    path.write_text(RUN % 1)
    return load_run(path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("13.75s", 13.75),
        ("13.75", 13.75),
        (" 412 ms ", 0.412),
        ("412ms/step", 0.412),
        ("1.5e3 us", 1.5e-3),
        ("2 min", 120.0),
        ("3.2 s/it", 3.2),
        ("0.5 it/s", 2.0),
        ("2900 tok/s/GPU", TOKENS / (2900 * 8)),
        ("2,900 tokens/s/gpu", TOKENS / (2900 * 8)),
        ("2900 tokens per second per device", TOKENS / (2900 * 8)),
        ("186k tok/s", TOKENS / 186e3),
        ("12.5 samples/s", 64 / 12.5),
        ("2 samples/sec/GPU", 64 / 16),
    ],
)
def test_times_and_rates(run: RunSpec, text: str, seconds: float):
    assert measured_step_s(text, run) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "13,75s", "0s", "-3s", "1e999", "5 parsecs", "3 s/GPU", "4 tok", "4 tok/h", "nan"],
)
def test_anything_else_is_refused_with_what_is_allowed(run: RunSpec, text: str):
    with pytest.raises(InputError) as caught:
        measured_step_s(text, run, "--measured of a.yaml")
    assert "--measured of a.yaml" in str(caught.value)
    assert "tok/s/GPU" in str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    names: list[str] = []
    for tp in (1, 8):
        path = tmp_path / f"tp{tp}.yaml"
        path.write_text(RUN % tp)
        names.append(str(path))
    return names


def fit_form(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    target = tmp_path / "fit.json"
    assert main(["fit", *arguments, "--json", str(target)]) == 0
    return json.loads(target.read_text())


def test_one_run_on_the_command_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    form = fit_form([files[0], "--measured", "5s"], tmp_path)
    out = capsys.readouterr().out
    assert out.startswith("Measured ")
    assert "One run cannot name the cause" in out
    assert (form["verdict"], form["named"], form["schema"]) == ("one_run", None, 1)
    assert {e["constant"] for e in form["constants"]} == {"compute", "scaleup", "nic", "host"}


def test_values_belong_to_the_runs_in_their_order(files: list[str], tmp_path: Path):
    arguments = [files[0], "--measured", "5s", files[1], "--measured", "700ms"]
    form = fit_form(arguments, tmp_path)
    assert [r["run"] for r in form["runs"]] == ["tp1", "tp8"]
    assert [r["measured_s"] for r in form["runs"]] == pytest.approx([5.0, 0.7])


def test_json_to_standard_output_is_json_alone(
    files: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["fit", files[0], "--measured", "5s", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "one_run"


@pytest.mark.parametrize("values", [[], ["--measured", "1s", "--measured", "2s"]])
def test_a_run_without_its_value_is_refused(
    files: list[str], values: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["fit", files[0], *values]) == 1
    assert "measured value(s)" in capsys.readouterr().err


def test_all_problems_are_reported_together(files: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["fit", files[0], "absent.yaml", "--measured", "soon", "--measured", "1s"]) == 1
    err = capsys.readouterr().err
    assert "soon" in err
    assert "absent.yaml" in err
