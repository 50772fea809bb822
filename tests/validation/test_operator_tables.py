"""Convolutions and memory-bound operators against tables of measured ones.

Bounds are the accuracies reached when the constants were taken over, plus a margin; they may only
be lowered. The shapes are those that the fits of studies/costs left out.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack
from foretrain.validation.ops.predict import timed_alone

pd = pytest.importorskip("pandas", reason="needs foretrain[data]")
pytest.importorskip("pyarrow", reason="needs foretrain[data]")


def left_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % 3 == 0


def error(device: str, events: list[ComputeEvent], measured, kernel: str = "") -> np.ndarray:
    stack = replace(load_stack("pytorch-eager"), gemm_kernel=kernel)
    prices = build_cost_model(parse_cluster(f"1x1 {device}"), stack, warm=False).price(events)
    return np.abs(prices.value_s / np.asarray(measured) - 1)


def conv(row, direction: str, dtype: str) -> ComputeEvent:
    shape = {
        "n": row.N, "c": row.C, "h": row.H, "w": row.W, "k": row.K, "r": row.R, "s": row.S,
        "stride": row.stride_h,
        "oh": (row.H + 2 * row.pad_h - row.R) // row.stride_h + 1,
        "ow": (row.W + 2 * row.pad_w - row.S) // row.stride_w + 1,
    }  # fmt: skip
    named = tuple((key, float(value)) for key, value in shape.items())
    return ComputeEvent(
        op="conv2d",
        direction=direction,  # pyright: ignore[reportArgumentType]
        dtype=dtype,
        shape=named,
        flops=1.0,
        bytes=1.0,
    )


@pytest.mark.parametrize(
    ("gpu", "device", "dtype", "mean", "median"),
    [
        ("NV_V100", "v100-sxm-16gb", "fp32", 0.20, 0.13),
        ("NV_T4", "t4", "fp32", 0.18, 0.13),
        ("NV_1080Ti", "gtx-1080-ti", "fp32", 0.24, 0.18),
        ("NV_V100", "v100-sxm-16gb", "fp16", 0.30, 0.18),
        ("NV_T4", "t4", "fp16", 0.37, 0.20),
    ],
)
def test_convolution_of_three_directions(measurements: Path, gpu, device, dtype, mean, median):
    frame = pd.read_parquet(measurements / "ops" / "deepbench_conv.parquet")
    mixed = frame.sheet.astype(str).str.contains("Mixed")
    frame = frame[(frame.gpu == gpu) & (mixed == (dtype == "fp16"))]
    frame = frame[[left_out(f"{r.C:g}_{r.K:g}_{r.H:g}") for r in frame.itertuples()]]
    errors = []
    for column, direction in (
        ("fwd_ms", "forward"),
        ("bwd_data_ms", "backward_input"),
        ("bwd_weight_ms", "backward_weight"),
    ):
        rows = frame[frame[column] > 0]
        events = [conv(row, direction, dtype) for row in rows.itertuples()]
        errors.append(error(device, events, rows[column] * 1e-3))
    whole = np.concatenate(errors)
    assert len(whole) > 50
    assert whole.mean() < mean
    assert np.median(whole) < median


@pytest.mark.parametrize(
    ("gpu", "device", "op", "bound"),
    [
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb", "elementwise", 0.05),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb", "softmax", 0.12),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb", "layernorm", 0.12),
        ("Tesla T4", "t4", "elementwise", 0.05),
        ("Tesla T4", "t4", "softmax", 0.12),
        ("AMD Instinct MI100", "mi100", "softmax", 0.15),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb", "elementwise", 0.06),
    ],
)
def test_memory_bound_operators(measurements: Path, gpu, device, op, bound):
    """Over 64 MB, where the launch of a PyTorch call (15 to 60 us, added) no longer decides.

    Element-wise calls end on the host before a long kernel does: 15 to 25 us of a floor of 26 to 57
    stay beside it (studies/costs/memory.py); they are priced as `validate ops` does.
    """
    names = {"elementwise": ("add", "mul", "relu", "gelu"), "softmax": ("softmax",)}
    frame = pd.read_parquet(measurements / "ops" / "neusight_vector_fp32.parquet")
    frame = frame[(frame.gpu == gpu) & frame.op.isin(names.get(op, ("ln",)))]
    launch = frame.groupby("op", observed=True).latency_ms.transform(lambda x: x.quantile(0.02))
    operands = np.where(frame.op.isin(("add", "mul")), 3, 2)
    moved = 4.0 * frame.B * frame.H * operands
    frame = frame.assign(moved=moved, launch=launch)[moved > 64e6]
    frame = frame[[left_out(f"{h:g}") for h in frame.H]]
    events = [
        ComputeEvent(
            op=op,
            direction="forward",
            dtype="fp32",
            shape=(("rows", float(r.B)), ("cols", float(r.H))),
            flops=1.0,
            bytes=float(r.moved),
        )
        for r in frame.itertuples()
    ]
    stack = replace(load_stack("megatron-te"), kernels={}, eager_bytes={})
    prices = build_cost_model(parse_cluster(f"1x1 {device}"), stack, warm=False).price(events)
    measured = frame.latency_ms.to_numpy() * 1e-3
    whole = prices.value_s + frame.launch.to_numpy() * 1e-3
    if op == "elementwise":
        whole = timed_alone(prices.value_s, np.full(len(frame), 20e-6), np.ones(len(frame), bool))
    errors = np.abs(whole / measured - 1)
    assert len(errors) >= 20
    assert errors.mean() < bound
