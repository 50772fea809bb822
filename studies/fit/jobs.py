"""The jobs of the study: models, clusters with fast and with slow networks, presets.

Written down before any result was seen. `DEVELOPMENT` jobs served to choose the settings of `fit`
(prior, threshold); `HELD_OUT` jobs were looked at once, at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec


class Job(NamedTuple):
    """One model on one cluster with one batch; plans vary, nothing else does."""

    name: str
    model: str | dict[str, Any]
    cluster: str
    preset: str
    sequence: int
    global_batch: int
    precision: str = "bf16"

    def run(self) -> RunSpec:
        """Returns the job with the plainest plan of its preset."""
        return load_run(
            {
                "model": self.model,
                "training": {
                    "sequence": self.sequence,
                    "global_batch": self.global_batch,
                    "microbatch": 1,
                    "precision": self.precision,
                    "optimizer": "adamw",
                },
                "plan": {"preset": self.preset, "zero": ZERO[self.preset]},
                "cluster": self.cluster,
            }
        )


ZERO = {"megatron": 1, "fsdp": 3, "deepspeed": 1, "ddp": 0}


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab": 51200}


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "family": "llama",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": min(heads, 8),
        "ffn": ffn,
        "vocab": 32000,
    }


GPT_1B, GPT_355M = _gpt(24, 2048, 16), _gpt(24, 1024, 16)
LLAMA_1B, LLAMA_3B = _llama(16, 2048, 32, 8192), _llama(26, 3200, 32, 8640)
V100S = "8x1 v100-sxm-16gb, 1x10G ethernet"

DEVELOPMENT = (
    Job("llama-1b-h100", LLAMA_1B, "2x8 h100-sxm, 2x100G ib", "megatron", 2048, 64),
    Job("gpt-1.3b-a100", GPT_1B, "2x8 a100-sxm-80gb, 1x100G ib", "megatron", 2048, 64),
    Job("llama-7b-a100", "llama-2-7b", "2x8 a100-sxm-80gb, 4x200G ib", "megatron", 4096, 64),
    Job("llama-13b-h100", "llama-2-13b", "4x8 h100-sxm, 8x400G ib", "megatron", 4096, 64),
    Job("llama-8b-fsdp", "llama-3-8b", "2x8 h100-sxm, 8x400G ib", "fsdp", 4096, 32),
    Job("llama-1b-roce", LLAMA_1B, "2x8 a100-sxm-80gb, 1x100G roce", "fsdp", 2048, 32),
    Job("gpt2-1.5b-ds", "gpt2-1.5b", "4x4 v100-sxm-32gb, 1x100G ib", "deepspeed", 1024, 64, "fp16"),
    Job("bert-large", "bert-large", "2x8 a100-sxm-40gb, 1x100G ethernet", "megatron", 512, 256),
    Job("gpt-1.3b-node", GPT_1B, "1x8 a100-sxm-80gb", "megatron", 1024, 32),
    Job("gpt-760m-pcie", _gpt(24, 1536, 16), "2x4 a10g, 1x50G efa", "megatron", 1024, 32),
)

HELD_OUT = (
    Job("gpt-3.6b-h200", _gpt(30, 3072, 24), "4x8 h200-sxm, 2x200G ib", "megatron", 2048, 128),
    Job("llama-3b-mi300x", LLAMA_3B, "2x8 mi300x, 8x400G roce", "megatron", 2048, 64),
    Job("gpt-355m-fsdp", GPT_355M, "4x8 a100-sxm-40gb, 4x100G efa", "fsdp", 1024, 64),
    Job("gpt2-355m-10g", GPT_355M, V100S, "deepspeed", 1024, 64, "fp16"),
    Job("llama-7b-b200", "llama-2-7b", "2x8 b200-sxm, 8x400G ib", "megatron", 2048, 64),
    Job("gpt-6.7b-a800", _gpt(32, 4096, 32), "4x8 a800-sxm-80gb, 1x200G ib", "megatron", 2048, 64),
    Job("gpt-355m-l40s", GPT_355M, "1x8 l40s", "megatron", 1024, 32),
    Job("llama-1b-ds", LLAMA_1B, "2x8 h100-sxm, 4x400G ib", "deepspeed", 1024, 64),
)
