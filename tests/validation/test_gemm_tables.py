"""GEMMs and experts against tables of measured ones, on the shapes that no fit has seen.

Bounds are the accuracies reached when the constants were fitted, plus a margin; they may only be
lowered. Read through the adapters of studies/costs, priced through `validate ops`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.report import grouped, statistics_of
from foretrain.validation.ops.validate import validate_ops

pd = pytest.importorskip("pandas", reason="needs foretrain[data]")
pytest.importorskip("pyarrow", reason="needs foretrain[data]")

ROWS = 4000


def adapters():
    path = Path(__file__).parents[2] / "studies/costs/op_tables.py"
    spec = importlib.util.spec_from_file_location("op_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(table: str, op: str, measurements: Path, folder: Path, **only):
    """Prices a sample of the rows of a table that no fit has seen."""
    module = adapters()
    frame = module.TABLES[table](measurements / "ops")
    for column, values in only.items():
        frame = frame[frame[column].isin(values)]
    columns = {"gemm": ["n", "k"], "moe_gemm": ["hidden", "ffn"]}[op]
    keys = frame[columns].drop_duplicates()
    keys["out"] = [
        is_left_out(shape_key(op, row._asdict())) for row in keys.itertuples(index=False)
    ]
    frame = frame.merge(keys, on=columns)
    frame = frame[frame.out]
    frame = frame.sample(min(ROWS, len(frame)), random_state=4)
    kept = [column for column in module.COLUMNS if column in frame.columns]
    frame[kept].to_parquet(folder / "table.parquet")
    return validate_ops(folder / "table.parquet", part="left-out")


BIG_BF16 = {
    "a100-sxm-80gb": 0.05, "h100-sxm": 0.055, "b200-sxm": 0.07, "b300-sxm": 0.075,
    "gb200": 0.085, "rtx-pro-6000": 0.05,
}  # fmt: skip


def test_bf16_gemms_of_all_devices(measurements, tmp_path):
    found = results(
        "aic_gemm", "gemm", measurements, tmp_path, dtype=["bf16"], device=list(BIG_BF16)
    )
    by_size = grouped(found, "device", "size")
    for device, bound in BIG_BF16.items():
        assert statistics_of(by_size[device, "big"]).mean < bound, device
    means = [statistics_of(rows).mean for rows in grouped(found, "device").values()]
    assert np.median(means) < 0.095
    assert 0.85 < statistics_of(found).in_band < 0.95


def test_low_precision_gemms_of_the_vendor_kernels(measurements, tmp_path):
    found = results(
        "aic_gemm", "gemm", measurements, tmp_path, dtype=["fp8", "nvfp4"], stack=["torch_flow"]
    )
    for (device, dtype, size), rows in grouped(found, "device", "dtype", "size").items():
        if size == "big":
            assert statistics_of(rows).mean < 0.10, (device, dtype)
    assert 0.85 < statistics_of(found).in_band < 0.95


def test_volta_and_turing_tensor_cores(measurements, tmp_path):
    found = results("deepbench_gemm", "gemm", measurements, tmp_path, dtype=["fp16"])
    assert statistics_of(found).n > 40
    assert statistics_of(found).mean < 0.11


def test_experts_of_the_grouped_kernels(measurements, tmp_path):
    kernels = ["moe_torch_flow_cutlass", "deepgemm", "sglang_flashinfer_trtllm_moe"]
    found = results("aic_moe", "moe_gemm", measurements, tmp_path, stack=kernels)
    groups = grouped(found, "device", "dtype", "kernel")
    means = [statistics_of(rows).mean for rows in groups.values() if len(rows) > 20]
    assert np.median(means) < 0.155
    assert 0.8 < statistics_of(found).in_band < 0.95
