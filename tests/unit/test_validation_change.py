"""What moved between two states of the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrain.errors import FileFormatError
from foretrain.validation.change import describe_change, read_baseline, reduced
from foretrain.validation.compare import compare
from foretrain.validation.outcomes import Outcome, Prediction
from foretrain.validation.report import Report, build_report, to_json
from foretrain.validation.rows import Measured, Row


def report(*steps: float) -> Report:
    outcomes = [
        Outcome(
            row=Row(id=f"r{number}"),
            status="ok",
            prediction=Prediction(
                first_reserved_bytes=1.0,
                usable_bytes=1.0,
                step_s=step,
                low_s=step,
                high_s=step,
                allocated_bytes=1.0,
                reserved_bytes=1.0,
                device_used_bytes=1.0,
                fits=True,
                microbatches=1,
            ),
        )
        for number, step in enumerate(steps)
    ]
    return build_report(compare(outcomes, [Measured(iter_time_s=1.0)] * len(steps)))


def test_moves_and_errors_are_told(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(reduced(report(1.1, 1.2, 1.5))))
    text = describe_change(report(1.1, 1.3, 1.4, 2.0), read_baseline(path))
    assert "3 rows: 2 predictions moved, 1 are new, 0 are gone" in text
    assert "before 20.0%, after 30.0% (3 rows)" in text
    assert text.splitlines()[-2:] == ["     +8.3%  r1", "     -6.7%  r2"]


def test_nothing_moved(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(reduced(report(1.23456789))))
    assert "0 predictions moved" in describe_change(report(1.23456789), read_baseline(path))


def test_the_full_json_is_a_baseline_too(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(to_json(report(1.0, 2.0))))
    assert read_baseline(path) == {"r0": 1.0, "r1": 2.0}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"id": 1}]}', '{"predicted_s": 3}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="not the JSON"):
        read_baseline(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot read"):
        read_baseline(tmp_path / "none.json")
