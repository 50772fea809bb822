"""Operators as columns: the same answers as one event at a time; routing of skewed experts."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.cost.compute.routing import busiest_ranks
from foretrain.cost.model import build_cost_model
from foretrain.cost.operators import Operators, time
from foretrain.errors import InputError
from foretrain.hardware.grammar import parse_cluster
from foretrain.hardware.names import find_device
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack

STACK = load_stack("megatron-te")
COLUMNS = {
    "gemm": {"m": [1, 300, 8192], "n": [4096, 50257, 8192], "k": [4096, 8192, 1024]},
    "moe_gemm": {
        "tokens": [64, 8192, 65536], "hidden": [4096, 2048, 7168], "ffn": [1024, 768, 2048],
        "experts": [64, 128, 256], "topk": [6, 8, 8], "ep": [1, 8, 64], "distribution": [0, 1.2, 0],
    },
    "rmsnorm": {"rows": [64, 8192, 8192], "cols": [4096, 4096, 4096]},
    "attention": {
        "batch": [1, 2, 1], "seq_q": [128, 4096, 8192], "seq_kv": [128, 4096, 8192],
        "heads": [32, 32, 64], "kv_heads": [8, 8, 8], "head_dim": [128, 128, 64],
        "head_dim_v": [128, 128, 64], "causal": [1, 1, 0], "window": [0, 0, 0],
    },
    "conv2d": {
        "n": [1, 64, 256], "c": [3, 64, 256], "h": [224, 56, 14], "w": [224, 56, 14],
        "k": [64, 64, 512], "r": [7, 3, 1], "s": [7, 3, 1], "stride": [2, 1, 2],
        "padding": [3, 1, 0],
    },
    "adamw": {"params": [1e5, 1e9, 3e9]},
    "weight_parts": {"copies": [1, 4, 16]},
}  # fmt: skip


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "b200-sxm", "v100-sxm-16gb"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", list(COLUMNS))
def test_columns_equal_events(op, backward, device):
    direction = ("backward_input" if op == "gemm" else "backward") if backward else "forward"
    columns = {name: np.array(values, float) for name, values in COLUMNS[op].items()}
    moved = np.array([1e6, 1e8, 1e8])
    shape = Operators(op=op, dtype="bf16", shape=columns, direction=direction, bytes=moved)
    times = time(shape, find_device(device), STACK)
    events = [
        ComputeEvent(
            op=op,
            direction=direction,
            dtype="bf16",
            shape=tuple((name, float(column[i])) for name, column in columns.items()),
            flops=1.0,
            bytes=float(moved[i]),
        )
        for i in range(3)
    ]
    prices = build_cost_model(parse_cluster(f"1x1 {device}"), STACK, warm=False).price(events)
    assert times.value_s == pytest.approx(prices.value_s, rel=1e-12)
    assert times.low_s == pytest.approx(prices.low_s, rel=1e-12)
    assert times.high_s == pytest.approx(prices.high_s, rel=1e-12)
    assert times.provenance in prices.provenance


def test_single_numbers_hold_for_all_rows():
    shape = {"m": np.array([64.0, 128.0]), "n": 4096, "k": 4096}
    short = time(Operators(op="gemm", dtype="bf16", shape=shape), find_device("h100"), STACK)
    full = {**shape, "n": np.full(2, 4096.0), "k": np.full(2, 4096.0)}
    long = time(Operators(op="gemm", dtype="bf16", shape=full), find_device("h100"), STACK)
    assert short.value_s == pytest.approx(long.value_s)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": "fp7"}, "unknown dtype"),
        ({"direction": "up"}, "unknown direction"),
        ({"shape": {"m": np.ones(2), "n": np.ones(3), "k": 1.0}}, "different lengths"),
        ({"shape": {"m": np.array([0.0]), "n": 1.0, "k": 1.0}}, "not positive"),
        ({"shape": {"m": np.array([np.nan]), "n": 1.0, "k": 1.0}}, "not positive"),
        ({"shape": {"m": 1.0, "n": 1.0}}, "missing"),
    ],
)
def test_bad_columns_are_refused(change, word):
    usual = {"op": "gemm", "dtype": "bf16", "shape": {"m": 1.0, "n": 1.0, "k": 1.0}}
    with pytest.raises(InputError, match=word):
        time(Operators(**{**usual, **change}), find_device("h100"), STACK)


def busiest_rank(*layer):
    """Rows and experts with work of one layer."""
    rows, active = busiest_ranks(*(np.array([float(x)]) for x in layer))
    return float(rows[0]), float(active[0])


def test_balanced_routing_shares_rows_equally():
    assert busiest_rank(64, 8, 4096, 6, 0.0) == (4096 * 6 / 8, 8)
    assert busiest_rank(64, 8, 4, 6, 0.0) == (3.0, 3.0)  # fewer rows than experts


def test_the_busiest_rank_gets_more_with_more_ranks_and_never_more_than_all():
    total = 4096 * 8
    loads = [busiest_rank(128, ep, 4096, 8, 1.2)[0] * ep / total for ep in (1, 4, 16, 128)]
    assert loads[0] == pytest.approx(1.0)
    assert loads == sorted(loads)
    assert loads[-1] <= 128
    assert loads[1] > 1.2
    rows, active = busiest_rank(128, 16, 4096, 8, 1.2)
    assert active <= 128 / 16
    assert (rows, active) == busiest_rank(128, 16, 4096, 8, 1.2)


def test_an_expert_gets_each_token_once_at_most():
    rows, active = busiest_rank(8, 8, 4096, 2, 1.2)
    assert (active, 4096 * 2 / 8 < rows <= 4096) == (1.0, True)
    assert busiest_rank(8, 1, 4096, 8, 1.2)[0] == pytest.approx(4096 * 8)


def test_layers_of_many_kinds_equal_one_by_one():
    layers = np.array(
        [(64, 8, 1000, 6, 1.2), (64, 8, 9000, 6, 1.2), (8, 2, 77, 2, 0.0), (16, 4, 5, 1, 1.01)]
    )
    rows, active = busiest_ranks(*layers.T)
    single = [busiest_rank(*layer) for layer in layers]
    assert rows == pytest.approx([layer_rows for layer_rows, _ in single])
    assert active == pytest.approx([working for _, working in single])
