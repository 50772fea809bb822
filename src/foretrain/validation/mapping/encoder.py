"""Rows of BERT: model and stack by the words of their sources.

Sources of pretraining follow google-research/bert: 20 predictions for sequences of 128 tokens, 80
for 512. Those of fine-tuning on SQuAD follow it too: 384 tokens, a start and an end for each of
them. Attention is three kernels and a matrix product on both sides where nothing else is said:
fused kernels for it came later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row

#: Predictions per sample of pretraining, by sequence length.
PREDICTIONS: Mapping[int, int] = {128: 20, 512: 80}
#: Tokens of a sample of SQuAD (`max_seq_length` of run_squad.py).
SQUAD_TOKENS = 384
#: Shapes of the released models (Devlin et al. 2019, arXiv 1810.04805).
RELEASED: Mapping[str, Mapping[str, int]] = {
    "base": {"layers": 12, "hidden": 768, "heads": 12},
    "large": {"layers": 24, "hidden": 1024, "heads": 16},
}
#: Names of BERT itself: nothing but its size, a path before it or a task behind it.
_NAME = r"(?:.*/)?bert(?:$|[-_ ]*(?:base|large|mcore|release|squad|nl\d|\d).*)"
#: Names of its relatives, which differ in shape or objective.
_RELATIVES = ("bio", "elect", "albert", "distil", "roberta", "deberta", "former", "mobile", "tiny")

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
    ("oneflow_dlperf", r"pytorch", "", "pytorch-apex-2020"),
    ("", r"pytorch deeplearningexamples", "", "pytorch-apex"),
    ("", r"nemo", "", "nemo"),
    ("", r"jax", "", "jax-xla"),
    ("", r"hf transformers trainer", "", "hf-trainer"),
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
    """Returns whether the row is a BERT."""
    return row.model_class == "bert"


def is_squad(row: Row) -> bool:
    """Returns whether a row fine-tunes on questions instead of pretraining."""
    return has_word(f"{row.model} {row.task} {row.notes}", "squad")


def map_bert(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    """Returns the `model` section; Unsupported for relatives of BERT and missing shapes."""
    name = row.model.strip()
    if has_word(name, *_RELATIVES) or not re.fullmatch(_NAME, name, re.IGNORECASE):
        raise Unsupported("only BERT itself is mapped, not its relatives")
    if has_word(f"{row.family} {row.task} {row.notes}", "mlperf"):
        raise Unsupported("BERT of MLPerf packs samples of lengths that are not stated")
    shape = _shape(row, assumed)
    if not row.seq_len and not is_squad(row):
        raise Unsupported("the sequence length is not stated")
    model: dict[str, Any] = {
        "family": "bert",
        **shape,
        "ffn": row.ffn,
        "vocab": row.vocab,
    }
    early = row.family == "oneflow_dlperf" and has_word(row.framework, "pytorch")
    if is_squad(row):
        model |= {"head": "none", "pooler": False}
        assumed.add("the classes of start and end are left out (two columns)")
    elif early:
        model["vocab"] = PADDED_VOCAB
        assumed.add("words are predicted at every position (NVIDIA's PyTorch scripts of 2020)")
    elif is_binned(row):
        model["masked"] = BINNED_PREDICTIONS
        assumed.add(f"samples of {BINNED} tokens on average: bins of 64, Wikipedia (not stated)")
    elif row.family == "mli_3090ti":
        if not has_word(row.framework, "megatron"):
            model |= {"head": "mlm", "pooler": False}
        assumed.add("words are predicted at every position (the scripts of the source)")
    elif (row.seq_len or 0) in PREDICTIONS and not has_word(row.framework, "megatron", "nemo"):
        model["masked"] = PREDICTIONS[row.seq_len or 0]
        assumed.add(f"{model['masked']} predictions per sample (usual for {row.seq_len} tokens)")
    return {key: value for key, value in model.items() if value is not None}


def _shape(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    if row.n_layers and row.hidden and row.heads:
        return {"layers": row.n_layers, "hidden": row.hidden, "heads": row.heads}
    for word, shape in RELEASED.items():
        if has_word(row.model, word):
            assumed.add(f"shape: that of the released BERT-{word}")
            return shape
    raise Unsupported("the model's shape is not stated")


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
            if stack == "pytorch-apex":
                assumed.add("stack: NVIDIA's scripts in a container of 2022 (version not stated)")
            if stack == "pytorch-eager" and has_word(row.framework, "paddle"):
                assumed.add("stack: PaddlePaddle of 2022 as pytorch-eager")
            return stack
    raise Unsupported(f"no stack is near the framework {row.framework!r}")


def map_bert_optimizer(row: Row) -> str:
    """Returns LAMB for NVIDIA's pretraining scripts (those of DLPerf replace it), else AdamW."""
    words = f"{row.optimizer} {row.notes}".lower()
    if "adam" in words or is_squad(row):
        return "adamw"
    return "lamb" if row.family == "nvidia_deeplearningexamples" or "lamb" in words else "adamw"
