"""The command line: quick help, exit codes, files that appear whole, a quiet end of a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import foretrain
from foretrain.cli.main import main
from foretrain.cli.options import FIELD_OF_FLAG, given_flags
from foretrain.cli.output import check_target, json_text, write_atomically
from foretrain.errors import InputError
from foretrain.run.aliases import PLAN_KEYS, TRAINING_KEYS

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("rich", "pandas", "scipy", "torch", "numpy", "yaml", "msgspec")
SMALL = (
    "--model", "gpt2-124m", "--cluster", "1x2 a100-sxm-80gb", "--sequence", "512",
    "--global-batch", "4",
)  # fmt: skip


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_and_help_load_nothing_heavy() -> None:
    loaded = python("import foretrain, sys; print(*sys.modules)").split()
    assert not {name.split(".")[0] for name in loaded} & {*HEAVY, "typer", "click"}
    code = (
        "import sys; from foretrain.cli.main import main; main(['predict', '--help'])\n"
        "print('LOADED', *sys.modules)"
    )
    loaded = python(code).split("LOADED")[1].split()
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)


def test_public_names_are_found_on_first_use() -> None:
    for name in foretrain.__all__:
        assert getattr(foretrain, name) is not None
    assert set(foretrain.__all__) < set(dir(foretrain))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = foretrain.nothing  # type: ignore[attr-defined]


def test_predict_stays_a_function_when_its_module_is_imported() -> None:
    code = "import foretrain, foretrain.predict; print(callable(foretrain.predict))"
    assert python(code).strip() == "True"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"foretrain {project['version']}\n"


def test_every_field_has_a_flag() -> None:
    fields = {f"training.{key}" for key in TRAINING_KEYS} | {f"plan.{key}" for key in PLAN_KEYS}
    by_file_only = {"plan.overrides", "plan.tree"}
    whole = {"model", "cluster", "stack", "plan"}
    assert set(FIELD_OF_FLAG.values()) == (fields - by_file_only) | whole


def test_flags_that_are_absent_are_left_out() -> None:
    assert given_flags({"tp": "4", "pp": None, "json": "x"}) == {"plan.tp": "4"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["predikt"],
        ["predict", "--tpp", "4"],
        ["predict", "a.yaml", "b.yaml"],
        ["explain"],
        ["compare"],
        ["compare", "one.yaml"],
        ["catalog", "things"],
        ["catalog", "devices", "h999"],
        ["catalog", "stacks", "megatrom"],
        ["explain", "run.yaml", "--stage", "grpah"],
        [],
    ],
)
def test_usage_errors_are_bad_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err or not arguments
    assert "Traceback" not in captured.err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "predict" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["devices", "models", "clusters", "stacks", "fabrics"])
def test_catalog_lists_every_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert int(lines[0].split()[0]) == len(lines) - 2 > 3
    name = lines[2].split()[0]
    assert main(["catalog", kind, name]) == 0
    assert name in capsys.readouterr().out


def test_our_own_faults_end_in_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("foretrain.cli.catalog.catalog_text", broken)
    assert main(["catalog"]) == 3
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert "fault of foretrain" in error
    assert "Traceback" not in error
    monkeypatch.setenv("FORETRAIN_DEBUG", "1")
    assert main(["catalog"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_predict_from_flags_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *SMALL, "--preset", "ddp"]) == 0
    out = capsys.readouterr().out
    assert "gpt2-124m" in out
    assert "Assumptions" in out


def test_json_to_a_file_and_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    assert main(["predict", *SMALL, "--json", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["schema"] == 1
    assert "gpt2-124m" in capsys.readouterr().out
    assert main(["predict", *SMALL, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == written
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_nothing_is_written_when_the_prediction_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    assert main(["predict", *SMALL, "--tp", "7", "--json", str(target)]) == 1
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert capsys.readouterr().out == ""


def test_targets_are_checked_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *SMALL, "--json", str(tmp_path / "no" / "x.json")]) == 1
    captured = capsys.readouterr()
    assert "--json: cannot write: the folder" in captured.err
    assert captured.out == ""
    with pytest.raises(InputError, match="is a folder"):
        check_target(str(tmp_path), "--trace")


def test_atomic_writing(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, json_text({"a": 1}))
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"a": float("nan")})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_trace_is_written(tmp_path: Path) -> None:
    target = tmp_path / "t.json.gz"
    assert main(["predict", *SMALL, "--trace", str(target)]) == 0
    assert target.stat().st_size > 0


def test_compare_and_explain(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "small.yaml"
    run.write_text(
        "model: gpt2-124m\ntraining: {sequence: 512, global_batch: 4}\n"
        "plan: {preset: ddp}\ncluster: 1x2 a100-sxm-80gb\n"
    )
    other = tmp_path / "other.yaml"
    other.write_text(run.read_text().replace("ddp", "fsdp"))
    assert main(["compare", str(run), str(other)]) == 0
    out = capsys.readouterr().out
    assert "small" in out
    assert "plan.preset" in out
    for stage in ("graph", "plan", "program", "cost", "memory"):
        assert main(["explain", str(run), "--stage", stage]) == 0
        assert len(capsys.readouterr().out.splitlines()) > 3


def test_compare_reports_the_problems_of_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a.yaml", "b.yaml"]
    for name in names:
        (tmp_path / name).write_text("model: nothing-like-it\n")
    assert main(["compare", *(str(tmp_path / name) for name in names)]) == 1
    error = capsys.readouterr().err
    assert error.count("unknown model") == 2


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m foretrain catalog devices | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    read, write = os.pipe()
    os.close(read)  # the reader is gone before anything is written
    gone = subprocess.run(
        [sys.executable, "-m", "foretrain", "catalog", "devices"],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert (gone.returncode, gone.stderr) == (0, b"")


RUN_7B = """
model: llama-2-7b
training: {sequence: 4096, global_batch: 16, microbatch: 1, precision: bf16}
plan: {preset: %s}
cluster: 1x8 a100-sxm-80gb
"""


def test_compare_ends_with_2_when_one_run_does_not_fit(tmp_path, capsys):
    for preset in ("fsdp", "ddp"):
        (tmp_path / preset).mkdir()
        (tmp_path / preset / "run.yaml").write_text(RUN_7B % preset)
    fits, too_big = (str(tmp_path / preset / "run.yaml") for preset in ("fsdp", "ddp"))
    assert main(["compare", fits, fits]) == 0
    capsys.readouterr()
    assert main(["compare", fits, too_big]) == 2
    out = capsys.readouterr().out
    assert "does not fit by " in out
    assert "plan.preset" in out
    # equal file names are told apart by what was given
    assert fits in out
    assert too_big in out
