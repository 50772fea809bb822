"""The cost model against tables of measured operators and collectives.

Bounds are the accuracies reached when the constants were taken over, plus a margin; they may only
be lowered. Errors are |predicted / measured - 1|.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.program import CommEvent, ComputeEvent
from foretrain.run.stacks import load_stack

pd = pytest.importorskip("pandas", reason="needs foretrain[data]")
pytest.importorskip("pyarrow", reason="needs foretrain[data]")

DEVICES = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
}


def model(device: str, **changes):
    stack = replace(load_stack("megatron-te"), **changes)
    return build_cost_model(parse_cluster(f"1x4 {device}"), stack, warm=False)


def event(op, dtype, shape, flops=1.0, num_bytes=1.0):
    named = tuple((key, float(value)) for key, value in shape.items())
    return ComputeEvent(
        op=op, direction="forward", dtype=dtype, shape=named, flops=flops, bytes=num_bytes
    )


def errors(predicted, measured):
    ratio = np.asarray(predicted) / np.asarray(measured)
    return np.abs(ratio - 1), ratio - 1


@pytest.fixture(scope="module")
def gemm_table():
    from conftest import require_shared

    frame = pd.read_parquet(
        require_shared("data/ops/aic_gemm.parquet"),
        columns=["system", "gemm_dtype", "m", "n", "k", "latency_ms"],
        filters=[("gemm_dtype", "==", "bfloat16")],
    )
    return frame.groupby(["system", "m", "n", "k"], as_index=False).latency_ms.median()


@pytest.mark.parametrize(
    ("system", "big", "everything"),
    [
        ("a100_sxm", 0.055, 0.11),
        ("h100_sxm", 0.065, 0.10),
        ("b200_sxm", 0.085, 0.11),
        ("b300_sxm", 0.09, 0.11),
        ("gb200", 0.095, 0.11),
    ],
)
def test_gemm_bf16(gemm_table, system, big, everything):
    rows = gemm_table[gemm_table.system == system].sample(1500, random_state=1)
    events = [
        event("gemm", "bf16", {"b": 1, "m": r.m, "n": r.n, "k": r.k}) for r in rows.itertuples()
    ]
    prices = model(DEVICES[system]).price(events)
    measured = rows.latency_ms.to_numpy() * 1e-3
    error, _ = errors(prices.value_s, measured)
    large = (rows[["m", "n", "k"]].min(axis=1) >= 1024).to_numpy()
    assert error[large].mean() < big
    assert error.mean() < everything
    inside = (prices.low_s <= measured) & (measured <= prices.high_s)
    assert 0.8 < inside[large].mean() <= 1.0


@pytest.mark.parametrize(
    ("system", "source", "bound"),
    [
        ("a100_sxm", "vllm_flash_attn", 0.05),
        ("a100_sxm", "flash_attention", 0.07),
        ("h100_sxm", "vllm_flash_attn_fa3", 0.08),
        ("h100_sxm", "torch_flow", 0.07),
        ("b200_sxm", "trtllm_mha", 0.09),
        ("gb200", "torch_flow", 0.08),
    ],
)
def test_attention_forward(measurements: Path, system, source, bound):
    """The kernel of a table has constants of its own, under the name that the table gives it."""
    frame = pd.read_parquet(
        measurements / "ops" / "aic_attention_context.parquet",
        filters=[("system", "==", system), ("kernel_source", "==", source)],
    )
    frame = frame[
        (frame.attn_dtype == "bfloat16")
        & (frame.kv_cache_dtype == "bfloat16")
        & ~(frame.window_size > 0)
        & (frame.isl >= 2048)
        & (frame.num_heads >= 16)
    ]
    rows = frame.sample(min(800, len(frame)), random_state=1)
    events = [
        event(
            "attention",
            "bf16",
            {
                "batch": r.batch_size, "seq_q": r.isl, "seq_kv": r.isl, "heads": r.num_heads,
                "kv_heads": r.num_key_value_heads or r.num_heads, "head_dim": r.head_dim,
                "head_dim_v": r.head_dim, "causal": 1, "window": 0,
            },
        )
        for r in rows.itertuples()
    ]  # fmt: skip
    prices = model(DEVICES[system], attention_kernel=source).price(events)
    error, _ = errors(prices.value_s, rows.latency_ms.to_numpy() * 1e-3)
    assert error.mean() < bound


@pytest.mark.parametrize(("way", "direction"), [("fwd", "forward"), ("bwd", "backward")])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_of_cudnn_in_both_directions(measurements: Path, way, direction, causal):
    """bf16 without a window on GB200: 2 to 6 % when written."""
    frame = pd.read_parquet(measurements / "ops" / "cudnn_sdpa_fwd_bwd.parquet")
    mask = "top_left" if causal else "no_mask"
    frame = frame[
        (frame.data_type == "bfloat16")
        & frame.sliding_window_size.isna()
        & (frame.profile_pass == way)
        & (frame.attn_mask == mask)
        & ~frame.deterministic_bwd.astype(bool)
    ]
    events = [
        replace(
            event(
                "attention",
                "bf16",
                {
                    "batch": r.batch_size, "seq_q": r.q_seqlen, "seq_kv": r.kv_seqlen,
                    "heads": r.num_q_heads, "kv_heads": r.num_kv_heads, "head_dim": r.head_dim_qk,
                    "head_dim_v": r.head_dim_vo, "causal": causal, "window": 0,
                },
            ),
            direction=direction,
        )
        for r in frame.itertuples()
    ]  # fmt: skip
    prices = model("gb200").price(events)
    error, _ = errors(prices.value_s, frame.latency_ms.to_numpy() * 1e-3)
    assert len(events) >= 15
    assert error.mean() < 0.06


NAMES = {"alltoall": "all_to_all"}


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "b200_sxm"])
def test_collectives_in_one_node(measurements: Path, system):
    frame = pd.read_parquet(measurements / "ops" / "aic_comm_nccl.parquet")
    frame = frame[(frame.system == system) & (frame.nccl_dtype == "half") & (frame.num_gpus > 1)]
    cost = build_cost_model(parse_cluster(f"1x8 {DEVICES[system]}"), load_stack("megatron-te"))
    events = [
        CommEvent(
            collective=NAMES.get(r.op_name, r.op_name),
            bytes=2.0 * r.message_size,
            dtype="fp16",
            ranks=tuple(range(r.num_gpus)),
        )
        for r in frame.itertuples()
    ]
    error, _ = errors(cost.price(events).value_s, frame.latency_ms.to_numpy() * 1e-3)
    assert np.median(error) < 0.06
    assert error.mean() < 0.12


def test_collectives_over_nodes(measurements: Path):
    frame = pd.read_csv(measurements / "network" / "collectives.csv.gz")
    clusters = {
        "InfiniBand NDR 8x400": ("2x8 h100-sxm, 8x400G ib", 2, 8),
        "HGX H100 cluster": ("10x8 h100-sxm, 8x400G ib", 10, 8),
        "EFAv2": ("2x8 h100-sxm, 32x100G efa", 2, 8),
        "Lambda": ("2x8 b200-sxm, 8x400G ib", 2, 8),
    }
    for words, (text, nodes, per_node) in clusters.items():
        rows = frame[
            frame.interconnect.str.contains(words, regex=False)
            & (frame.nodes == nodes)
            & (frame.collective != "sendrecv")
            & (frame.bytes >= 2**20)
            & (frame.time_us > 0)
        ]
        cost = build_cost_model(parse_cluster(text), load_stack("megatron-te"))
        events = [
            CommEvent(
                collective=NAMES.get(r.collective, r.collective),
                bytes=float(r.bytes),
                dtype="fp32",
                ranks=tuple(range(0, nodes * per_node, nodes * per_node // r.gpus)),
            )
            for r in rows.itertuples()
        ]
        assert events, words
        error, _ = errors(cost.price(events).value_s, rows.time_us.to_numpy() * 1e-6)
        assert np.median(error) < 0.10, words
