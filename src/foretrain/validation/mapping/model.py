"""The model of a row: an inline mapping, or a catalog name where the source gives no shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.model_class import MAPPED, catalog_model
from foretrain.validation.rows import Row

#: Why a class of models is not predicted.
CLASSES: Mapping[str, str] = {
    "llm_moe": "mixture of experts comes with a later version",
    "llm_moe_hybrid": "mixture of experts and state-space layers come with a later version",
    "llm_hybrid_mamba": "state-space layers come with a later version",
    "seq2seq": "BART is not modelled",
    "nmt": "translation models come with a later version",
    "lm_transformer_xl": "Transformer-XL is not modelled",
    "vision_vit": "this vision transformer is not in the catalog",
    "vision_detection": "detection models are not modelled",
    "vision_segmentation": "segmentation models are not modelled",
    "diffusion": "diffusion models are not modelled",
    "vlm": "vision-language models are not modelled",
    "speech": "speech models are not modelled",
    "gnn": "graph neural networks are not modelled",
    "rl": "reinforcement learning is not modelled",
    "forecasting": "forecasting models are not modelled",
    "other": "this class of models is not modelled",
}

#: Rows of the word table of the GPipe prototype of DS3Lab: those of bert-base-cased. Its author
#: counts 226 MiB more in fp32 for the first stage than for others (results/gpt3_xl_fp16.md).
PROTOTYPE_VOCAB = 28996

_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
#: Its modules/gpt_modules.py of April 2022: ReLU, no dropout, no causal mask, a classifier on top.
_PROTOTYPE: Mapping[str, Any] = {
    "activation": "relu",
    "causal": False,
    "head": "classification",
    "tied": False,
    **_NO_DROPOUT,
}
_LLAMA: Mapping[str, Any] = {"family": "llama"}

#: Architectures by words of the model's name, the first match decides. What is not said here is
#: the usual value of the family (frontends/families.py).
ARCHITECTURES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"llava|wan2|gemma4|mamba|rwkv", {}),
    (r"llama|internlm|aquila|\byi\b|olmo|smollm|deepseek|vicuna", _LLAMA),
    (r"granite|minicpm|stablelm|xgen", _LLAMA),
    (r"baichuan-?2?[- ]?7b", _LLAMA),  # rotary; the 13B has ALiBi
    (r"baichuan", {"family": "llama", "positions": "alibi"}),
    (r"chatglm", {"family": "llama", "qkv_bias": True, "rotary_fraction": 0.5}),
    (r"qwen", {"family": "qwen2"}),
    (r"mistral", {"family": "mistral"}),
    (r"gemma-?2-", {"family": "gemma2"}),
    (r"gemma", {"family": "gemma"}),
    (
        r"nemotron",
        {
            "family": "gpt",
            "activation": "relu",
            "positions": "rotary",
            "tied": False,
            "max_positions": None,
            **_NO_BIAS,
            **_NO_DROPOUT,
        },
    ),
    (r"mpt", {"family": "mpt"}),
    (r"\bpax", {"family": "gpt", **_NO_DROPOUT}),
    (r"opt[_-]", {"family": "opt"}),
    # its training script states no dropout: Megatron-DeepSpeed's default, unlike released configs
    (r"bloom", {"family": "bloom", "dropout": 0.1, "attention_dropout": 0.1}),
    (r"falcon", {"family": "falcon"}),
    (r"phi-?3", {"family": "phi3"}),
    (r"phi", {"family": "phi"}),
    (r"neox|pythia|dolly", {"family": "gpt_neox"}),
    (r"gpt|nemo megatron|paxml|cpm|megatron|mt-nlg|starcoder|turing|cerebras", {"family": "gpt"}),
)


def map_model(row: Row, assumed: Assumed) -> Mapping[str, Any] | str:
    """Returns the `model` of a run file for a dense decoder.

    Raises:
        Unsupported: another class of models, an unknown architecture, or a missing shape.
    """
    if row.model_class != "llm_dense":
        raise Unsupported(_why_not(row))
    if row.n_experts or (row.ep or 1) > 1:
        raise Unsupported(CLASSES["llm_moe"])
    shape = {"n_layers": row.n_layers, "hidden": row.hidden, "heads": row.heads}
    missing = [key for key, value in shape.items() if not value]
    if missing:
        return _by_name(row, missing, assumed)
    architecture = _as_stated(row, _architecture(row, assumed))
    model: dict[str, Any] = {
        **architecture,
        **_hugging_face(row, architecture),
        "layers": row.n_layers,
        "hidden": row.hidden,
        "heads": row.heads,
        "kv_heads": row.kv_heads,
        "head_dim": row.head_dim,
        "ffn": row.ffn,
        "vocab": row.vocab,
    }
    if "max_positions" not in architecture and architecture["family"] == "gpt":
        model["max_positions"] = row.seq_len  # a learned table as long as the sequence
    if "untied embeddings" in row.arch_note:
        model["tied"] = False
    elif "tied embeddings" in row.arch_note:
        model["tied"] = True
    elif has_word(row.framework, "dedloc"):
        model |= _PROTOTYPE
    if row.vocab is None and has_word(row.framework, "dedloc"):
        model["vocab"] = PROTOTYPE_VOCAB
        assumed.add(f"vocab = {PROTOTYPE_VOCAB} (not stated; the size of the first stage)")
    many = ("vocab", "ffn") if architecture["family"] == "gpt" else ("vocab", "ffn", "kv_heads")
    for key in many:
        if model[key] is None:
            assumed.add(f"{key}: usual for {architecture['family']} (not stated)")
    return {key: value for key, value in model.items() if value is not None}


def _hugging_face(row: Row, architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    """What configs of Hugging Face GPT-2 and GPT-Neo say; the latter drops nothing."""
    if architecture["family"] != "gpt" or not has_word(row.framework, "hf transformers"):
        return {}
    dropout = _NO_DROPOUT if has_word(row.model, "neo") else {}
    return {"activation": "gelu_new", **dropout}


def _why_not(row: Row) -> str:
    """Why a row of another class is not predicted; sources put several kinds under "other"."""
    if row.model_class == "other" and has_word(row.model, "lora"):
        return "LoRA comes with a later version"
    if row.model_class == "other" and has_word(row.model, "bert"):
        return "BERT of MLPerf packs samples of lengths that are not stated"
    if not row.model_class:
        return "model_class is not stated, and the catalog has no model of this name"
    unknown = f"model_class {row.model_class!r} is not modelled; modelled are {', '.join(MAPPED)}"
    return CLASSES.get(row.model_class, unknown)


def _as_stated(row: Row, architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a source says against the usual value of a family.

    The MPT of llm-foundry's benchmark files keep the defaults of its code, unlike the released
    models: learned positions (as the rows say) and biases (as their parameter counts say).
    """
    if architecture["family"] == "mpt" and has_word(row.notes, "no alibi"):
        biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)
        learned = {"positions": "learned", "max_positions": row.seq_len}
        return {**architecture, **learned, **biases}
    return architecture


def _by_name(row: Row, missing: list[str], assumed: Assumed) -> str:
    """A model of the catalog, for sources that name a public model and give no shape."""
    model = catalog_model(row.model)
    if model is None:
        raise Unsupported(f"the model's shape is not stated ({', '.join(missing)})")
    assumed.add(f"shape: that of the catalog's {model.name}")
    return model.name


def _architecture(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    """By the words of the model's name; a name that says nothing is read off the shape.

    What has fewer key-value heads, or an MLP that is not four times as wide as the model (a gated
    one), is built like LLaMA; the rest like GPT.
    """
    for pattern, architecture in ARCHITECTURES:
        if re.search(pattern, row.model, re.IGNORECASE):
            if architecture:
                return architecture
            raise Unsupported("the model's architecture is not known")
    like_gpt = row.ffn == 4 * (row.hidden or 0) and row.kv_heads in (None, row.heads)
    family = "gpt" if like_gpt else "llama"
    assumed.add(f"architecture: like {family} by its shape (the name is not known)")
    return {"family": family}
