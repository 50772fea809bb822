"""Families of transformers: what is usual where a model says nothing, and what is wrong.

`model_from_mapping` reads the one vocabulary of inline models and of the catalog's files; the
spellings of Megatron, Hugging Face, NeMo and llm-foundry are accepted for the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foretrain.errors import InputError, Problem, nearest
from foretrain.frontends.consistency import GATED, consistency_problems
from foretrain.frontends.convnet import FAMILIES as CONV_FAMILIES
from foretrain.frontends.family_defaults import FAMILIES
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.spellings import SPELLINGS

#: Families whose layers are an encoder's, with a decoder of as many unless stated.
ENCODER_DECODERS = ("t5", "mt5")

CHOICES: Mapping[str, tuple[str, ...]] = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "gelu_new", "relu", "silu", *GATED),
    "positions": ("learned", "rotary", "alibi", "relative", "none"),
    "norm_order": ("pre", "post", "both"),
    "head": ("lm", "mlm", "pretraining", "classification", "none"),
}

_INTEGERS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "max_positions",
    "window",
    "masked",
    "classes",
    "image",
    "patch",
    "channels",
    "buckets",
    "projection",
)
#: None of these is a number, too.
_COUNTS = ("decoder_layers", "vocab", "token_types", "position_padding")
_SHARES = ("dropout", "attention_dropout", "inner_dropout", "rotary_fraction")
_FLAGS = (
    "gated",
    "tied",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "norm_bias",
    "head_bias",
    "final_norm",
    "causal",
    "parallel",
    "shared_norm",
    "qk_norm",
    "embedding_norm",
    "pooler",
    "class_token",
    "window_alternates",
    "softcap",
    "head_softcap",
    "scaled_embedding",
)
_REQUIRED = ("layers", "hidden", "heads")
_KEYS = ("family", *_INTEGERS, *_COUNTS, *_SHARES, *_FLAGS, "name", *CHOICES)


def model_from_mapping(mapping: Mapping[str, Any], *, where: str = "model") -> ModelSpec:
    """Returns the ModelSpec of `{family, layers, hidden, heads, ...}`; `assumed` lists defaults.

    What is left out takes the family's usual value; `kv_heads` that of `heads`, `head_dim`
    hidden / heads, `ffn` 4 x hidden (gated: 8/3 x hidden, rounded up to a multiple of 256, as
    Llama does). Raises InputError with every problem found, unknown keys included.
    """
    problems: list[Problem] = []
    given = _canonical(mapping, where, problems)
    family = given.pop("family", None)
    if not isinstance(family, str) or family.lower() not in FAMILIES:
        problems.append(
            Problem(
                what="missing family" if family is None else "unknown family",
                where=f"{where}.family",
                value=family,
                allowed=", ".join(sorted((*FAMILIES, *CONV_FAMILIES, "dlrm"))),
                way_out=nearest(family, (*FAMILIES, *CONV_FAMILIES, "dlrm"))
                if isinstance(family, str)
                else "",
            )
        )
        # what else is wrong depends on the family: known only where it is a misspelt one
        every = (*FAMILIES, *CONV_FAMILIES, "dlrm")
        near = nearest(family, every) if isinstance(family, str) else ""
        if not isinstance(family, str) or not near or near != nearest(family, FAMILIES):
            raise InputError(problems if isinstance(family, str) else problems[-1:])
        family = "gpt"
    family = family.lower()
    values = _checked(given, where, problems)
    problems += [
        Problem(what="missing", where=f"{where}.{key}", way_out=f"a {family} model needs it")
        for key in _REQUIRED
        if given.get(key) is None
    ]
    values, assumed = _with_defaults(values, family)
    problems += consistency_problems(values, lambda key: f"{where}.{key}")
    if problems:
        raise InputError(problems)
    named = values.pop("name", None) or f"{family}-l{values['layers']}-h{values['hidden']}"
    return ModelSpec(name=named, family=family, assumed=assumed, **values)


def _canonical(mapping: Mapping[str, Any], where: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the mapping under our own names; null counts as left out."""
    result: dict[str, Any] = {}
    for raw, value in mapping.items():
        key = SPELLINGS.get(str(raw), str(raw))
        if key not in _KEYS:
            problems.append(
                Problem(
                    what="unknown key",
                    where=f"{where}.{raw}",
                    value=value,
                    allowed=", ".join(sorted(_KEYS)),
                    way_out=nearest(str(raw), (*_KEYS, *SPELLINGS)),
                )
            )
        elif key in result and result[key] != value:
            problems.append(
                Problem(what=f"{key} is given twice, differently", where=f"{where}.{raw}")
            )
        elif value is not None:
            result[key] = value
    return result


def _checked(given: Mapping[str, Any], where: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the values that have the right type and range; the others become problems."""
    result: dict[str, Any] = {}
    for key, value in given.items():
        checked, allowed = check_value(key, value)
        if allowed:
            problems.append(
                Problem(what="bad value", where=f"{where}.{key}", value=value, allowed=allowed)
            )
        else:
            result[key] = checked
    return result


#: More layers than any real model has; a typing error would keep the compiler busy for long.
MAX_LAYERS = 10_000


def check_value(key: str, value: object) -> tuple[Any, str]:
    """Returns the value of a model field and an empty text, or what is allowed instead."""
    number = _number(value)
    if key in _INTEGERS:
        most = MAX_LAYERS if key == "layers" else math.inf
        if number is not None and 1 <= number <= most and number == int(number):
            return int(number), ""
        upto = f" and at most {MAX_LAYERS:,}" if key == "layers" else ""
        return None, f"a whole number of at least 1{upto}"
    if key in _COUNTS:
        most = MAX_LAYERS if key == "decoder_layers" else math.inf
        if number is not None and 0 <= number <= most and number == int(number):
            return int(number), ""
        upto = f" and at most {MAX_LAYERS:,}" if key == "decoder_layers" else ""
        return None, f"a whole number of at least 0{upto}"
    if key in _SHARES:
        if number is not None and 0 <= number <= 1:
            return float(number), ""
        return None, "a number from 0 to 1"
    if key in _FLAGS:
        return (value, "") if isinstance(value, bool) else (None, "true or false")
    if not isinstance(value, str) or not value:
        return None, "a text"
    if key in CHOICES and value.lower() not in CHOICES[key]:
        return None, ", ".join(CHOICES[key])
    return (value.lower() if key in CHOICES else value), ""


def _number(value: object) -> float | None:
    """Returns a finite number, or None; true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # a whole number of more than 64 bits is no size, and a much larger one not even a float
    return value if abs(value) < 2**63 else None


#: Defaults that decide work or memory, for text and for images.
_TEXT_DEFAULTS = ("vocab", "max_positions", "tied", "dropout")
_IMAGE_DEFAULTS = ("image", "patch", "classes", "dropout")


def _with_defaults(
    values: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns all values and one line for each default that decides work or memory."""
    result = {**FAMILIES[family], **values}
    assumed: list[str] = [
        f"{key} {result[key]}, usual for {family}"
        for key in (_IMAGE_DEFAULTS if result.get("image") else _TEXT_DEFAULTS)
        if key not in values and result.get(key) is not None
    ]
    if "activation" not in values and values.get("gated") is not None:
        result["activation"] = "swiglu" if values["gated"] else "gelu"
    gated = result["activation"] in GATED
    result.setdefault("gated", gated)
    heads, hidden = values.get("heads"), values.get("hidden")
    if family in ENCODER_DECODERS and "decoder_layers" not in values and values.get("layers"):
        result["decoder_layers"] = values["layers"]
        assumed.append(f"decoder_layers {result['decoder_layers']}, as many as layers")
    if "inner_dropout" in FAMILIES[family] and "inner_dropout" not in values:
        result["inner_dropout"] = result["dropout"]
    if "kv_heads" not in values and heads:
        result["kv_heads"] = heads
        assumed.append(f"kv_heads {heads}, as many as heads")
    if "head_dim" not in values and heads and hidden and hidden % heads == 0:
        result["head_dim"] = hidden // heads
    if "ffn" not in values and hidden:
        result["ffn"] = 256 * math.ceil(8 * hidden // 3 / 256) if gated else 4 * hidden
        assumed.append(f"ffn {result['ffn']}, usual for {family}")
    return result, tuple(assumed)
