"""Convolutional networks against measured runs; bounds are what was reached plus a margin."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from foretrain.predict import predict
from foretrain.run.load import load_run
from foretrain.validation.compare import compare
from foretrain.validation.predict_rows import predict_rows
from foretrain.validation.rows import read_rows

DEVICES = {"V100": "v100-sxm-16gb", "TitanXp": "titan-xp", "P100": "p100-pcie-16gb"}
MODELS = {"ResNet50": "resnet-50", "Inception-V3": "inception-v3"}
#: ResNet-50 in fp32 on 4, 8 and 32 V100, 100 Gb/s between nodes.
SCALING = ("oneflow_dlperf-0182", "oneflow_dlperf-0183", "oneflow_dlperf-0185")
#: family -> (rows at least, median error at most)
FAMILIES = {
    "timm_rtx3090": (32, 0.20),
    "lambda_gpu_benchmark": (70, 0.12),
    "oneflow_dlperf": (20, 0.15),
}


@pytest.fixture(scope="module")
def comparisons(request: pytest.FixtureRequest):
    from conftest import require_shared

    runs = [
        run
        for run in read_rows(require_shared("data/runs/measured_runs.csv.gz"))
        if run.row.family in FAMILIES and run.row.model_class.startswith("vision")
    ]
    found = compare(predict_rows([r.row for r in runs]), [r.measured for r in runs])
    return [item for item in found if item.time_ratio is not None]


@pytest.mark.parametrize(("family", "bounds"), FAMILIES.items())
def test_median_error_of_a_family(comparisons, family: str, bounds: tuple[int, float]) -> None:
    errors = [abs(c.time_ratio - 1) for c in comparisons if c.row.family == family]
    assert len(errors) >= bounds[0]
    assert median(errors) <= bounds[1]


def test_resnet_50_on_four_nodes(comparisons) -> None:
    rows = {c.row.id: c for c in comparisons if c.row.id in SCALING}
    assert all(abs(c.time_ratio - 1) <= 0.15 for c in rows.values())
    predicted = [rows[name].outcome.prediction.step_s for name in SCALING]
    measured = [rows[name].measured_s for name in SCALING]
    # 3.2 points apart: the measured loss over four nodes is still larger than the predicted one
    assert abs(predicted[0] / predicted[2] - measured[0] / measured[2]) <= 0.04


def test_single_gpu_runs(measurements: Path) -> None:
    """15 runs in fp32; batches of 16 and 32 on old hosts take longer than predicted."""
    with (measurements / "runs/cnn_single_gpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    ratios = [_predicted_ms(row) / float(row["iteration_time_ms"]) for row in rows]
    assert len(ratios) == 15
    assert median(abs(ratio - 1) for ratio in ratios) <= 0.25


def _predicted_ms(row: dict[str, str]) -> float:
    run = load_run(
        {
            "model": MODELS[row["model"]],
            "training": {"precision": "fp32", "microbatch": int(row["batch_size"])},
            "plan": {"preset": "plain"},
            "cluster": f"1x1 {DEVICES[row['gpu']]}",
        }
    )
    return 1e3 * predict(run).step_time_s.value
