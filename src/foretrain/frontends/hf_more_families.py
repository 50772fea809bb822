"""More Hugging Face families: those that are a known layer with other keys, and why others wait.

Keys and defaults are those of the library's config classes, of chatglm and internlm2 those of the
code beside their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from foretrain.frontends.hf_keys import GPT, GROUPED

Refuse = Callable[[str, object, str], None]
Special = Callable[[Mapping[str, Any], dict[str, Any], Refuse], None]

KEYS: Mapping[str, Mapping[str, str]] = {
    "starcoder2": {**GROUPED, "residual_dropout": "dropout", "sliding_window": "window"},
    "gpt_bigcode": GPT,
    "gptj": GPT,
    "granite": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "smollm3": GROUPED,
    "stablelm": {
        **GROUPED,
        "partial_rotary_factor": "rotary_fraction",
        "use_qkv_bias": "qkv_bias",
        "use_parallel_residual": "parallel",
        "hidden_dropout": "dropout",
    },
    "cohere": GROUPED,
    "glm": {**GROUPED, "head_dim": "head_dim", "partial_rotary_factor": "rotary_fraction"},
    "chatglm": {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "ffn",
        "padded_vocab_size": "vocab",
        "seq_length": "max_positions",
        "tie_word_embeddings": "tied",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "add_qkv_bias": "qkv_bias",
    },
    "internlm2": GROUPED,
    "distilbert": {
        "n_layers": "layers",
        "dim": "hidden",
        "n_heads": "heads",
        "hidden_dim": "ffn",
        "vocab_size": "vocab",
        "max_position_embeddings": "max_positions",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
}
#: Families whose MLP is 4 x hidden wide where the file says nothing.
WIDE = ("gpt_bigcode", "gptj")
ACTIVATION_KEYS: Mapping[str, tuple[str, str]] = {
    "starcoder2": ("hidden_act", "gelu_pytorch_tanh"),
    "gpt_bigcode": ("activation_function", "gelu_pytorch_tanh"),
    "gptj": ("activation_function", "gelu_new"),
    "chatglm": ("", "silu"),
    "distilbert": ("activation", "gelu"),
}
GATED_FAMILIES = (
    "granite", "olmo", "olmo2", "smollm3", "stablelm", "cohere", "glm", "chatglm", "internlm2",
)  # fmt: skip

#: What a family does otherwise than it is taken for, with a cost too small to refuse it.
ASSUMED: Mapping[str, str] = {
    "olmo": "norms of olmo with weights (it has none)",
    "olmo2": "norms of olmo2 after the residual, of queries and keys per head (it has them on each "
    "branch, over all heads)",
    "smollm3": "rotary positions in every layer of smollm3 (one in four has none)",
}

_MOE, _STATE = "mixtures of experts", "state-space layers"
_WINDOWS = "attention windows in other layers than every second"
_SEVERAL = "several inputs (text, images, sound)"
#: Families that are known and wait for a mechanism: which one.
LATER: Mapping[str, str] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe",
         "llama4", "llama4_text", "dbrx", "phimoe", "granitemoe", "glm4_moe", "jetmoe",
         "qwen3_next", "minimax", "switch_transformers"), _MOE),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "zamba", "zamba2",
                     "bamba", "recurrent_gemma"), _STATE),
    **dict.fromkeys(("gemma3_text", "cohere2", "gpt_neo"), _WINDOWS),
    **dict.fromkeys(("gemma3", "llava", "llava_next", "mllama", "clip", "siglip", "qwen2_vl",
                     "qwen2_5_vl", "idefics2", "idefics3", "paligemma", "blip-2", "whisper",
                     "mistral3"), _SEVERAL),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "blenderbot"),
                    "encoders with a decoder that are not T5"),
    "albert": "layers that share their weights",
    "electra": "a generator beside a discriminator",
    "nemotron": "squared ReLU",
}  # fmt: skip


def later_words(family: str) -> str:
    """Returns what a family needs that is not modelled, '' for one that is not known."""
    word = LATER.get(family, "")
    return f"it needs {word}, not modelled yet" if word else ""


def _flags(config: Mapping[str, Any], key: str, values: dict[str, Any], *fields: str) -> None:
    if isinstance(config.get(key), bool):
        values |= dict.fromkeys(fields, config[key])


def _attention_bias(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _flags(config, "attention_bias", values, "qkv_bias", "out_bias")
    _flags(config, "mlp_bias", values, "mlp_bias")


def _starcoder2(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    values.setdefault("kv_heads", 2)  # of the config class
    _flags(config, "use_bias", values, "qkv_bias", "out_bias", "mlp_bias")
    for key, usual in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if config.get(key, usual) != usual:
            refuse(key, config[key], usual)


def _gpt_bigcode(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("multi_query", True) is True:
        values["kv_heads"] = 1


def _gptj(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    heads, hidden, turned = values.get("heads"), values.get("hidden"), config.get("rotary_dim", 64)
    if heads and hidden and isinstance(turned, int) and 0 < turned <= hidden // heads:
        values["rotary_fraction"] = turned / (hidden // heads)
    elif turned is not None:
        refuse("rotary_dim", turned, "1 to the size of a head")


def _stablelm(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("qk_layernorm") is True:
        refuse("qk_layernorm", "true", "false")
    if values.get("parallel"):
        values["shared_norm"] = True


def _cohere(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("use_qk_norm") is True:
        refuse("use_qk_norm", "true", "false")
    _attention_bias(config, values, refuse)


def _glm(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    values.setdefault("kv_heads", 2)  # of the config class
    _flags(config, "attention_bias", values, "qkv_bias")


def _chatglm(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    groups = config.get("multi_query_group_num")
    if config.get("multi_query_attention") is True and isinstance(groups, int):
        values["kv_heads"] = groups
    _flags(config, "add_bias_linear", values, "out_bias", "mlp_bias")
    for key, usual in (("rmsnorm", True), ("apply_residual_connection_post_layernorm", False)):
        if config.get(key, usual) is not usual:
            refuse(key, config[key], str(usual).lower())


def _internlm2(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _flags(config, "bias", values, "qkv_bias", "out_bias")


def _distilbert(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    names = config.get("architectures")
    first = [str(name) for name in cast("list[Any]", names)[:1]] if isinstance(names, list) else []
    if first and not first[0].endswith("ForMaskedLM"):
        refuse("architectures", first[0], "DistilBertForMaskedLM")


SPECIAL: Mapping[str, Special] = {
    "starcoder2": _starcoder2,
    "gpt_bigcode": _gpt_bigcode,
    "gptj": _gptj,
    "granite": _attention_bias,
    "olmo": _attention_bias,
    "olmo2": _attention_bias,
    "smollm3": _attention_bias,
    "stablelm": _stablelm,
    "cohere": _cohere,
    "glm": _glm,
    "chatglm": _chatglm,
    "internlm2": _internlm2,
    "distilbert": _distilbert,
}
