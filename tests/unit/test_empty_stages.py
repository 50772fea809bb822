"""Stages without layers, played rank by rank; live bytes that return to nothing after a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from foretrain import load_run, predict
from foretrain.predict import compile_run
from foretrain.run.spec import RunSpec

GPT = {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "ffn": 512, "vocab": 1024}


def run_of(model: Any = GPT, *, precision: str = "bf16", **plan: Any) -> RunSpec:
    tokens = {"sequence": 128} if isinstance(model, dict) else {}
    return load_run(
        {
            "model": model,
            "training": {"microbatch": 2, "global_batch": 32, "precision": precision, **tokens},
            "plan": {"preset": "megatron", **plan},
            "cluster": "1x8 h100-sxm",
        }
    )


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 4, "stages": [0, 0, 2, 2], "recompute": "full"},
        {"pp": 4, "stages": [0, 4, 0, 0], "schedule": "gpipe", "zero": 1},
        {"pp": 2, "interleave": 4, "stages": [1, 0, 0, 1, 0, 1, 0, 1], "zero": 2},
        {"pp": 2, "interleave": 4, "stages": [1, 0, 0, 1, 0, 1, 0, 1], "cp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("stack", ["megatron", "nanotron"])
def test_chunks_without_anything_to_run_are_played_flat(plan: dict[str, Any], stack: str) -> None:
    base = run_of(**plan)
    run = load_run({**base.source, "stack": stack})
    folded, flat = predict(run, plain=True), predict(run, plain=True, flat=True)
    assert flat.step_time_s.value == pytest.approx(folded.step_time_s.value, rel=1e-9)
    assert flat.memory.device_used_bytes == pytest.approx(folded.memory.device_used_bytes, abs=1)


def left_over(run: RunSpec) -> dict[str, float]:
    """What a step leaves alive, bytes by part."""
    program = compile_run(run).program
    total: Counter[str] = Counter()
    for rank_class in program.classes:
        for entry in rank_class.entries:
            for change in ("delta_start", "delta_end"):
                total.update(getattr(entry, change, None) or {})
            for segment in getattr(entry, "segments", ()):
                for item in program.segments[segment].items:
                    total.update(item.delta)
    return {part: size for part, size in total.items() if abs(size) > 0.5}


@pytest.mark.parametrize(
    "model", ["resnet-18", "resnet-50", "mobilenet-v2", "densenet-121", "vgg-16-bn"]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_of_a_convolutional_network_frees_what_it_allocates(
    model: str, recompute: str
) -> None:
    """A block's saved output, the next block's input, was once freed by both."""
    assert left_over(run_of(model, precision="fp16", preset="ddp", recompute=recompute)) == {}


@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"pp": 4, "stages": [0, 0, 4, 0]},
        {"pp": 2, "interleave": 2, "recompute": "selective"},
        {"preset": "fsdp", "cp": 2, "reshard": False},
        {"preset": "deepspeed", "zero": 3, "offload": "parameters"},
    ],
    ids=str,
)
def test_a_step_of_a_decoder_frees_what_it_allocates(plan: dict[str, Any]) -> None:
    assert left_over(run_of(**plan)) == {}
