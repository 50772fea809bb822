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

#: Family (or ""), framework words, words of the section (or "") -> stack; the first match decides.
#: DLPerf ran the releases of 2020; NVIDIA's tables are of 2021 to 2023, with XLA switched on.
_STACKS: tuple[tuple[str, str, str, str], ...] = (
    ("", r"megatron", "", "megatron"),
    ("", r"tensorflow", r"\bwith xla", "tensorflow-xla"),
    ("nvidia_deeplearningexamples", r"tensorflow", "", "tensorflow-xla"),
    ("", r"tensorflow", "", "tensorflow"),
    ("", r"mxnet", "", "mxnet"),
    ("", r"mindspore", r"\bwith graph kernel", "mindspore-fused"),
    ("", r"mindspore", "", "mindspore"),
    ("oneflow_dlperf", r"paddle", "", "paddle-2020"),
    ("", r"oneflow", "", "oneflow"),
    ("oneflow_dlperf", r"pytorch", "", "pytorch-apex"),
    ("", r"pytorch|hf transformers|paddle", "", "pytorch-eager"),
)
#: NVIDIA's scripts of PyTorch and PaddlePaddle group samples of phase 2 in bins of 64 tokens and
#: pad to the longest (LDDL). Half of 512 tokens are padding in Wikipedia (Krell et al. 2021, arXiv
#: 2107.02027): 256 tokens and half a bin; 15 % of them are predicted.
BINNED = 288
BINNED_PREDICTIONS = 43
#: The vocabulary of those scripts: padded to a multiple of 8.
PADDED_VOCAB = 30_528


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
    early = row.family == "oneflow_dlperf" and has_word(row.framework, "pytorch")
    if early:
        model["vocab"] = PADDED_VOCAB
        assumed.add("words are predicted at every position (NVIDIA's PyTorch scripts of 2020)")
    elif is_binned(row):
        model["masked"] = BINNED_PREDICTIONS
        assumed.add(f"samples of {BINNED} tokens on average: bins of 64, Wikipedia (not stated)")
    elif row.family == "mli_3090ti":
        if not has_word(row.framework, "megatron"):
            model |= {"head": "mlm", "pooler": False}
        assumed.add("words are predicted at every position (the scripts of the source)")
    elif row.seq_len in PREDICTIONS:
        model["masked"] = PREDICTIONS[row.seq_len]
        assumed.add(f"{model['masked']} predictions per sample (usual for {row.seq_len} tokens)")
    return {key: value for key, value in model.items() if value is not None}


def is_binned(row: Row) -> bool:
    """Returns whether the script of a row bins its samples by length."""
    nvidia = row.family == "nvidia_deeplearningexamples"
    return nvidia and row.seq_len == 512 and has_word(row.framework, "pytorch", "paddle")


def map_bert_stack(row: Row, assumed: Assumed) -> str:
    """Returns the stack of a row's framework and time."""
    for family, framework, section, stack in _STACKS:
        if family in ("", row.family) and re.search(framework, row.framework, re.IGNORECASE):
            if section and not re.search(section, row.notes, re.IGNORECASE):
                continue
            if stack == "pytorch-eager" and has_word(row.framework, "paddle"):
                assumed.add("stack: PaddlePaddle of 2022 as pytorch-eager")
            return stack
    raise Unsupported(f"no stack is near the framework {row.framework!r}")


def map_bert_optimizer(row: Row) -> str:
    """Returns LAMB for NVIDIA's pretraining scripts (those of DLPerf replace it), else AdamW."""
    words = f"{row.optimizer} {row.notes}".lower()
    if "adam" in words:
        return "adamw"
    return "lamb" if row.family == "nvidia_deeplearningexamples" or "lamb" in words else "adamw"
