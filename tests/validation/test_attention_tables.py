"""Attention and memory-bound operators of published tables, through `validate ops`.

Bounds are the accuracies reached when the constants were fitted, plus a margin; they may only be
lowered. Read through the adapters of studies/costs; shapes of attention are those that no fit has
seen.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from foretrain.validation.ops.report import grouped, statistics_of
from foretrain.validation.ops.validate import validate_ops

pd = pytest.importorskip("pandas", reason="needs foretrain[data]")
pytest.importorskip("pyarrow", reason="needs foretrain[data]")

ROWS = 5000


@pytest.fixture
def results(measurements: Path, tmp_path: Path, monkeypatch):
    """Returns a function that prices a sample of a table."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "studies/costs"))
    module = importlib.import_module("op_tables_more")
    columns = importlib.import_module("op_tables").COLUMNS

    def price(table: str, part: str, **only):
        frame = module.TABLES[table](measurements / "ops")
        for column, values in only.items():
            frame = frame[frame[column].isin(values)]
        frame = frame.sample(min(ROWS, len(frame)), random_state=4)
        kept = [column for column in columns if column in frame.columns]
        frame[kept].to_parquet(tmp_path / "table.parquet")
        return validate_ops(tmp_path / "table.parquet", part=part)

    return price


@pytest.mark.parametrize(
    ("table", "bound"), [("aic_attention_context", 0.08), ("aic_attention_encoder", 0.07)]
)
def test_attention_of_long_sequences(results, table, bound):
    found = results(table, "left-out", dtype=["bf16"])
    found = [r for r in found if r.outcome.device != "" and r.outcome.status == "ok"]
    groups = grouped(found, "device", "kernel", "size")
    means = [
        statistics_of(rows).mean
        for (*_, size), rows in groups.items()
        if size == "s >= 2048" and len(rows) >= 5
    ]
    assert len(means) >= 8
    assert np.median(means) < bound
    assert 0.84 < statistics_of(found).in_band < 0.96


def test_cudnn_forward_and_backward(results):
    found = results("cudnn_sdpa", "all", dtype=["bf16", "fp8"], window=[0.0])
    assert statistics_of(found).n > 150
    assert statistics_of(found).mean < 0.04


def test_pytorch_calls_over_16_mb(results):
    """On hosts of six devices, whose launch differs from that of the stack."""
    bounds = {"elementwise": 0.08, "softmax": 0.13, "layernorm": 0.12}
    devices = ["p4", "t4", "v100-pcie-32gb", "p100-pcie-16gb"]
    found = results("neusight_vector", "all", op=list(bounds), device=devices)
    for (device, op, size), rows in grouped(found, "device", "op", "size").items():
        if size == "over 16 MB":
            assert statistics_of(rows).mean < bounds[op.split()[0]], (device, op)
