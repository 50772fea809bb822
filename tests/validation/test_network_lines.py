"""Collectives and orders that the network model must meet on measured tables and runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrain.analysis.fit_curve import fit_curve
from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.program import CommEvent
from foretrain.run.stacks import load_stack
from foretrain.validation.mapping import Mapped, map_row
from foretrain.validation.predict_rows import Prediction, predict_mapped
from foretrain.validation.rows import read_rows

pd = pytest.importorskip("pandas", reason="needs foretrain[data]")


def test_curves_of_four_v100(measurements: Path) -> None:
    frame = pd.read_csv(measurements / "network" / "collective_latency_4xV100_DGX1_digitised.csv")
    assert frame.collective.nunique() >= 3
    for collective, rows in frame.groupby("collective"):
        curve = fit_curve(
            rows.size_bytes.to_numpy(float),
            1e-6 * rows.latency_us.to_numpy(float),
            device="v100-sxm-16gb",
            nodes=1,
            ranks=4,
            fabric="none",
            collective=str(collective),
            source="digitised",
        )
        assert curve.mean_error <= 0.03, collective
        assert curve.max_error <= 0.10, collective


def test_all_to_all_of_ten_and_of_eighty_ranks(measurements: Path) -> None:
    """One set of constants holds for one rank per node and for all of them."""
    frame = pd.read_csv(measurements / "network" / "collectives.csv.gz")
    cost = build_cost_model(parse_cluster("10x8 h100-sxm, 8x400G ib"), load_stack("megatron-te"))
    for gpus in (10, 80):
        rows = frame[
            (frame.collective == "alltoall")
            & (frame.gpus == gpus)
            & (frame.nodes == 10)
            & frame.interconnect.str.contains("HGX H100 cluster")
            & (frame.bytes >= 128e6)
        ]
        assert len(rows) >= 8
        ranks = tuple(range(0, 80, 80 // gpus))
        events = [
            CommEvent(collective="all_to_all", bytes=float(size), dtype="fp32", ranks=ranks)
            for size in rows.bytes
        ]
        error = np.abs(cost.price(events).value_s / (1e-6 * rows.time_us.to_numpy()) - 1.0)
        assert error.max() < 0.05, gpus


@pytest.mark.parametrize("framework", ["OneFlow-GPT", "Megatron-LM"])
def test_layouts_on_eight_v100_follow_the_links(measurements: Path, framework: str) -> None:
    """GPT with 16 samples per step: DP8 < (DP2 x TP4, DP4 x TP2) < TP8, the middle two alike."""
    times: dict[int, float] = {}
    for item in read_rows(measurements / "runs" / "measured_runs.csv.gz"):
        row = item.row
        if row.family != "oneflow_dlperf" or "GPT" not in row.model or row.n_gpus != 8:
            continue
        if row.framework != framework or row.gbs != 16 or (row.pp or 1) > 1:
            continue
        mapped = map_row(row)
        assert isinstance(mapped, Mapped)
        found = predict_mapped(mapped)
        assert isinstance(found, Prediction)
        times[row.tp or 1] = found.step_s
    assert times.keys() == {1, 2, 4, 8}
    assert times[1] < min(times[2], times[4])
    assert max(times[2], times[4]) < times[8]
    assert abs(times[2] / times[4] - 1.0) < 0.08
