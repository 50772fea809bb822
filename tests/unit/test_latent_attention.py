"""Kernels of few measured numbers of heads: the latent's copy, and how far intervals reach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretrain.cost.calibration import load
from foretrain.cost.compute import attention, moe
from foretrain.cost.machine import Machine
from foretrain.cost.residual import nothing_beyond
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack


def machine(kernel: str, device: str = "a100-sxm-80gb") -> Machine:
    stack = replace(load_stack("pytorch-eager"), attention_kernel=kernel)
    return Machine(device=find_device(device), stack=stack, warm=False)


def shape(heads: float, head_dim: float = 192.0, **others: float) -> dict[str, np.ndarray]:
    given = {"batch": 8.0, "seq_q": 2048.0, "head_dim_v": 128.0, "causal": 1.0, **others}
    given |= {"heads": heads, "head_dim": head_dim}
    return {name: np.array([given.get(name, 0.0)]) for name in attention.SHAPE}


def part(heads: float, kernel: str = "torch_flow", head_dim: float = 192.0) -> attention.Part:
    return attention.column_times(shape(heads, head_dim), "bf16", "forward", machine(kernel))[0]


def test_the_copy_of_latents_takes_the_bandwidth_once_for_all_heads():
    constants = {"e": {"192": 0.6}, "e_b": 0.7, "t0_us": 10.0, "g": 0.2}

    def seconds(heads: float, **more: float) -> float:
        given = shape(heads) | {"seq_kv": np.array([2048.0]), "kv_heads": np.array([heads])}
        return float(
            attention.attention_seconds(
                given, peak=312e12, bandwidth=2e12, sms=108, constants=constants | more
            )[0]
        )

    # 8 x 2048 tokens of 576 numbers, read and written in 16 bits, at 1.5 TB/s: 25 us
    for heads in (1.0, 64.0):
        copied = seconds(heads, token_bytes=2304.0) - seconds(heads)
        assert copied == pytest.approx(16384 * 2304 / 1.5e12, rel=1e-6)


def test_only_kernels_of_engines_with_a_cache_copy_it():
    latent = part(16.0).kernel.constants
    assert latent["token_bytes"] == pytest.approx(2304.0, rel=0.01)
    for other in (part(16.0, "flash2"), part(16.0, "torch_flow", 128.0)):
        assert "token_bytes" not in other.kernel.constants


def test_fewer_heads_than_any_that_were_fitted_widen_the_interval_and_more_do_not():
    widths = {heads: float(np.log(part(heads).factor[0])) for heads in (1.0, 4.0, 16.0)}
    assert widths[1.0] > widths[4.0] > widths[16.0] > 0.0
    each = float(load("attention")["rules"]["width_per_halving"])
    # 16 is one halving of 32, 4 are three
    assert widths[4.0] / widths[16.0] == pytest.approx((1.0 + 3.0 * each) / (1.0 + each))
    inside = float(np.log(part(64.0).factor[0]))
    assert inside < widths[16.0]


def test_a_residual_answers_beyond_its_heads_as_at_the_edge_but_not_beyond_other_sizes():
    found = part(16.0)
    assert found.kernel.measured == "causal 192x128"
    assert found.beyond[0] != 1.0
    longer = shape(16.0, seq_q=2.0**22, seq_kv=2.0**22)
    far = attention.column_times(longer, "bf16", "forward", machine("torch_flow"))[0]
    assert far.beyond[0] == 1.0


def test_experts_have_an_interval_for_many_tokens_and_one_for_few():
    where = Machine(
        device=find_device("a100-sxm-80gb"), stack=load_stack("pytorch-eager"), warm=False
    )
    found = moe.constants_for(where, "bf16")
    many, few = found.values["band"]
    columns = {"tokens": np.array([4096.0, 16.0])}
    bands = moe.bands(found, columns, nothing_beyond(columns["tokens"]))
    assert bands.tolist() == [many, few]
