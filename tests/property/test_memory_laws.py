"""Laws of memory that hold for every run: monotone in size, never raised by sharding or recompute.

All three figures (allocated, reserved, used) are held to them where the law speaks of what a
device has in use.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.predict import predict
from foretrain.run.load import load_run
from foretrain.simulator.result import MemoryResult
from foretrain.units import GIB

PRESETS = ("megatron", "fsdp", "deepspeed", "ddp")
SMALL = {"family": "llama", "hidden": 256, "heads": 8, "ffn": 512, "vocab": 1024}


def memory(
    *,
    layers: int = 4,
    sequence: int = 256,
    microbatch: int = 1,
    accumulation: int = 4,
    cluster: str = "1x8 h100-sxm",
    stack: str | None = None,
    **plan: object,
) -> MemoryResult:
    degrees = int(str(plan.get("tp", 1))) * int(str(plan.get("pp", 1)))
    dp = int(cluster.split("x")[1].split()[0]) // degrees
    run: dict[str, object] = {
        "model": {**SMALL, "layers": layers},
        "training": {
            "sequence": sequence,
            "microbatch": microbatch,
            "global_batch": microbatch * accumulation * dp,
        },
        "plan": plan,
        "cluster": cluster,
    }
    if stack is not None:
        run["stack"] = stack
    return predict(load_run(run)).memory


plans = st.fixed_dictionaries(
    {
        "preset": st.sampled_from(PRESETS),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    }
)
more = settings(max_examples=12, deadline=None)


@more
@given(plans, st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_memory_grows_with_batch_sequence_and_layers(
    plan: dict[str, object], microbatch: int, sequence: int, layers: int
) -> None:
    base = {"microbatch": microbatch, "sequence": 128 * sequence, "layers": layers}
    least = memory(**base, **plan).device_used_bytes  # type: ignore[arg-type]
    for key, step in (("microbatch", 1), ("sequence", 128), ("layers", 1)):
        larger = {**base, key: base[key] + step}
        assert memory(**larger, **plan).device_used_bytes >= least  # type: ignore[arg-type]


@more
@given(
    st.sampled_from(["megatron", "megatron-te", "nanotron", "deepspeed"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
)
def test_memory_grows_in_pipelines_too(stack: str, tp: int, pp: int, microbatch: int) -> None:
    plan = {"preset": "deepspeed" if stack == "deepspeed" else "megatron", "tp": tp, "pp": pp}
    small = memory(microbatch=microbatch, stack=stack, **plan)  # type: ignore[arg-type]
    large = memory(microbatch=microbatch + 1, stack=stack, **plan)  # type: ignore[arg-type]
    assert large.peak_allocated_bytes >= small.peak_allocated_bytes
    assert large.device_used_bytes >= small.device_used_bytes


@more
@given(st.sampled_from(["fsdp", "deepspeed", "megatron"]), st.integers(1, 3), st.integers(2, 6))
def test_recompute_never_raises_memory(preset: str, microbatch: int, layers: int) -> None:
    used = [
        memory(preset=preset, recompute=mode, microbatch=microbatch, layers=layers)
        for mode in ("none", "selective", "full")
    ]
    full = used[2].peak_allocated_bytes
    assert full <= used[1].peak_allocated_bytes + 1
    assert used[1].peak_allocated_bytes <= used[0].peak_allocated_bytes + 1


@pytest.mark.parametrize(("preset", "stages"), [("deepspeed", (0, 1, 2, 3)), ("megatron", (0, 1))])
def test_sharding_over_more_ranks_never_raises_memory_beyond_its_buffers(
    preset: str, stages: tuple[int, ...]
) -> None:
    """Buffers: gathered weights, gradients before their reduction, buckets, communicators."""

    def states(zero: int, devices: int) -> float:
        parts = memory(preset=preset, zero=zero, cluster=f"1x{devices} h100-sxm").parts_bytes
        return sum(parts.get(p, 0.0) for p in ("weights", "gradients", "optimizer"))

    for zero in stages:
        found = [states(zero, devices) for devices in (2, 4, 8)]
        buffers = 0.05 * found[0]  # whole gradients of a unit that waits for its reduction
        assert found[2] <= found[1] + buffers <= found[0] + 2 * buffers
    by_stage = [states(zero, 8) for zero in stages]
    assert all(b <= a * 1.3 for a, b in itertools.pairwise(by_stage))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stack", [None, "nanotron"])
def test_parts_add_up_to_the_byte(preset: str, stack: str | None) -> None:
    plan = {"tp": 2, "pp": 2} if preset == "megatron" else {}
    found = memory(preset=preset, stack=stack if preset == "megatron" else None, **plan)  # type: ignore[arg-type]
    assert sum(found.parts_bytes.values()) == pytest.approx(found.device_used_bytes, abs=1.0)
    outside = found.parts_bytes["context"] + found.parts_bytes.get("communicators", 0.0)
    assert found.device_used_bytes - found.peak_reserved_bytes == pytest.approx(outside, abs=1.0)
    slack = sum(found.parts_bytes.get(p, 0.0) for p in ("fragmentation", "flat step buffers"))
    gap = found.peak_reserved_bytes - found.peak_allocated_bytes
    assert gap == pytest.approx(slack, abs=1.0)


@pytest.mark.parametrize("mode", ["optimizer", "parameters"])
def test_what_is_offloaded_leaves_the_device(mode: str) -> None:
    here = memory(preset="deepspeed", zero=3)
    there = memory(preset="deepspeed", zero=3, offload=mode)
    assert there.parts_bytes.get("optimizer", 0.0) == 0.0
    assert there.host_used_bytes >= 8 * here.parts_bytes["optimizer"]
    assert there.device_used_bytes < here.device_used_bytes


def test_a_host_that_is_too_small_is_refused() -> None:
    found = memory(preset="deepspeed", zero=3, offload="optimizer", cluster="1x8 h100-sxm")
    assert found.fits
    run = load_run(
        {
            "model": {**SMALL, "layers": 4},
            "training": {"sequence": 256, "microbatch": 1},
            "plan": {"preset": "deepspeed", "zero": 3, "offload": "optimizer"},
            "cluster": "1x8 h100-sxm [host 1 GiB]",
        }
    )
    small = replace(run.cluster, host_memory_bytes=0.5 * found.host_used_bytes)
    result = predict(replace(run, cluster=small))
    assert not result.fits
    assert result.memory.device_used_bytes < GIB * 79
