"""Embedding kernels, reuse statistics and DLRM steps against the measured data."""

from __future__ import annotations

import csv
from math import exp, log
from pathlib import Path
from statistics import mean, median

import pytest

from foretrain.cost.compute.embedding_bag import price
from foretrain.cost.machine import Machine
from foretrain.hardware import find_device
from foretrain.program import ComputeEvent
from foretrain.run.lookups import read_reuse
from foretrain.run.stacks import load_stack
from foretrain.validation.predict_rows import predict_rows
from foretrain.validation.rows import read_rows

KERNELS = "recsys/kernel_rows_00_batch_size_num_embeddings.csv"
COLUMNS = {"batch": "batch_size", "tables": "num_tables", "rows": "num_embeddings",
           "dim": "embedding_dim", "pooling": "bag_size"}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "largest", "rms"), [("forward", 1.3, 0.15), ("backward", 1.05, 0.03)]
)
def test_embedding_kernels_on_v100(measurements: Path, word: str, largest: float, rms: float):
    machine = Machine(
        device=find_device("v100-sxm-16gb"), stack=load_stack("pytorch-dlrm"), warm=False
    )
    errors: list[float] = []
    for row in csv.DictReader((measurements / KERNELS).read_text().splitlines()):
        if word not in row["kernel_name"]:
            continue
        shape = tuple((name, float(row[column])) for name, column in COLUMNS.items())
        direction = "forward" if word == "forward" else "backward"
        event = ComputeEvent(op="embedding_bag", direction=direction, dtype="fp32", shape=shape,
                             flops=0.0, bytes=0.0)  # fmt: skip
        errors.append(log(price([event], machine)[0].value_s * 1e6 / float(row["kernel_runtime"])))
    assert len(errors) == 10
    assert max(abs(e) for e in errors) < log(largest)
    assert exp(mean(e * e for e in errors) ** 0.5) - 1 < rms


@pytest.mark.parametrize(("year", "distinct"), [(2021, 128_435_723 / 887_017_990), (2022, None)])
def test_reuse_statistics_parse(measurements: Path, year: int, distinct: float | None):
    reuse = read_reuse(measurements / f"recsys/dlrm_datasets/locality_stats_{year}.txt")["*"]
    assert distinct is None or reuse.distinct == pytest.approx(distinct)
    assert sum(rows for rows, _ in reuse.bins) == pytest.approx(1.0, abs=0.01)
    assert sum(lookups for _, lookups in reuse.bins) == pytest.approx(1.0, abs=0.01)


def test_dlrm_steps(measurements: Path):
    """Single-node submissions of MLPerf: the benchmark's own tables, batch and software."""
    rows = {
        item.row.id: item
        for item in read_rows(measurements / "runs/measured_runs.csv.gz")
        if item.row.family == "mlperf_training" and item.row.model.startswith("dlrm")
        and item.row.n_gpus == 8 and item.measured.iter_time_s
    }  # fmt: skip
    errors: dict[str, list[float]] = {}
    for outcome in predict_rows([item.row for item in rows.values()]):
        item = rows[outcome.row.id]
        assert outcome.prediction is not None, outcome.reason
        error = outcome.prediction.step_s / (item.measured.iter_time_s or 1.0) - 1.0
        errors.setdefault(outcome.row.model, []).append(abs(error))
    assert median(errors["dlrm"]) < 0.20
    assert median(errors["dlrm_dcnv2"]) < 0.20
