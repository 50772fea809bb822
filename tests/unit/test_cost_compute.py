"""Operators against the worked numbers of the handbook and against physics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_machines import cluster, stack
from foretrain.cost.calibration import load
from foretrain.cost.model import CostModel, build_cost_model
from foretrain.cost.straggler import straggler_factor
from foretrain.program import CommEvent, ComputeEvent, Event


def gemm(m, n, k, *, b=1, dtype="bf16", direction="forward", **extra) -> ComputeEvent:
    shape = {"b": b, "m": m, "n": n, "k": k, **extra}
    size = 2 * (m * n + n * k + m * k) * b
    return ComputeEvent(
        op="gemm",
        direction=direction,
        dtype=dtype,
        shape=tuple((key, float(value)) for key, value in shape.items()),
        flops=2.0 * b * m * n * k,
        bytes=float(size),
    )


def attention(s, *, heads=32, kv=8, d=128, direction="forward", causal=1, window=0, batch=1):
    shape = {
        "batch": batch, "seq_q": s, "seq_kv": s, "heads": heads, "kv_heads": kv,
        "head_dim": d, "head_dim_v": d, "causal": causal, "window": window,
    }  # fmt: skip
    return ComputeEvent(
        op="attention",
        direction=direction,
        dtype="bf16",
        shape=tuple((key, float(value)) for key, value in shape.items()),
        flops=4.0 * s * s * heads * d * batch,
        bytes=2.0 * s * d * 2 * (heads + kv) * batch,
    )


def memory(op, num_bytes, *, direction="forward") -> ComputeEvent:
    return ComputeEvent(
        op=op,
        direction=direction,
        dtype="bf16",
        shape=(("rows", num_bytes / 4096), ("cols", 1024.0)),
        flops=num_bytes,
        bytes=num_bytes,
    )


def optimizer(params, *, bytes_per=30.0, op="adamw") -> ComputeEvent:
    return ComputeEvent(
        op=op,
        direction="optimizer",
        dtype="fp32",
        shape=(("params", params),),
        flops=10 * params,
        bytes=bytes_per * params,
    )


def us(model: CostModel, *events: Event) -> np.ndarray:
    return model.price(events).value_s * 1e6


def test_gemm_is_never_faster_than_the_peak_and_backward_costs_twice_forward():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack())
    forward = us(model, gemm(8192, 6144, 6144))[0]
    dgrad = us(model, gemm(8192, 6144, 6144, direction="backward_input"))[0]
    wgrad = us(model, gemm(6144, 6144, 8192, direction="backward_weight"))[0]
    ideal = 2 * 8192 * 6144 * 6144 / 312e12 * 1e6
    assert forward > ideal
    assert 1.9 < (dgrad + wgrad) / forward < 2.2


def test_accumulation_in_fp32_moves_eight_bytes_per_output_element():
    cost = build_cost_model(cluster("a100-sxm-80gb"), stack(), warm=False)
    small = {"direction": "backward_weight"}
    plain = us(cost, gemm(16384, 16384, 64, **small))[0]
    fused = us(cost, gemm(16384, 16384, 64, accumulate=1, out_bytes=4, **small))[0]
    entries = load("gemm_fitted")["entry"]
    share = next(e["e_b"] for e in entries if "a100-sxm*" in e.get("devices", ()))
    moved = 8 * 16384**2 + 2 * 2 * 16384 * 64
    assert fused == pytest.approx(moved / (2039e9 * share) * 1e6, rel=0.15)
    assert fused > 1.5 * plain


def test_misaligned_rows_are_slower():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack())
    aligned, loose, odd = us(model, *(gemm(8192, n, 1600) for n in (50304, 50258, 50257)))
    assert aligned * 1.15 < loose < odd
    assert 1.5 < odd / aligned < 2.1


def test_batches_of_misaligned_products_may_leave_the_tensor_units():
    """pytorch issue 83272: A100, bf16, 12.2 TFLOP/s with CUDA 11.6 and 85.6 with 11.7."""
    odd, even = gemm(1024, 140, 1024, b=384), gemm(1024, 128, 1024, b=384)

    def tflops(event: ComputeEvent, *, old: bool) -> float:
        library = replace(stack(), vector_misaligned=old)
        model = build_cost_model(cluster("a100-sxm-80gb"), library, warm=False)
        return event.flops / us(model, event)[0] / 1e6

    assert tflops(odd, old=True) == pytest.approx(12.2, rel=0.05)
    assert tflops(odd, old=False) == pytest.approx(85.6, rel=0.25)
    assert tflops(even, old=True) == tflops(even, old=False) == pytest.approx(132.5, rel=0.15)
    single = gemm(8192, 140, 8192)
    assert tflops(single, old=True) == tflops(single, old=False)


def test_batched_gemm_fills_waves():
    model = build_cost_model(cluster("b200-sxm"), stack())
    one, four = us(model, gemm(256, 256, 1024), gemm(256, 256, 1024, b=4))
    assert four < 2.0 * one


def test_low_precision_gains_less_than_the_data_sheet():
    model = build_cost_model(cluster("b200-sxm"), stack(), warm=False)  # bursts, as in the tables
    bf16, fp8, fp4 = us(model, *(gemm(8192, 8192, 8192, dtype=d) for d in ("bf16", "fp8", "nvfp4")))
    assert 1.4 <= bf16 / fp8 <= 1.7
    assert 2.3 <= bf16 / fp4 <= 3.1


def test_fp32_is_not_tf32_and_v100_has_its_own_rates():
    a100 = build_cost_model(cluster("a100-sxm-80gb"), stack())
    fp32, tf32 = us(
        a100, gemm(4096, 4096, 4096, dtype="fp32"), gemm(4096, 4096, 4096, dtype="tf32")
    )
    assert 5 < fp32 / tf32 < 9
    v100 = build_cost_model(cluster("v100-sxm-16gb"), stack("megatron"))
    half, single = us(v100, *(gemm(8192, 8192, 8192, dtype=d) for d in ("fp16", "fp32")))
    assert 2 * 8192**3 / half * 1e-6 == pytest.approx(100.6, rel=0.1)
    assert 2 * 8192**3 / single * 1e-6 == pytest.approx(13.3, rel=0.1)


def test_attention_worked_numbers():
    model = build_cost_model(
        cluster("h100-sxm"), replace(stack(), attention_kernel="vllm_flash_attn_fa3"), warm=False
    )
    assert us(model, attention(4096), attention(8192)) == pytest.approx((275, 934), rel=0.03)


@pytest.mark.parametrize(
    ("kernel", "causal", "head_dim", "forward", "backward"),
    [
        ("cudnn", 0, 128, 609, 499),
        ("cudnn", 0, 64, 408, 417),
        ("flash2", 0, 128, 368, 310),
        ("flash3", 0, 128, 638, 542),
        ("flash3", 1, 128, 579, None),
    ],
)
def test_attention_on_hopper_as_its_authors_published_it(
    kernel, causal, head_dim, forward, backward
):
    """TFLOP/s of FlashAttention-3's figures 5 and 6 at 4,096 tokens, read here by hand."""
    model = build_cost_model(
        cluster("h100-sxm"), replace(stack(), attention_kernel=kernel), warm=False
    )
    heads = 2048 // head_dim
    shape = {"heads": heads, "kv": heads, "d": head_dim, "causal": causal, "batch": 4}
    flop = 4 * 4 * 4096**2 * 2048 / (2 if causal else 1)
    there = us(model, attention(4096, **shape))[0]
    assert flop / there * 1e-6 == pytest.approx(forward, rel=0.06)
    if backward is not None:
        back = us(model, attention(4096, direction="backward", **shape))[0]
        assert 2.5 * flop / back * 1e-6 == pytest.approx(backward, rel=0.06)


def test_attention_backward_is_about_three_times_forward():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack("fsdp"))
    forward, backward = us(model, attention(4096), attention(4096, direction="backward"))
    assert backward / forward == pytest.approx(2.5 / 0.86, rel=0.05)


def test_window_is_cheaper_than_causal_and_causal_than_full():
    model = build_cost_model(cluster("h100-sxm"), stack())
    full = us(model, attention(8192, causal=0))[0]
    causal, wide, narrow = us(
        model, attention(8192), attention(8192, window=8192), attention(8192, window=512)
    )
    assert narrow < causal < full
    assert wide == pytest.approx(causal, rel=1e-6)


@pytest.mark.parametrize("kernel", ["flash2", "flash3", "cudnn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_backward_of_a_window_is_that_of_a_causal_mask_that_sees_less(kernel, head_dim):
    model = build_cost_model(cluster("h100-sxm"), replace(stack(), attention_kernel=kernel))
    events = (
        attention(8192, window=window, d=head_dim, kv=32, direction="backward")
        for window in (512, 2048, 8191, 0)
    )
    times = us(model, *events)
    assert np.all(np.diff(times[:3]) > 0)
    assert times[2] <= 1.001 * times[3]
    assert times[2] == pytest.approx(times[3], rel=0.03)


def test_attention_without_its_kernel_falls_back_and_says_so():
    model = build_cost_model(cluster("a100-sxm-80gb"), replace(stack(), attention_kernel="flash3"))
    prices = model.price([attention(4096)])
    assert prices.provenance == ("guess",)
    assert "flash2" in prices.formula[0]


def test_memory_bound_reaches_the_measured_bandwidth():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack())
    big = us(model, memory("residual", 4e9))[0]  # 5 % below the stream benchmark within a step
    assert 4e9 / (big * 1e-6) == pytest.approx(0.87 * 2039e9 / 1.05, rel=0.02)
    cached = us(model, memory("residual", 8e6))[0]
    assert cached < 8e6 / (0.87 * 2039e9) * 1e6 + 2.6


def test_eager_kernels_move_more_bytes_in_more_launches():
    norm = memory("rmsnorm", 400e6)
    eager = build_cost_model(cluster("h100-sxm"), stack("pytorch-eager")).price([norm])
    fused = build_cost_model(cluster("h100-sxm"), stack("megatron-te")).price([norm])
    assert eager.kernels[0] == 7
    assert fused.kernels[0] == 1
    assert 5 < eager.value_s[0] / fused.value_s[0] < 10


def test_backward_of_a_norm_is_slower_than_its_bytes():
    model = build_cost_model(cluster("h100-sxm"), stack())
    forward, backward = us(
        model, memory("rmsnorm", 400e6), memory("rmsnorm", 600e6, direction="backward")
    )
    assert backward / forward == pytest.approx(1.8, rel=0.15)


def test_optimizers():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack("megatron"), warm=False)
    fused = us(model, optimizer(1e9))[0]
    assert fused == pytest.approx(30e9 / (0.8 * 2039e9) * 1e6, rel=0.02)
    foreach = build_cost_model(cluster("a100-sxm-80gb"), stack("fsdp"), warm=False)
    assert 2.3 < us(foreach, optimizer(1e9))[0] / fused < 3.0
    loop = build_cost_model(cluster("a100-sxm-80gb"), replace(stack(), optimizer="loop"))
    assert loop.price([optimizer(1e9)]).kernels[0] == pytest.approx(200 * 12)


def test_operators_within_a_step_are_slower_than_alone_beyond_their_floor():
    big = memory("residual", 4e9)
    alone = build_cost_model(cluster("h100-sxm"), stack(), warm=False).price([big])
    step = build_cost_model(cluster("h100-sxm"), stack()).price([big])
    assert step.latency_s[0] == alone.latency_s[0]
    slowest = straggler_factor(8)  # a step waits for the slowest of the eight devices
    assert step.value_s[0] / alone.value_s[0] == pytest.approx(1.05 * slowest, rel=1e-3)
    assert "in a step" in step.formula[0]


def test_an_unknown_operator_is_a_guess_and_never_free():
    model = build_cost_model(cluster("a100-sxm-80gb"), stack())
    events = [gemm(64, 64, 64), memory("wavelet", 1e9), memory("gelu", 1e6)]
    prices = model.price(events)
    assert model.unmodelled(events) == (1,)
    assert prices.provenance[1] == "guess"
    assert prices.value_s[1] > 1e9 / 2039e9
    assert prices.high_s[1] / prices.value_s[1] == pytest.approx(3.0)


def test_an_unknown_device_is_priced_from_its_data_sheet_with_a_wide_band():
    known, new = (
        build_cost_model(cluster(name), stack(), warm=False).price([gemm(8192, 8192, 8192)])
        for name in ("b200-sxm", "newcomer")
    )
    assert new.provenance == ("guess",)
    assert new.value_s[0] == pytest.approx(known.value_s[0] * 2250 / 4000, rel=0.25)
    assert new.high_s[0] / new.value_s[0] > known.high_s[0] / known.value_s[0]


def test_host_time_counts_launches_and_graphs_remove_it():
    te = replace(stack("megatron-te"), host_on={})
    event = gemm(64, 64, 64)
    plain = build_cost_model(cluster("h100-sxm"), te).price([event])
    graph = build_cost_model(cluster("h100-sxm"), replace(te, cuda_graphs=True)).price([event])
    assert plain.host_s[0] == pytest.approx((te.host_launch_us + te.host_op_us) * 1e-6)
    assert graph.host_s[0] < 0.1 * plain.host_s[0]


def test_backward_operators_take_their_share_of_the_host():
    eager = replace(stack("megatron-te"), host_backward=0.5)
    events = [gemm(64, 64, 64), gemm(64, 64, 64, direction="backward_input")]
    forward, backward = build_cost_model(cluster("h100-sxm"), eager).price(events).host_s
    assert backward == pytest.approx(0.5 * forward)


def test_a_collective_waits_for_the_last_rank_where_blocks_start_from_idle():
    skewed = replace(stack("megatron-te"), rank_skew_us=100.0)
    event = CommEvent(collective="all_reduce", bytes=2e6, dtype="bf16", ranks=(0, 1, 2, 3))
    usual = us(build_cost_model(cluster("h100-sxm"), skewed), event)
    idle = us(build_cost_model(cluster("h100-sxm"), replace(skewed, sync_blocks=True)), event)
    assert idle - usual == pytest.approx(100.0 * (1 / 2 + 1 / 3 + 1 / 4))


def test_prices_have_one_entry_per_event_and_repeat_themselves():
    model = build_cost_model(cluster("h100-sxm"), stack())
    events = [gemm(512, 512, 512), memory("gelu", 1e6), gemm(512, 512, 512)]
    prices = model.price(events)
    assert prices.value_s[0] == prices.value_s[2]
    assert np.all(prices.low_s < prices.value_s)
    assert np.all(prices.value_s < prices.high_s)
    assert np.all(prices.latency_s <= prices.value_s)
    assert [len(x) for x in (prices.link, prices.family, prices.formula)] == [3, 3, 3]
    alone = build_cost_model(cluster("h100-sxm"), stack()).price(events[1:2])
    assert alone.value_s[0] == prices.value_s[1]


def test_a_stack_may_speak_of_all_operators_and_of_sixteen_bits():
    plain = build_cost_model(cluster("v100-sxm-16gb"), stack(), warm=False)
    old = replace(stack(), eager_bytes={"*": 4.0, "gelu": 1.0}, half_share=0.5)
    model = build_cost_model(cluster("v100-sxm-16gb"), old, warm=False)
    for op, dtype, factor in (
        ("dropout", "fp32", 4.0), ("dropout", "fp16", 8.0), ("gelu", "fp16", 2.0),
    ):  # fmt: skip
        event = replace(memory(op, 400e6), dtype=dtype)
        assert us(model, event)[0] / us(plain, event)[0] == pytest.approx(factor, rel=0.05)


def test_autocast_speaks_of_sixteen_bits_only():
    plain = build_cost_model(cluster("v100-sxm-16gb"), stack(), warm=False)
    cast = replace(stack(), eager_bytes={"gelu_new": 9.0}, autocast_bytes={"gelu_new": 18.0})
    model = build_cost_model(cluster("v100-sxm-16gb"), cast, warm=False)
    for dtype, factor in (("fp32", 9.0), ("fp16", 18.0)):
        one = replace(memory("gelu", 400e6), dtype=dtype)  # a stack that says nothing of gelu_new
        many = replace(one, op="gelu_new")
        assert us(plain, many)[0] == us(plain, one)[0]
        assert us(model, many)[0] / us(plain, one)[0] == pytest.approx(factor, rel=0.05)


def test_a_long_row_of_softmax_is_read_again():
    model = build_cost_model(cluster("v100-sxm-16gb"), stack(), warm=False)
    short, long = (
        replace(memory("softmax", 400e6), shape=(("rows", 1e8 / cols), ("cols", float(cols))))
        for cols in (1024, 2048)
    )
    times = us(model, short, long)
    assert times[1] / times[0] == pytest.approx(0.77 / 0.63, rel=0.02)


def test_attention_takes_the_constants_of_its_case_and_kernel():
    model = build_cost_model(cluster("gb200"), stack("megatron-te"), warm=False)
    event = attention(8192, heads=64, kv=8, batch=2)
    causal, full = us(model, event, attention(8192, heads=64, kv=8, batch=2, causal=0))
    assert causal == pytest.approx(1397, rel=0.05)  # cuDNN 1.21, cudnn-frontend benchmark
    assert full == pytest.approx(2483, rel=0.05)
    named = replace(stack(), attention_kernel="trtllm_mha")  # what a table calls the kernel
    formula = build_cost_model(cluster("gb200"), named).price([event]).formula[0]
    assert formula.startswith("attention trtllm_mha")
