"""Rows of BERT: model and stack by the words of their sources.

Sources of pretraining follow google-research/bert: 20 predictions for sequences of 128 tokens, 80
for 512. Their attention is three kernels and a matrix product on both sides: fused kernels for it
came later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row

#: Sources whose training script is known; the others of this class pack or shorten their samples.
FAMILIES = ("nvidia_deeplearningexamples", "oneflow_dlperf", "mli_3090ti", "flagperf")
#: Predictions per sample of pretraining, by sequence length.
PREDICTIONS: Mapping[int, int] = {128: 20, 512: 80}

#: Framework words -> what stands in for it, the first match decides.
_STACKS: tuple[tuple[str, str], ...] = (
    (r"megatron", "megatron"),
    (r"pytorch|hf transformers", "pytorch-eager"),
    (r"tensorflow|mxnet|mindspore|paddle|oneflow", "pytorch-eager"),
)


def is_bert(row: Row) -> bool:
    """Returns whether the row is a BERT of a source whose training script is known."""
    return row.model_class == "bert" and row.family in FAMILIES


def map_bert(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    """Returns the `model` section; Unsupported for relatives of BERT and missing shapes."""
    if not re.fullmatch(r"bert(?:[-_ ](?:base|large))?", row.model.strip(), re.IGNORECASE):
        raise Unsupported("only BERT itself is mapped, not its relatives")
    if not (row.n_layers and row.hidden and row.heads):
        raise Unsupported("the model's shape is not stated")
    if not row.seq_len:
        raise Unsupported("the sequence length is not stated")
    model: dict[str, Any] = {
        "family": "bert",
        "layers": row.n_layers,
        "hidden": row.hidden,
        "heads": row.heads,
        "ffn": row.ffn,
        "vocab": row.vocab,
    }
    if row.family == "mli_3090ti":
        if not has_word(row.framework, "megatron"):
            model |= {"head": "mlm", "pooler": False}
        assumed.add("words are predicted at every position (the scripts of the source)")
    elif row.seq_len in PREDICTIONS:
        model["masked"] = PREDICTIONS[row.seq_len]
        assumed.add(f"{model['masked']} predictions per sample (usual for {row.seq_len} tokens)")
    return {key: value for key, value in model.items() if value is not None}


def map_bert_stack(row: Row, assumed: Assumed) -> str:
    """Returns the stack; XLA is torch.compile here, for both fuse element-wise operators."""
    found = [s for pattern, s in _STACKS if re.search(pattern, row.framework, re.IGNORECASE)]
    if not found:
        raise Unsupported(f"no stack is near the framework {row.framework!r}")
    stack = found[0]
    tensorflow = has_word(row.framework, "tensorflow")
    scripts = row.family == "nvidia_deeplearningexamples"  # whose scripts switch XLA on
    if tensorflow and (scripts or re.search(r"\bwith xla", row.notes, re.IGNORECASE)):
        stack = "pytorch-compile"
    if not has_word(row.framework, "pytorch", "hf transformers", "megatron"):
        assumed.add(f"stack: {row.framework.partition('/')[0]} as {stack}")
    return stack


def map_bert_optimizer(row: Row) -> str:
    """Returns LAMB for NVIDIA's pretraining scripts (those of DLPerf replace it), else AdamW."""
    words = f"{row.optimizer} {row.notes}".lower()
    if "adam" in words:
        return "adamw"
    return "lamb" if row.family == "nvidia_deeplearningexamples" or "lamb" in words else "adamw"
