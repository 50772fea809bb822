"""Several calibration files: together they hold what each measured; a later one wins."""

from pathlib import Path

import pytest

import foretrain
from foretrain.cli.main import main
from foretrain.cost.calibration import load
from foretrain.cost.operator_constants import operators_text
from foretrain.cost.user_files import read_files

FLAGS = ("--model", "llama-2-7b", "--sequence", "512", "--cluster", "1x8 h100-sxm", "--tp", "8")


def memory_file(path: Path, t0_us: float) -> str:
    shipped = next(e for e in load("memory")["entry"] if "devices" in e)
    entry = {**shipped, "devices": ["h100-sxm"], "t0_us": t0_us}
    path.write_text(operators_text({"memory": [entry]}), encoding="utf-8")
    return str(path)


def curve_file(path: Path, latency_us: float) -> str:
    path.write_text(
        "[[network.curve]]\n"
        "device = 'h100-sxm'\nnodes = 1\nranks = 8\nfabric = ''\ncollective = 'all_reduce'\n"
        f"latency_us = {latency_us}\nplateau = true\nm1_bytes = 1000.0\nm2_bytes = 1000.0\n"
        "bandwidth_gb_s = 400.0\nsigmoid = []\nsmallest_bytes = 8.0\nlargest_bytes = 1e9\n"
        "mean_error = 0.01\nmax_error = 0.02\nsource = 'made up'\n",
        encoding="utf-8",
    )
    return str(path)


def test_a_later_file_wins_and_nothing_else_is_lost(tmp_path: Path) -> None:
    first, second = (memory_file(tmp_path / f"{t}.toml", t) for t in (3.0, 4.0))
    slow, fast = (curve_file(tmp_path / f"c{t}.toml", t) for t in (30.0, 10.0))
    files = read_files([first, slow, second, fast])
    assert [entry["t0_us"] for entry in files.entries["memory"]] == [4.0, 3.0]
    assert [curve.latency_s for curve in files.network.curves] == [pytest.approx(10e-6)]


def test_predict_takes_a_path_and_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path was an AttributeError in Python, and the first of two files was dropped."""
    slow, curve = memory_file(tmp_path / "s.toml", 40.0), curve_file(tmp_path / "c.toml", 30.0)
    spec = {"model": "llama-2-7b", "cluster": "1x8 h100-sxm", "plan": {"tp": 8},
            "training": {"sequence": 512}}  # fmt: skip
    run = foretrain.load_run(spec)
    plain = foretrain.predict(run).step_time_s.value
    one = foretrain.predict(run, calibration=Path(slow)).step_time_s.value
    assert one > plain
    assert foretrain.predict(run, calibration=slow).step_time_s.value == one
    assert foretrain.predict(run, calibration=[slow, curve]).step_time_s.value != one
    assert foretrain.predict(run).step_time_s.value == plain
    assert main(["predict", *FLAGS, "--calibration", slow, "--calibration", curve]) == 0
    text = capsys.readouterr().out
    assert "your constants of memory" in text
    assert "c.toml" in text
