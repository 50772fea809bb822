"""Laws that hold for every constant set (handbook, section 6.5)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cost_machines import cluster, stack
from foretrain.cost.model import build_cost_model
from foretrain.cost.network.curve import bus_factor
from foretrain.program import CommEvent, ComputeEvent

DEVICES = st.sampled_from(
    ["a100-sxm-80gb", "h100-sxm", "b200-sxm", "v100-sxm-16gb", "a40", "rtx-pro-6000", "newcomer"]
)
DTYPES = st.sampled_from(["fp32", "fp16", "bf16", "fp8", "nvfp4"])
SIZES = st.integers(1, 20000)
COLLECTIVES = st.sampled_from(
    ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
)


def gemm(m: int, n: int, k: int, dtype: str) -> ComputeEvent:
    shape = (("b", 1.0), ("m", float(m)), ("n", float(n)), ("k", float(k)))
    return ComputeEvent(
        op="gemm", direction="forward", dtype=dtype, shape=shape, flops=2.0 * m * n * k, bytes=1.0
    )


@given(device=DEVICES, dtype=DTYPES, m=SIZES, n=SIZES, k=SIZES)
def test_gemm_is_finite_and_not_faster_than_the_device(device, dtype, m, n, k):
    model = build_cost_model(cluster(device), stack())
    seconds = model.price([gemm(m, n, k, dtype)]).value_s[0]
    peaks = model.cluster.device.peak_flops
    assert np.isfinite(seconds)
    assert seconds >= 2.0 * m * n * k / max(peaks.values())
    if dtype in peaks:
        assert seconds >= 2.0 * m * n * k / peaks[dtype]


@given(device=DEVICES, m=st.integers(1, 9000), n=st.integers(1, 2000), k=st.integers(1, 2000))
def test_one_more_token_is_never_much_cheaper(device, m, n, k):
    model = build_cost_model(cluster(device), stack())
    less, more = model.price(
        [gemm(m, 8 * n, 8 * k, "fp16"), gemm(m + 1, 8 * n, 8 * k, "fp16")]
    ).value_s
    assert more >= 0.97 * less


@given(
    device=DEVICES,
    seq=st.integers(1, 16384),
    heads=st.integers(1, 64),
    dim=st.sampled_from([64, 72, 80, 96, 128, 192, 256]),
    window=st.integers(1, 16384),
)
def test_window_at_most_causal_at_most_full(device, seq, heads, dim, window):
    model = build_cost_model(cluster(device), stack())

    def event(causal: float, window: float) -> ComputeEvent:
        shape = {
            "batch": 1.0, "seq_q": float(seq), "seq_kv": float(seq), "heads": float(heads),
            "kv_heads": float(heads), "head_dim": float(dim), "head_dim_v": float(dim),
            "causal": causal, "window": window,
        }  # fmt: skip
        return ComputeEvent(
            op="attention", direction="forward", dtype="bf16", shape=tuple(shape.items()),
            flops=1.0, bytes=1.0,
        )  # fmt: skip

    narrow, causal, full = model.price([event(1, window), event(1, 0), event(0, 0)]).value_s
    assert 0 < narrow <= causal * (1 + 1e-12)
    assert causal <= full * (1 + 1e-12)


@given(
    device=DEVICES,
    nodes=st.integers(1, 64),
    collective=COLLECTIVES,
    size=st.floats(1, 2**34),
    growth=st.floats(1, 8),
    sharers=st.integers(1, 8),
)
def test_collectives_obey_bytes_sharers_and_wires(device, nodes, collective, size, growth, sharers):
    where = cluster(device, nodes)
    model = build_cost_model(where, stack())
    world = 8 * nodes
    ranks = (0, world - 1) if collective == "send_recv" else tuple(range(world))

    def event(num_bytes: float, sharers: int) -> CommEvent:
        return CommEvent(
            collective=collective, bytes=num_bytes, dtype="bf16", ranks=ranks, sharers=sharers
        )

    one, more, shared = model.price(
        [event(size, 1), event(size * growth, 1), event(size, sharers)]
    ).value_s
    assert np.isfinite(one)
    assert more >= one * (1 - 1e-12)
    assert shared >= one * (1 - 1e-12)
    if nodes > 2 and collective not in ("send_recv", "all_to_all"):
        assert size * bus_factor(collective, world) / one <= 1.02 * where.node_bandwidth


@given(
    device=DEVICES,
    nodes=st.integers(2, 256),
    per_node=st.sampled_from([1, 2, 4, 8]),
    collective=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    size=st.floats(1, 2**34),
)
def test_more_nodes_are_never_faster(device, nodes, per_node, collective, size):
    where = cluster(device, 2 * nodes)
    model = build_cost_model(where, stack())

    def event(num_nodes: int) -> CommEvent:
        ranks = tuple(8 * node + i for node in range(num_nodes) for i in range(per_node))
        return CommEvent(collective=collective, bytes=size, dtype="bf16", ranks=ranks)

    few, many = model.price([event(nodes), event(nodes + nodes // 2)]).value_s
    assert many >= few * (1 - 1e-12)


@given(device=DEVICES, size=st.floats(1, 1e10), growth=st.floats(1, 100))
def test_memory_bound_time_grows_with_bytes(device, size, growth):
    model = build_cost_model(cluster(device), stack())
    events = [
        ComputeEvent(
            op="gelu", direction="forward", dtype="bf16", shape=(("rows", n),), flops=1.0, bytes=n
        )
        for n in (size, size * growth)
    ]
    less, more = model.price(events).value_s
    assert 0 < less <= more
