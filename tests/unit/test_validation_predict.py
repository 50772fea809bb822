"""Predicting rows: equal runs once, in one process or several; and the command."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest

from foretrain.cli.main import main
from foretrain.validation import predict_rows as module
from foretrain.validation.outcomes import Prediction
from foretrain.validation.predict_rows import predict_rows
from foretrain.validation.rows import Measured, Row, read_rows
from foretrain.validation.run_validation import validate_runs

COLUMNS: Mapping[str, str] = {
    "family": "made",
    "model": "GPT 125M",
    "model_class": "llm_dense",
    "n_layers": "4",
    "hidden": "256",
    "heads": "4",
    "vocab": "1024",
    "seq_len": "128",
    "precision": "bf16",
    "gpu": "A100-SXM",
    "gpu_norm": "A100-SXM",
    "gpu_mem_gb": "80",
    "n_gpus": "2",
    "gpus_per_node": "8",
    "tp": "1",
    "pp": "2",
    "dp": "1",
    "mbs": "1",
    "gbs": "4",
    "recompute": "none",
    "framework": "Megatron-LM",
    "framework_version": "2021-04",
    "task": "pretrain",
    "quality": "A",
    "iter_time_s": "0.05",
    "unheard_of": "x",
}


def table(path: Path, *changes: Mapping[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", *COLUMNS, "peak_mem_gib"])
        writer.writeheader()
        for number, change in enumerate(changes):
            writer.writerow({"id": f"made-{number}", **COLUMNS, **change})
    return path


def read(path: Path, *changes: Mapping[str, str]) -> list[Row]:
    return [run.row for run in read_rows(table(path, *changes))]


def test_a_row_is_predicted(tmp_path: Path) -> None:
    (outcome,) = predict_rows(read(tmp_path / "r.csv", {}))
    assert outcome.status == "ok"
    assert outcome.prediction is not None
    prediction = outcome.prediction
    assert 0 < prediction.low_s < prediction.step_s < prediction.high_s
    assert 0 < prediction.allocated_bytes < prediction.reserved_bytes < prediction.device_used_bytes
    assert prediction.microbatches == 4
    assert sorted(outcome.assumed) == [
        "ffn: usual for gpt (not stated)",
        "zero = default of the preset (not stated)",
    ]


def test_equal_runs_are_predicted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = module.predict_mapped
    monkeypatch.setattr(module, "predict_mapped", lambda m: (calls.append(m.key), real(m))[1])
    rows = read(tmp_path / "r.csv", {}, {"quality": "C"}, {"mbs": "2"})
    first, second, third = predict_rows(rows)
    assert len(calls) == 2
    assert first.prediction == second.prediction != third.prediction


def test_several_processes_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_FOR_POOL", 2)
    seen: list[tuple[int, int]] = []
    rows = read(tmp_path / "r.csv", *({"gbs": str(2 * n)} for n in range(1, 13)))
    alone = predict_rows(rows)
    together = predict_rows(rows, workers=2, progress=lambda d, t: seen.append((d, t)))
    assert together == alone
    assert seen[-1] == (12, 12)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pp": "8", "n_gpus": "8"}, "virtual stages"),
        ({"gbs": "3", "mbs": "2"}, "global_batch 3 is not a multiple"),
        ({"cp": "2"}, "cp 2 = 4 does not divide the 2 devices"),
        ({"tp": "3", "n_gpus": "6", "dp": ""}, "tp 3 does not divide"),
    ],
)
def test_a_plan_that_the_checks_refuse_is_unsupported(
    change: dict[str, str], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", *{**COLUMNS, **change}])
        writer.writeheader()
        writer.writerow({"id": "a", **COLUMNS, **change})
    (outcome,) = predict_rows([run.row for run in read_rows(path)])
    assert outcome.status == "unsupported"
    assert reason in (outcome.reason or "")


def test_a_fault_of_ours_is_an_error_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.predict

    def broken(run: object) -> object:
        if run.training.global_batch == 8:  # pyright: ignore[reportAttributeAccessIssue]
            raise ZeroDivisionError("by accident")
        return real(run)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "predict", broken)
    bad, good = predict_rows(read(tmp_path / "r.csv", {"gbs": "8"}, {}))
    assert (bad.status, good.status) == ("error", "ok")
    assert (bad.reason or "").startswith("ZeroDivisionError in ")


def test_the_attention_of_the_source_reaches_the_prediction(tmp_path: Path) -> None:
    rows = read(tmp_path / "r.csv", {}, {})
    fused = replace(rows[0], attention_impl="FlashAttention")
    plain, flash = predict_rows([rows[1], fused])
    assert plain.prediction is not None
    assert flash.prediction is not None
    assert flash.prediction.step_s != plain.prediction.step_s


def test_scrambled_measurements_change_no_prediction(tmp_path: Path) -> None:
    changes = ({}, {"mbs": "2"}, {"task": "pretrain FAILED(oom)", "iter_time_s": ""})
    before = validate_runs(table(tmp_path / "a.csv", *changes))
    noise = {"iter_time_s": "123", "peak_mem_gib": "7"}
    after = validate_runs(table(tmp_path / "b.csv", *({**c, **noise} for c in changes)))
    assert [i.outcome for i in before.items] == [i.outcome for i in after.items]


def test_the_measured_fields_are_known_to_the_reader_only() -> None:
    assert not {f.name for f in fields(Measured)} & {f.name for f in fields(Row)}
    assert not {f.name for f in fields(Measured)} & {f.name for f in fields(Prediction)}


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "r.csv", {}, {"model_class": "bert"})
    target, page = tmp_path / "out.json", tmp_path / "page.md"
    code = main(["validate", "runs", str(path), "--json", str(target), "--report", str(page)])
    assert code == 0
    out = capsys.readouterr()
    assert "2 rows: 1 predicted, 1 unsupported, 0 errors" in out.out
    assert out.err == ""
    form = json.loads(target.read_text())
    assert [r["status"] for r in form["rows"]] == ["ok", "unsupported"]
    assert page.read_text().startswith("# Accuracy\n")


def test_the_command_writes_json_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "r.csv", {"model_class": "bert"})
    assert main(["validate", "runs", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["rows"] == 1


def test_rows_can_be_chosen(tmp_path: Path) -> None:
    path = table(tmp_path / "r.csv", {}, {"family": "other"}, {"family": "other"})
    rows = [i.row.id for i in validate_runs(path, families=["other"], limit=1).items]
    assert rows == ["made-1"]
    assert [i.row.id for i in validate_runs(path, ids=["made-2"]).items] == ["made-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["operators", "FILE"], "unknown kind"),
        (["runs", "missing.csv"], "cannot read"),
        (["runs", "FILE", "--json", "/none/x.json"], "does not exist"),
        (["runs", "FILE", "--ids", "missing.txt"], "--ids"),
        (["runs", "FILE", "--families", "nobody"], "no rows"),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(table(tmp_path / "r.csv", {}))
    assert main(["validate", *(path if a == "FILE" else a for a in arguments)]) == 1
    assert message in capsys.readouterr().err
