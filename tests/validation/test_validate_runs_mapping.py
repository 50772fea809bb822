"""Twenty-two rows read by eye against their source columns: what each becomes, literally."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.rows import Row, read_rows

GPT_2048 = {"family": "gpt", "max_positions": 2048}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def gpt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden}
    return {**GPT_2048, **shape, **more}


def llama(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    return {"family": "llama", **shape, **more}


def mpt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    """llm-foundry's benchmark files: learned positions and biases, unlike the released models."""
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)
    return {**gpt(layers, hidden, heads, **more), "family": "mpt", "positions": "learned", **biases}


BLOOM = {"family": "bloom", "dropout": 0.1, "attention_dropout": 0.1}


def training(sequence: int, precision: Any, **batch: int | str) -> dict[str, Any]:
    return {"sequence": sequence, "precision": precision, "optimizer": "adamw", **batch}


def bf16_gradients(compute: str) -> dict[str, str]:
    return {"compute": compute, "grad_accumulate": "bf16", "grad_reduce": "bf16"}


#: modules/gpt_modules.py and pipeline_parallel of DS3Lab/Decentralized_FM_alpha, April 2022.
PROTOTYPE = {
    "activation": "relu", "causal": False, "head": "classification", "tied": False, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
HALF_WITH_MASTER = {
    "compute": "fp16", "weight": "fp16", "grad": "fp16", "grad_reduce": "fp16",
    "grad_accumulate": "fp16", "master": "fp32", "moments": "fp32",
}  # fmt: skip
LLAMA3_8B = llama(32, 4096, 32, 8, head_dim=128, ffn=14336, vocab=128256)
LLAMA3_405B = llama(126, 16384, 128, 8, head_dim=128, ffn=53248, vocab=128256)
ALL_OFF = {"grad": False, "param": False, "tp": False, "p2p": False}

#: id -> cluster, stack, attention, model, training, plan, assumptions that have to be listed.
EXPECTED: Mapping[str, tuple[str, str, str | None, Any, Any, Any, tuple[str, ...]]] = {
    "bigscience_bloom-0105": (
        "48x8 a100-sxm-80gb, 4x100G opa",
        "deepspeed",
        None,
        {
            k: v
            for k, v in gpt(72, 14336, 64, kv_heads=64, vocab=250880).items()
            if k != "max_positions"
        }
        | BLOOM,
        training(2048, "fp16", global_batch=2048, microbatch=4),
        {"preset": "deepspeed", "tp": 8, "pp": 6, "zero": 1, "recompute": "full"},
        ("sequence_parallel", "every launch blocks"),
    ),
    "decentralized_fm_v100-0146": (
        "64x1 v100-sxm-16gb, 1x10G ethernet",
        "megatron",
        None,
        gpt(32, 2048, 16, kv_heads=16),
        training(2048, "fp16", global_batch=1024, microbatch=1),
        {"preset": "megatron", "tp": 8, "pp": 1, "recompute": "full"},
        ("stack", "zero", "sequence_parallel", "vocab"),
    ),
    "decentralized_fm_v100-0056": (
        "8x1 v100-sxm-16gb, 1x10G ethernet [latency 0.1ms]",
        "pytorch-eager",
        "unfused",
        gpt(24, 2048, 16, kv_heads=16, vocab=28996) | PROTOTYPE,
        training(2048, HALF_WITH_MASTER, global_batch=64, microbatch=1, optimizer="sgd"),
        {
            "preset": "ddp",
            "tp": 1,
            "pp": 8,
            "schedule": "gpipe",
            "recompute": "full",
            "overlap": {"p2p": True, "grad": False},
        },
        ("stack", "zero", "recompute", "vocab"),
    ),
    "flagperf-0069": (
        "1x8 a100-sxm-40gb",
        "paddle",
        "fused",
        llama(32, 4096, 32, 32, head_dim=128, ffn=11008, vocab=32000),
        training(2048, "fp16", global_batch=2048, microbatch=2),
        {
            "preset": "megatron",
            "tp": 2,
            "pp": 4,
            "zero": 0,
            "recompute": "full",
            "overlap": {"grad": False, "param": False},
        },
        ("sequence_parallel",),
    ),
    "flagperf-0096": (
        "1x8 a800-sxm-80gb",
        "megatron-te",
        "fused",
        LLAMA3_8B,
        training(8192, "bf16", global_batch=512, microbatch=1),
        {
            "preset": "megatron",
            "tp": 4,
            "pp": 2,
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "selective",
            "overlap": {"grad": False, "param": False},
        },
        ("zero", "sequence_parallel"),
    ),
    "fms_fsdp-0002": (
        "12x8 h100-sxm, 8x100G ib",
        "torchtitan",
        "fused",
        llama(32, 4096, 32, 32, head_dim=128, ffn=11008, vocab=32000),
        training(4096, "bf16", global_batch=192, microbatch=2),
        {"preset": "fsdp", "tp": 1, "pp": 1, "zero": 3, "shard": 8, "recompute": "none"},
        ("800 Gb/s", "fabric", "stack", "shard"),
    ),
    "internevo-0014": (
        "32x8 a100-sxm-80gb, 4x100G roce",
        "internevo",
        None,
        llama(32, 4096, 32, 32, vocab=103168),
        training(2048, "bf16", global_batch=2048, microbatch=2),
        {"preset": "deepspeed", "tp": 1, "pp": 1, "zero": 1, "shard": 8, "recompute": "none"},
        ("ffn",),
    ),
    "jax_toolbox-0008": (
        "32x8 h100-sxm",
        "jax-xla",
        None,
        gpt(96, 12288, 96, kv_heads=96, head_dim=128, vocab=51200, **NO_DROPOUT),
        training(2048, "bf16", global_batch=1536, microbatch=6),
        {"preset": "fsdp", "tp": 1, "pp": 1, "zero": 3, "shard": 256, "recompute": "full"},
        ("network", "recompute"),
    ),
    "llm_foundry_mpt-0123": (
        "1x8 a100-sxm-80gb",
        "llm-foundry",
        "fused",
        mpt(24, 1024, 16, kv_heads=16, head_dim=64, vocab=50368) | {"max_positions": 32768},
        training(32768, {"compute": "bf16", "grad_reduce": "fp32"}, global_batch=32, microbatch=2),
        {"preset": "fsdp", "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
        (),
    ),
    "llm_foundry_mpt-0168": (
        "4x8 a100-sxm-40gb, 8x200G roce",
        "llm-foundry",
        "fused",
        mpt(32, 2560, 20, kv_heads=20, head_dim=128, vocab=50368),
        training(2048, "bf16", global_batch=192, microbatch=6),
        {"preset": "fsdp", "tp": 1, "pp": 1, "zero": 3, "recompute": "none"},
        ("1600 Gb/s",),
    ),
    "megatron_ci_golden-0396": (
        "1x8 a100-sxm-80gb",
        "megatron-te",
        None,
        {k: v for k, v in gpt(12, 512, 8, kv_heads=8).items() if k != "ffn"}
        | {"max_positions": 1024},
        training(1024, "bf16", global_batch=32, microbatch=4),
        {
            "preset": "megatron",
            "tp": 2,
            "pp": 2,
            "zero": 0,
            "recompute": "none",
            "overlap": {"grad": False, "param": False},
        },
        ("device", "ffn", "vocab"),
    ),
    "megatron_papers-0047": (
        "8x8 a100-sxm-80gb, 8x200G ib",
        "megatron",
        "unfused",
        gpt(96, 12288, 96, kv_heads=96, vocab=51200),
        training(2048, "fp16", global_batch=64, microbatch=1),
        {
            "preset": "megatron",
            "tp": 8,
            "pp": 8,
            "interleave": 3,
            "zero": 0,
            "sequence_parallel": True,
            "recompute": "selective",
        },
        (),
    ),
    "mli_3090ti-0016": (
        "1x2 rtx-3090-ti [nvlink pairs]",
        "hf-deepspeed",
        "unfused",
        gpt(
            24,
            2048,
            16,
            kv_heads=16,
            head_dim=128,
            vocab=50257,
            activation="gelu_new",
            dropout=0.0,
            attention_dropout=0.0,
        ),
        training(2048, "bf16", global_batch=32, microbatch=1),
        {
            "preset": "deepspeed",
            "tp": 1,
            "pp": 1,
            "zero": 2,
            "recompute": "none",
            "offload": "optimizer",
        },
        ("offload = optimizer",),
    ),
    "nemo_megatron_bridge-0036": (
        "64x4 gb200",
        "nemo",
        None,
        LLAMA3_405B,
        training(8192, bf16_gradients("fp8"), global_batch=1536, microbatch=1),
        {
            "preset": "megatron",
            "tp": 4,
            "pp": 16,
            "interleave": 4,
            "stages": [1, *[2] * 62, 1],
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "none",
            "overlap": {"grad": True, "param": True},
            "expandable_segments": True,
        },
        (
            "4 GPUs",
            "network",
            "embedding",
            "zero",
            "sequence_parallel",
            "recompute",
            "gradients",
            "expandable",
        ),
    ),
    "neusight_labels-0012": (
        "1x1 mi250x",
        "pytorch-eager",
        "unfused",
        gpt(36, 1280, 20, kv_heads=20, vocab=50257, activation="gelu_new")
        | {"max_positions": 1024},
        training(1024, "fp32", global_batch=1, microbatch=1) | {"optimizer": "none"},
        {"preset": "plain", "tp": 1, "pp": 1, "recompute": "none"},
        ("MI250",),
    ),
    "nvidia_dgxc-0109": (
        "16x8 h100-sxm",
        "jax-xla",
        None,
        gpt(24, 4096, 32, kv_heads=32, head_dim=128, vocab=51200, **NO_DROPOUT),
        training(2048, "fp8", global_batch=512, microbatch=4),
        {"preset": "fsdp", "tp": 1, "pp": 1, "zero": 3, "shard": 8, "recompute": "full"},
        ("network", "tp = 1", "shard", "recompute"),
    ),
    "nvidia_dgxc-0066": (
        "32x8 h100-sxm",
        "nemo",
        None,
        gpt(96, 12288, 96, kv_heads=96, head_dim=128, vocab=51200),
        training(2048, bf16_gradients("bf16"), global_batch=512, microbatch=1),
        {
            "preset": "megatron",
            "tp": 4,
            "pp": 8,
            "interleave": 12,
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "none",
            "overlap": {"grad": True, "param": True},
        },
        ("network", "zero", "sequence_parallel", "recompute", "gradients"),
    ),
    "oneflow_dlperf-0011": (
        "1x8 v100-sxm-16gb",
        "megatron",
        None,
        gpt(16, 1536, 16, vocab=50257),
        training(2048, "fp16", global_batch=16, microbatch=16),
        {"preset": "megatron", "tp": 8, "pp": 1, "recompute": "full"},
        ("stack", "zero", "sequence_parallel"),
    ),
    "simumax_b200-0018": (
        "1x8 b200-sxm",
        "megatron-te",
        "fused",
        llama(12, 8192, 64, 8, head_dim=128, ffn=28672, vocab=128256),
        training(4096, "bf16", global_batch=128, microbatch=1),
        {
            "preset": "megatron",
            "tp": 2,
            "pp": 1,
            "zero": 1,
            "sequence_parallel": True,
            "recompute": "none",
            "overlap": ALL_OFF,
        },
        (),
    ),
    "torchtitan-0014": (
        "64x8 h100-sxm-96gb-500w, 8x400G roce",
        "torchtitan",
        None,
        LLAMA3_405B,
        training(8192, "fp8", global_batch=256),
        {
            "preset": "fsdp",
            "tp": 8,
            "pp": 8,
            "stages": [15, *[16] * 6, 15],
            "zero": 3,
            "sequence_parallel": True,
            "recompute": "full",
            "overlap": {"tp": True},
        },
        ("embedding", "microbatch"),
    ),
    "ultrascale_playbook-1013": (
        "4x8 h100-sxm, 32x100G efa",
        "nanotron",
        None,
        llama(28, 3072, 32, 32, head_dim=96, ffn=8192, vocab=131072, tied=True),
        training(4096, "bf16", global_batch=256, microbatch=1),
        {
            "preset": "megatron",
            "tp": 1,
            "pp": 16,
            "zero": 1,
            "recompute": "none",
            "overlap": {"tp": True},
        },
        ("layers", "collectives checked"),
    ),
    "vtrain_groundtruth-1127": (
        "1x8 a100-sxm-80gb",
        "deepspeed",
        None,
        gpt(24, 1024, 16, kv_heads=16, vocab=50257) | {"max_positions": 1024},
        training(1024, "fp16", global_batch=128, microbatch=8),
        {
            "preset": "deepspeed",
            "tp": 1,
            "pp": 1,
            "recompute": "none",
            "overlap": {"grad": False},
        },
        ("device", "zero", "precision", "recompute", "sum of blocks"),
    ),
}

REFUSED = {
    "finetune_smallnode-0110": "the technique 'QLoRA' is not modelled",
    "oneflow_libai-0071": "the GPU is not stated",
    "paper_facts-0005": "the model's shape is not stated (n_layers, hidden, heads)",
    "nemo_launcher_a100-0001": "tensor and pipeline degrees are not stated",
    "nemo_automodel-0014": "LoRA comes with a later version",
    "decentralized_fm_v100-0026": "a central parameter server is not modelled",
    "maxtext_tpu_gpu-0074": "the number of GPUs is not stated",
    "timm_rtx3090-0346": "this image model is not in the catalog",
}


@cache
def rows_of(path: Path) -> dict[str, Row]:
    return {run.row.id: run.row for run in read_rows(path)}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_becomes_the_run_that_its_source_describes(name: str, measurements: Path) -> None:
    mapped = map_row(rows_of(measurements / "runs/measured_runs.csv.gz")[name])
    cluster, stack, attention, model, words, plan, assumed = EXPECTED[name]
    assert mapped.run["cluster"] == cluster
    assert mapped.run["stack"] == stack
    assert mapped.stack.get("attention") == attention
    assert mapped.run["model"] == model
    assert mapped.run["training"] == words
    assert mapped.run["plan"] == {"sequence_parallel": False, **plan}
    assert len(mapped.assumed) == len(assumed)
    for line, start in zip(sorted(mapped.assumed), sorted(assumed), strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_not_modelled_says_why(name: str, measurements: Path) -> None:
    row = rows_of(measurements / "runs/measured_runs.csv.gz")[name]
    with pytest.raises(Unsupported) as caught:
        map_row(row)
    assert caught.value.reason == REFUSED[name]
