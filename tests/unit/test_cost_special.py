"""Convolutions, experts and embedding bags."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cost_machines import cluster, stack
from foretrain.cost.compute.convolution import images_of
from foretrain.cost.compute.convolution_kernels import without_units
from foretrain.cost.model import build_cost_model
from foretrain.program import ComputeEvent


def event(op, shape, *, dtype="bf16", direction="forward"):
    return ComputeEvent(
        op=op,
        direction=direction,
        dtype=dtype,
        shape=tuple((key, float(value)) for key, value in shape.items()),
        flops=1.0,
        bytes=1.0,
    )


def seconds(device, *events):
    return build_cost_model(cluster(device), stack("megatron")).price(events).value_s


def conv(c=256, k=256, kernel=3, stride=1, groups=1, n=64, size=28, **kw):
    shape = {"n": n, "c": c, "h": size, "w": size, "k": k, "r": kernel, "s": kernel,
             "stride": stride, "padding": kernel // 2, "groups": groups}  # fmt: skip
    return event("conv2d", shape, **kw)


def flops(c=256, k=256, kernel=3, n=64, size=28):
    return 2 * n * size * size * c * k * kernel * kernel


def test_winograd_beats_the_direct_peak_and_wide_kernels_do_not():
    fast, slow = seconds("v100-sxm-16gb", conv(dtype="fp32"), conv(kernel=5, dtype="fp32"))
    assert 1.5 < flops() / fast / 15.7e12 < 2.5  # DeepBench: 2.1 to 2.35 for such layers
    assert flops(kernel=5) / slow / 15.7e12 < 1.05


def test_convolution_on_tensor_cores_and_its_gradients():
    forward, data, weight, both = seconds(
        "v100-sxm-16gb",
        conv(dtype="fp16"),
        conv(dtype="fp16", direction="backward_input"),
        conv(dtype="fp16", direction="backward_weight"),
        conv(dtype="fp16", direction="backward"),
    )
    assert flops() / forward / 125e12 == pytest.approx(0.56, abs=0.06)  # DeepBench: 0.47 to 0.74
    assert both == pytest.approx(data + weight)
    assert 2.0 <= both / forward < 2.8


def test_depthwise_convolution_is_memory_bound():
    (depthwise,) = seconds("a100-sxm-80gb", conv(c=256, k=256, groups=256))
    bytes_moved = 2 * 2 * 64 * 256 * 28 * 28
    assert depthwise == pytest.approx(bytes_moved / (0.6 * 2039e9), rel=0.2)


def moe(tokens, experts=64, ep=8, **kw):
    shape = {"tokens": tokens, "hidden": 4096, "ffn": 1536, "experts": experts, "topk": 8,
             "ep": ep, "tp": 1, "gated": 1, **kw}  # fmt: skip
    return event("moe_gemm", shape)


def test_experts_read_their_weights_even_for_few_tokens():
    few, more, many = seconds("h100-sxm", moe(8), moe(64), moe(65536))
    weights = 8 * 3 * 4096 * 1536 * 2
    assert few > weights / 3350e9
    assert more < 1.5 * few
    assert 0.4 < 65536 * 2 * 3 * 4096 * 1536 / many / 989e12 < 0.8


def test_the_busiest_rank_sets_the_pace():
    balanced, skewed, stated = seconds(
        "h100-sxm", moe(65536, ep=32), moe(65536, ep=32, distribution=1), moe(65536, ep=32, load=2)
    )
    assert balanced < stated < skewed


def test_embedding_bags_move_their_rows():
    shape = {"batch": 4096, "tables": 8, "rows": 1e7, "dim": 128, "pooling": 32}
    forward, backward = seconds(
        "v100-sxm-16gb",
        event("embedding_bag", shape),
        event("embedding_bag", shape, direction="backward"),
    )
    gathered = 4096 * 8 * 32 * 512
    assert forward == pytest.approx(gathered / (0.9 * 900e9), rel=0.2)
    assert backward / forward == pytest.approx(2 / 0.55, rel=0.1)


def test_winograd_needs_whole_tiles_and_many_channels():
    wide, odd, strided = seconds(
        "v100-sxm-16gb",
        conv(dtype="fp32"),
        conv(dtype="fp32", size=7),
        conv(dtype="fp32", stride=2),
    )
    flop = 2.0 * 64 * 256 * 256 * 9
    peak = 15.7e12
    assert flop * 28 * 28 / wide > 1.2 * peak  # above the peak of the direct method
    assert flop * 7 * 7 / odd < flop * 28 * 28 / wide
    assert flop * 14 * 14 / strided < peak


def test_few_filters_run_as_the_transpose():
    few, many = seconds("v100-sxm-16gb", conv(k=16, kernel=5), conv(k=64, kernel=5))
    assert few < 0.6 * many


def test_tensor_cores_of_volta_take_channels_in_pieces():
    model = build_cost_model(cluster("v100-sxm-16gb"), stack("megatron"), warm=False)
    layers = [conv(c=c, k=64, kernel=5, size=224, dtype="fp16") for c in (3, 8, 32, 64)]
    three, eight, piece, two = model.price(layers).value_s  # no transposes around a kernel
    assert three <= eight  # filled up, or on vector units
    assert eight == pytest.approx(piece, rel=0.05)
    assert two > 1.7 * piece


def test_a_named_algorithm_has_no_way_out_onto_vector_units():
    usual = stack("megatron")
    first = conv(c=1, k=32, kernel=5, size=224, dtype="fp16")
    free, forced = (
        build_cost_model(cluster("v100-sxm-16gb"), replace(usual, gemm_kernel=name), warm=False)
        .price([first])
        .value_s
        for name in ("", "deepbench")
    )
    assert forced > 1.5 * free


def test_gradients_that_no_tensor_core_kernel_takes():
    constants = {"most_taps": 64.0}
    sizes = {name: np.array([8.0, 8.0, 8.0]) for name in ("n", "c", "k")}
    x = images_of(
        sizes
        | {"h": np.array([56.0, 56.0, 7.0]), "w": np.array([56.0, 56.0, 7.0])}
        | {"r": np.array([3.0, 9.0, 1.0]), "s": np.array([3.0, 9.0, 1.0])}
        | {"padding": np.array([1.0, 4.0, 3.0]), "stride": np.array([1.0, 1.0, 2.0])},
        (3,),
    )
    assert without_units(x, "backward_weight", constants).tolist() == [False, True, True]
    assert without_units(x, "backward_input", constants).tolist() == [False, False, True]
    assert not without_units(x, "forward", constants).any()
    assert not without_units(x, "backward_weight", {}).any()
