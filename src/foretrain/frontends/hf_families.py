"""Hugging Face families with keys of their own: what each config means in our fields.

`KEYS` are plain translations; `special` holds what a translation cannot say. Defaults are those of
the library's config classes, kept in frontends/families.py unless a file leaves more open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from foretrain.errors import Problem
from foretrain.frontends import hf_more_families as more
from foretrain.frontends.hf_keys import GROUPED, USUAL


def _without(keys: Mapping[str, str], *names: str) -> dict[str, str]:
    return {key: ours for key, ours in keys.items() if key not in names}


_ENCODER: Mapping[str, str] = {
    **_without(USUAL, "attention_dropout"),
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "token_types",
}

_ENCODER_DECODER: Mapping[str, str] = {
    "num_layers": "layers",
    "num_decoder_layers": "decoder_layers",
    "d_model": "hidden",
    "num_heads": "heads",
    "d_kv": "head_dim",
    "d_ff": "ffn",
    "vocab_size": "vocab",
    "relative_attention_num_buckets": "buckets",
    "dropout_rate": "dropout",
    "tie_word_embeddings": "tied",
}

KEYS: Mapping[str, Mapping[str, str]] = {
    **more.KEYS,
    "qwen3": {**GROUPED, "head_dim": "head_dim"},
    "phi3": {**GROUPED, "resid_pdrop": "dropout"},
    "gemma": {**GROUPED, "head_dim": "head_dim"},
    "gemma2": {
        **GROUPED,
        "head_dim": "head_dim",
        "sliding_window": "window",
    },
    "t5": _ENCODER_DECODER,
    "mt5": _ENCODER_DECODER,
    "gpt_neox": {
        **USUAL,
        "rotary_pct": "rotary_fraction",
        "use_parallel_residual": "parallel",
        "hidden_dropout": "dropout",
    },
    "opt": {
        **_without(USUAL, "intermediate_size"),
        "ffn_dim": "ffn",
        "dropout": "dropout",
        "word_embed_proj_dim": "projection",
    },
    "bloom": {
        "n_layer": "layers",
        "n_head": "heads",
        "hidden_size": "hidden",
        "vocab_size": "vocab",
        "tie_word_embeddings": "tied",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    "mpt": {
        "n_layers": "layers",
        "n_heads": "heads",
        "d_model": "hidden",
        "vocab_size": "vocab",
        "tie_word_embeddings": "tied",
        "max_seq_len": "max_positions",
        "resid_pdrop": "dropout",
    },
    "falcon": {
        **_without(USUAL, "intermediate_size"),
        "ffn_hidden_size": "ffn",
        "hidden_dropout": "dropout",
    },
    "phi": {
        **GROUPED,
        "partial_rotary_factor": "rotary_fraction",
        "resid_pdrop": "dropout",
    },
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "vit": {
        **_without(
            _ENCODER,
            "vocab_size",
            "max_position_embeddings",
            "tie_word_embeddings",
            "type_vocab_size",
        ),
        "image_size": "image",
        "patch_size": "patch",
        "num_channels": "channels",
        "qkv_bias": "qkv_bias",
    },
}
#: Families whose MLP is 4 x hidden wide where the file says nothing.
WIDE = ("gpt2", "opt", "bloom", "mpt", "falcon", *more.WIDE)
#: Key of the activation and its default; silu of hidden_act for the families not named here.
ACTIVATION_KEYS: Mapping[str, tuple[str, str]] = {
    **more.ACTIVATION_KEYS,
    "gpt2": ("activation_function", "gelu_new"),
    "opt": ("activation_function", "relu"),
    "falcon": ("activation", "gelu"),
    "gemma": ("hidden_activation", "gelu_pytorch_tanh"),
    "gemma2": ("hidden_activation", "gelu_pytorch_tanh"),
    "t5": ("feed_forward_proj", "relu"),
    "mt5": ("feed_forward_proj", "gated-gelu"),
    "gpt_neox": ("hidden_act", "gelu"),
    "phi": ("hidden_act", "gelu_new"),
    "bert": ("hidden_act", "gelu"),
    "roberta": ("hidden_act", "gelu"),
    "vit": ("hidden_act", "gelu"),
    "bloom": ("", "gelu"),
    "mpt": ("", "gelu"),
}
GATED_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", *more.GATED_FAMILIES,
)  # fmt: skip

#: Ending of an architecture's name -> head and pooler of an encoder; the first match decides.
_HEADS: tuple[tuple[str, str, bool], ...] = (
    ("BertForSequenceClassification", "classification", True),
    ("BertForPreTraining", "pretraining", True),
    ("ForMaskedLM", "mlm", False),
    ("ForImageClassification", "classification", False),
    ("Model", "none", True),
)

Refuse = Callable[[str, object, str], None]


def special(
    config: Mapping[str, Any],
    family: str,
    values: dict[str, Any],
    where: str,
    problems: list[Problem],
) -> None:
    """Adds to `values` what a family's keys mean together, and problems for what is unsupported."""

    def refuse(key: str, value: object, allowed: str) -> None:
        what = "is not supported"
        problems.append(Problem(what=what, where=f"{where}: {key}", value=value, allowed=allowed))

    if family in _SPECIAL:
        _SPECIAL[family](config, values, refuse)


def _qwen3(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("use_sliding_window") is True:
        refuse("use_sliding_window", "true", "false")
    values.setdefault("head_dim", 128)  # of the config class, whatever hidden and heads are
    _biases(config.get("attention_bias"), values, "qkv_bias", "out_bias")


def _gpt_neox(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _biases(config.get("attention_bias"), values, "qkv_bias", "out_bias")


def _opt(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if values.get("projection") == values.get("hidden"):
        values.pop("projection", None)
    if config.get("do_layer_norm_before") is False:
        values |= {"norm_order": "post", "final_norm": False}
    _biases(config.get("enable_bias"), values, "qkv_bias", "out_bias", "mlp_bias")


def _bloom(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _other_spellings(
        config,
        values,
        n_embed="hidden",
        num_hidden_layers="layers",
        num_attention_heads="heads",
    )


def _mpt(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    given = config.get("attn_config")
    attention: Mapping[str, Any] = {}
    if isinstance(given, Mapping):
        attention = cast("Mapping[str, Any]", given)
    if attention.get("qk_ln") is True:
        refuse("attn_config.qk_ln", "true", "false")
    if attention.get("attn_type", "multihead_attention") != "multihead_attention":
        refuse("attn_config.attn_type", attention["attn_type"], "multihead_attention")
    if attention.get("alibi") is False:
        values["positions"] = "learned"
    ratio, hidden = config.get("expansion_ratio"), values.get("hidden")
    if isinstance(ratio, int) and not isinstance(ratio, bool) and hidden:
        values["ffn"] = ratio * hidden
    if config.get("no_bias") is False:
        values |= dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "norm_bias"), True)


def _falcon(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _other_spellings(config, values, n_layer="layers", n_head="heads")
    grouped = config.get("new_decoder_architecture") is True
    shared = config.get("num_kv_heads", config.get("n_head_kv"))
    if grouped and isinstance(shared, int):
        values["kv_heads"] = shared
    elif not grouped and config.get("multi_query", True) is True:
        values["kv_heads"] = 1
    # falcon-11b has the new shape with one norm
    values["shared_norm"] = not grouped or config.get("num_ln_in_parallel_attn") == 1
    if not grouped and config.get("parallel_attn") is False:
        values |= {"parallel": False, "shared_norm": False}
    if config.get("alibi") is True:
        values["positions"] = "alibi"
    _biases(config.get("bias"), values, "qkv_bias", "out_bias", "mlp_bias")


def _phi(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("qk_layernorm") is True:
        refuse("qk_layernorm", "true", "false")


def _phi3(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    window, longest = config.get("sliding_window"), values.get("max_positions")
    if isinstance(window, int) and (longest is None or window < longest):
        values["window"] = window


def _gemma(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    values.setdefault("head_dim", 256)


def _gemma2(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    values.setdefault("head_dim", 256)
    for key, ours in (
        ("attn_logit_softcapping", "softcap"),
        ("final_logit_softcapping", "head_softcap"),
    ):
        if key in config:
            values[ours] = config[key] is not None
    kinds = config.get("layer_types")
    turns = ["sliding_attention", "full_attention"]
    if isinstance(kinds, list):
        listed = cast("list[Any]", kinds)
        if any(kind != turns[i % 2] for i, kind in enumerate(listed)):
            refuse("layer_types", "another order", f"{turns[0]} and {turns[1]} in turn")
    _biases(config.get("attention_bias"), values, "qkv_bias", "out_bias")


def _t5(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    """One rate for all dropouts; `num_hidden_layers` is a second name of the layers."""
    _other_spellings(config, values, num_hidden_layers="layers")
    if values.get("layers") is not None:
        values.setdefault("decoder_layers", values["layers"])
    if values.get("dropout") is not None:
        values |= dict.fromkeys(("attention_dropout", "inner_dropout"), values["dropout"])
    names = config.get("architectures")
    listed = cast("list[Any]", names) if isinstance(names, list) else []
    if any(str(name).endswith("EncoderModel") for name in listed):
        refuse("architectures", listed, "...ForConditionalGeneration, ...Model")
    if config.get("is_encoder_decoder") is False or config.get("is_decoder") is True:
        refuse("is_encoder_decoder", "false", "true")


def _encoder(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    if config.get("is_decoder") is True or config.get("add_cross_attention") is True:
        refuse("is_decoder", "true", "false")
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        refuse("position_embedding_type", kind, "absolute")
    names = config.get("architectures")
    listed = cast("list[Any]", names) if isinstance(names, list) else []
    known = [(h, p) for name in listed[:1] for end, h, p in _HEADS if str(name).endswith(end)]
    if listed and not known:
        refuse("architectures", listed[0], ", ".join(f"...{end}" for end, _, _ in _HEADS))
    elif known:
        values["head"], values["pooler"] = known[0]
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and labels:
        values["classes"] = len(cast("Mapping[Any, Any]", labels))


def _roberta(config: Mapping[str, Any], values: dict[str, Any], refuse: Refuse) -> None:
    _encoder(config, values, refuse)
    rows = values.get("max_positions")
    if isinstance(rows, int) and rows > 2:  # the table's first two rows are for padding
        values["max_positions"] = rows - 2


def _other_spellings(config: Mapping[str, Any], values: dict[str, Any], **keys: str) -> None:
    """The config classes accept a second name for some fields."""
    for key, ours in keys.items():
        given = config.get(key)
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            values.setdefault(ours, given)


def _biases(given: object, values: dict[str, Any], *fields: str) -> None:
    if isinstance(given, bool):
        values |= dict.fromkeys(fields, given)


_SPECIAL: Mapping[str, Callable[[Mapping[str, Any], dict[str, Any], Refuse], None]] = {
    **more.SPECIAL,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "phi": _phi,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "t5": _t5,
    "mt5": _t5,
    "bert": _encoder,
    "roberta": _roberta,
    "vit": _encoder,
}
