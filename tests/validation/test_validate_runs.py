"""Predicted against measured: what has to hold on the core rows and a fixed sample."""

from __future__ import annotations

import csv
import gzip
import io
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from foretrain.validation.compare import Comparison
from foretrain.validation.mapping import Mapped, Unsupported, map_row
from foretrain.validation.predict_rows import predict_rows
from foretrain.validation.report import Report
from foretrain.validation.rows import MEASURED_NUMBERS, MEASURED_TEXTS, Row, read_rows
from foretrain.validation.run_validation import validate_runs
from foretrain.validation.subsets import is_plain_dense

SAMPLE = Path(__file__).with_name("sample_runs.txt")

pytestmark = pytest.mark.slow


def sample_ids() -> list[str]:
    lines = SAMPLE.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@cache
def report_of(path: Path, ids: tuple[str, ...] = ()) -> Report:
    return validate_runs(path, ids=ids)


@pytest.fixture
def core(measurements: Path) -> Report:
    return report_of(measurements / "runs/core.csv")


@pytest.fixture
def sample(measurements: Path) -> Report:
    return report_of(measurements / "runs/measured_runs.csv.gz", tuple(sample_ids()))


def dense(report: Report) -> list[Comparison]:
    """The rows that this version is made for: FP8 is left out as well."""
    return [
        item
        for item in report.items
        if is_plain_dense(item.row) and "8" not in item.row.precision.lower().replace("bf16", "")
    ]


def test_core_every_row_has_a_status_and_a_reason(core: Report) -> None:
    for item in core.items:
        assert item.outcome.status in ("ok", "unsupported")
        assert (item.outcome.reason is None) == (item.outcome.status == "ok")
    assert len(core.items) == 40


def test_core_dense_decoders_are_predicted(core: Report) -> None:
    rows = dense(core)
    assert len(rows) == 21
    assert sum(item.outcome.status == "ok" for item in rows) >= 20


def test_core_median_error(core: Report) -> None:
    errors = sorted(abs(i.time_ratio - 1) for i in dense(core) if i.time_ratio is not None)
    assert len(errors) >= 17
    assert errors[len(errors) // 2] <= 0.15


def test_sample_has_no_faults_of_ours(sample: Report) -> None:
    assert len(sample.items) == len(sample_ids()) == 150
    assert not [i.row.id for i in sample.items if i.outcome.status == "error"]


def test_sample_errors_stay_within_bounds(sample: Report) -> None:
    stats = sample.groups["subset"]["dense decoders, grade A or A-"]
    assert stats.predicted >= 0.9 * stats.rows
    assert stats.time.group_median is not None
    assert stats.time.group_median <= 0.20


def test_sample_out_of_memory_is_foretold(sample: Report) -> None:
    oom = sample.overall.oom
    assert oom.tp + oom.fn >= 20
    assert oom.tp >= 0.6 * (oom.tp + oom.fn)
    assert oom.fp <= 0.15 * (oom.fp + oom.tn)


def scrambled(path: Path) -> Iterator[dict[str, str]]:
    """The rows of the file with every measured column blank or wrong."""
    noise = random.Random(7)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            for name in MEASURED_NUMBERS:
                line[name] = noise.choice(["", "0", "1e9", str(noise.random()), "n/a"])
            for name in MEASURED_TEXTS:
                line[name] = noise.choice(["", "tokens", "images"])
            yield line


@pytest.fixture
def both(measurements: Path, tmp_path: Path) -> list[Path]:
    path = measurements / "runs/measured_runs.csv.gz"
    lines = list(scrambled(path))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    other = tmp_path / "scrambled.csv"
    other.write_text(text.getvalue(), encoding="utf-8")
    return [path, other]


def mapped_or_reason(row: Row) -> Mapped | str:
    try:
        return map_row(row)
    except Unsupported as unsupported:
        return unsupported.reason


def test_measurements_reach_no_row(both: list[Path]) -> None:
    before, after = ([run.row for run in read_rows(path)] for path in both)
    assert len(before) > 9000
    assert before == after
    assert [mapped_or_reason(row) for row in before] == [mapped_or_reason(row) for row in after]


def test_measurements_reach_no_prediction(both: list[Path]) -> None:
    wanted = set(sample_ids()[::5])
    before, after = (
        predict_rows([r.row for r in read_rows(path) if r.row.id in wanted]) for path in both
    )
    assert len(before) == 30
    assert before == after


def test_every_row_of_the_file_is_mapped_or_refused(measurements: Path) -> None:
    runs = read_rows(measurements / "runs/measured_runs.csv.gz")
    answers = [mapped_or_reason(run.row) for run in runs]
    assert len(answers) == 9548
    assert all(answers)
    plain = [
        answer
        for run, answer in zip(runs, answers, strict=True)
        if is_plain_dense(run.row) and run.row.quality in ("A", "A-")
    ]
    assert len(plain) > 2500
    assert sum(isinstance(answer, Mapped) for answer in plain) >= 0.9 * len(plain)
