"""Bad input: one clear message that names the place and the way out, the right exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from foretrain.catalog import read_bytes
from foretrain.cli.main import main

RUN = """\
model: {model}
training: {{sequence: {sequence}, global_batch: {batch}}}
plan: {{preset: megatron, tp: {tp}, pp: {pp}}}
cluster: {cluster}
"""
DEFAULTS = {
    "model": "llama-3-8b",
    "sequence": 4096,
    "batch": 64,
    "tp": 1,
    "pp": 1,
    "cluster": "1x8 h100-sxm",
}


@pytest.fixture
def run_file(tmp_path: Path):
    def write(**fields: object) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(RUN.format(**{**DEFAULTS, **fields}))
        return path

    return write


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the error, after checking that it is one: exit code 1 and nothing else."""
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err.splitlines()


CASES = {
    "unknown model": ({"model": "llama-3-9b"}, "model: unknown model (got 'llama-3-9b')"),
    "tp 7": (
        {"tp": 7},
        "does not divide the 8 devices of the cluster (got 7); allowed: 1, 2, 4, 8",
    ),
    "3 devices for pp 2": (
        {"pp": 2, "cluster": "1x3 h100-sxm"},
        "tp 1 x pp 2 = 2 does not divide the 3 devices of the cluster",
    ),
    "negative batch": ({"batch": -64}, "training.global_batch: out of range (got -64)"),
    "sequence 0": ({"sequence": 0}, "training.sequence: out of range (got 0)"),
    "beyond the cluster": (
        {"tp": 8, "pp": 4},
        "tp 8 x pp 4 = 32 does not divide the 8 devices of the cluster",
    ),
    "unknown device": ({"cluster": "1x8 h101-sxm"}, "unknown device"),
    "not a number": ({"batch": ".nan"}, "training.global_batch: must be a whole number (got nan)"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_that_do_not_work(case: str, run_file, capsys) -> None:
    fields, message = CASES[case]
    lines = refused(["predict", str(run_file(**fields))], capsys)
    assert any(message in line for line in lines), lines
    assert all(line.startswith("foretrain: ") for line in lines)


def test_a_typo_in_a_key(run_file, capsys) -> None:
    path = run_file()
    path.write_text(path.read_text().replace("tp:", "tpp:"))
    (line,) = refused(["predict", str(path)], capsys)
    assert "run.yaml:3: plan.tpp: unknown key 'tpp'" in line
    assert "did you mean 'tp'?" in line


def test_a_tab_in_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-3-8b\nplan:\n\ttp: 2\n")
    (line,) = refused(["predict", str(path)], capsys)
    assert "run.yaml:3:1: a tab character, which YAML does not allow here" in line


def test_a_config_with_a_missing_field(run_file, tmp_path, capsys) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = refused(["predict", str(run_file(model="config.json"))], capsys)
    assert any("num_hidden_layers" in line and "config.json" in line for line in lines), lines


@pytest.mark.parametrize("what", ["absent", "folder", "no permission", "read error"])
def test_a_file_that_cannot_be_read(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    if what == "folder":
        path.mkdir()
    elif what == "no permission":
        path.write_text("model: x\n")
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read every file")
    elif what == "read error":  # reading it fails for every user, root included
        path = Path("/proc/self/mem")
        if not path.exists():
            pytest.skip("needs /proc")
    (line,) = refused(["predict", str(path)], capsys)
    assert str(path) in line


def test_nan_in_a_device_file(run_file, tmp_path, capsys) -> None:
    text = read_bytes("devices/h100-sxm.toml").decode()
    device = tmp_path / "mine.toml"
    device.write_text(text.replace("memory_bandwidth_gb_s = 3350", "memory_bandwidth_gb_s = nan"))
    (line,) = refused(["predict", str(run_file(cluster=f"1x8 {device}"))], capsys)
    assert "memory_bandwidth_gb_s" in line
    assert "not a finite number (got 'nan')" in line


def test_a_model_too_large_for_its_device(run_file, capsys) -> None:
    path = run_file(cluster="1x1 v100-sxm-16gb", batch=1)
    assert main(["predict", str(path)]) == 2
    captured = capsys.readouterr()
    assert "does not fit" in captured.out.splitlines()[0].lower()
    assert captured.err == ""


def test_all_problems_are_told_at_once(run_file, capsys) -> None:
    path = run_file(model="llama-3-9b", sequence=-1, tp="x", cluster="1x8 h101")
    lines = refused(["predict", str(path), "--set", "plan.zro=1"], capsys)
    for word in ("llama-3-9b", "training.sequence", "plan.tp", "h101", "plan.zro"):
        assert any(word in line for line in lines), word
