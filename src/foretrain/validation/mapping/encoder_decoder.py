"""Rows of T5: model, lengths and plan by the words of their sources.

T5X pretrains on spans of 512 tokens with targets of 128, without dropout, on replicas (the gin
files of t5x/contrib/gpu and rosetta's README, which names them beside the table). Megatron and NeMo
build T5 of other parts: LayerNorm, biases, learned positions, a tied head; their data set has
targets of 128 tokens (`seq_length_dec` of the launcher, `decoder-seq-length` of the CI recipes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretrain.frontends.spec import ModelSpec
from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.model_class import catalog_model
from foretrain.validation.rows import Row

#: Tokens of a target of pretraining on spans, a quarter of the 512 of the input.
TARGET = 128

_T5X: Mapping[str, Any] = {
    "family": "t5",
    "activation": "geglu",
    "tied": False,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_MEGATRON: Mapping[str, Any] = {
    "family": "t5",
    "norm": "layernorm",
    "norm_bias": True,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "activation": "gelu",
    "positions": "learned",
    "inner_dropout": 0.0,
}
#: Words of BERT's cased vocabulary and the sentinels of the masked spans (megatron_ci_golden).
_CASED_WORDS = 28996 + 100


def is_t5(row: Row) -> bool:
    """Returns whether the row is a T5."""
    return row.model_class == "t5"


def map_t5(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    """Returns the `model` section; Unsupported without a shape."""
    row = _with_shape(row, assumed)
    if not row.seq_len:
        raise Unsupported("the sequence length is not stated")
    nemo = has_word(row.framework, "nemo")
    model: dict[str, Any] = {
        **_built_by(row),
        "layers": row.n_layers,
        "decoder_layers": _decoder_layers(row),
        "hidden": row.hidden,
        "heads": row.heads,
        "head_dim": row.head_dim,
        "ffn": row.ffn,
        "vocab": row.vocab,
    }
    if nemo:
        model |= {"activation": "geglu", "head_dim": 64}
        if has_word(row.model, "mt5"):
            model["family"] = "mt5"
    if row.family == "megatron_ci_golden" and not row.vocab:
        model["vocab"] = _CASED_WORDS
        assumed.add(f"vocab {_CASED_WORDS} (the recipes of the source)")
    return {key: value for key, value in model.items() if value is not None}


def _with_shape(row: Row, assumed: Assumed) -> Row:
    """The row with the shape of the catalog's model of its name, where it states none."""
    if row.n_layers and row.hidden and row.heads:
        return row
    spec = catalog_model(row.model)
    if not isinstance(spec, ModelSpec) or not spec.decoder_layers:
        raise Unsupported("the model's shape is not stated")
    assumed.add(f"shape: that of the catalog's {spec.name}")
    return replace(
        row,
        n_layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=row.vocab or spec.vocab,
    )


def _built_by(row: Row) -> Mapping[str, Any]:
    """What the frameworks build that call it T5; the released T5 where none of them is named."""
    if has_word(row.framework, "t5x", "jax"):
        return _T5X
    if has_word(row.framework, "megatron", "nemo"):
        return {**_MEGATRON, "max_positions": row.seq_len}
    return {"family": "t5", **({"activation": "geglu"} if _is_gated(row) else {})}


def _is_gated(row: Row) -> bool:
    """Returns whether the model is of version 1.1 or multilingual."""
    return has_word(row.model, "1.1", "1_1", "mt5", "flan")


def _decoder_layers(row: Row) -> int | None:
    """As the source says, else as many as the encoder has."""
    for pattern, text in (
        (r"\+ (\d+) dec", row.arch_note),
        (r'"decoder-num-layers":(\d+)', row.notes),
    ):
        match = re.search(pattern, text)
        if match:
            return int(match[1])
    return row.n_layers


def map_target(assumed: Assumed) -> int:
    """Returns the length of the target: that of the sources' data sets."""
    assumed.add(f"target_sequence = {TARGET} (usual for pretraining on spans; not stated)")
    return TARGET
