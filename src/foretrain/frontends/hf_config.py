"""A Hugging Face config.json as a ModelSpec, without trace and without downloading anything.

`max_position_embeddings` is a limit, not the length of a run. Keys that do not change shape or
work are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from foretrain.errors import FileFormatError, Problem
from foretrain.frontends.consistency import GATED, consistency_problems
from foretrain.frontends.families import ENCODER_DECODERS, FAMILIES, check_value
from foretrain.frontends.hf_families import ACTIVATION_KEYS, GATED_FAMILIES, WIDE, special
from foretrain.frontends.hf_families import KEYS as MORE_KEYS
from foretrain.frontends.hf_keys import GPT, GROUPED
from foretrain.frontends.hf_more_families import ASSUMED, later_words
from foretrain.frontends.spec import ModelSpec

_ROTARY_KEYS: Mapping[str, str] = {**GROUPED, "head_dim": "head_dim"}
KEYS: Mapping[str, Mapping[str, str]] = {
    "llama": {**_ROTARY_KEYS, "mlp_bias": "mlp_bias"},
    "mistral": {**_ROTARY_KEYS, "sliding_window": "window"},
    "qwen2": _ROTARY_KEYS,
    "gpt2": GPT,
    **MORE_KEYS,
}
_REQUIRED = ("layers", "hidden", "heads", "ffn", "vocab")
_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu",
    "gelu_pytorch_tanh": "geglu",
}
_PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",  # tanh, powers and products in Python, a kernel each
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
#: T5 says in one word whether the MLP is gated.
_FEED_FORWARD = {**_PLAIN, **{f"gated-{name}": ours for name, ours in _GATED.items()}}


def load_hf_config(path: str | Path) -> ModelSpec:
    """Returns the model of a Hugging Face config.json.

    Raises FileFormatError for a file that is missing, a folder, not JSON or not a config of a
    known model type, and for missing or inconsistent fields, all of them together.
    """
    path = Path(path)
    config = _read(path)
    given = config.get("_name_or_path")
    if isinstance(given, str) and given.strip("/. "):
        name = given.rstrip("/").rsplit("/", 1)[-1]
    else:
        name = path.stem if path.stem != "config" else path.resolve().parent.name or "config"
    return model_from_hf_mapping(config, name=name, where=str(path))


def _read(path: Path) -> Mapping[str, Any]:
    """Returns the JSON object of a file; a Problem for everything that can be wrong with it."""
    where = str(path)
    try:
        if path.is_dir():
            inside = path / "config.json"
            way_out = f"give {inside}" if inside.is_file() else "give the path of a config.json"
            raise FileFormatError(Problem(what="is a folder", where=where, way_out=way_out))
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileFormatError(Problem(what="no such file", where=where)) from None
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise FileFormatError(Problem(what=what, where=where)) from error
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise FileFormatError(Problem(what=f"is not JSON: {error.msg}", where=where)) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or numbers or nesting beyond reason
        raise FileFormatError(Problem(what="is not readable JSON", where=where)) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        what = "a model config is a JSON object"
        raise FileFormatError(Problem(what=what, where=where, value=kind))
    return cast("dict[str, Any]", content)


def model_from_hf_mapping(config: Mapping[str, Any], *, name: str, where: str) -> ModelSpec:
    """Returns the model of the content of a config.json; `where` names it in messages.

    Raises FileFormatError with every problem found.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in KEYS:
        raise FileFormatError(
            Problem(
                what=_unknown_words(family),
                where=f"{where}: model_type",
                value=family,
                allowed=", ".join(sorted(KEYS)),
            )
        )
    problems: list[Problem] = []
    values = _translate(config, family, where, problems)
    special(config, family, values, where, problems)
    _activation(config, family, values, where, problems)
    assumed = _fill(config, family, values, where, problems)
    values = {**FAMILIES[family], **values}
    spelling = {ours: key for key, ours in KEYS[family].items()}
    problems += consistency_problems(values, lambda ours: f"{where}: {spelling.get(ours, ours)}")
    if problems:
        raise FileFormatError(problems)
    return ModelSpec(
        name=name,
        family=family,
        source=where,
        assumed=assumed,
        gated=values["activation"] in GATED,
        **values,
    )


def _unknown_words(family: object) -> str:
    if family is None:
        return "missing model_type"
    later = later_words(str(family))
    return "model_type is not supported" + (f": {later}" if later else "")


def _translate(
    config: Mapping[str, Any], family: str, where: str, problems: list[Problem]
) -> dict[str, Any]:
    """Returns our fields for the keys that the config states; null counts as absent."""
    values: dict[str, Any] = {}
    for key, ours in KEYS[family].items():
        if config.get(key) is None:
            continue
        values[ours], allowed = check_value(ours, config[key])
        if allowed:
            problems.append(
                Problem(
                    what="bad value", where=f"{where}: {key}", value=config[key], allowed=allowed
                )
            )
    if family == "llama" and (bias := config.get("attention_bias")) is not None:
        values["qkv_bias"], allowed = check_value("qkv_bias", bias)
        values["out_bias"] = values["qkv_bias"]
        if allowed:
            problems.append(
                Problem(
                    what="bad value",
                    where=f"{where}: attention_bias",
                    value=bias,
                    allowed=allowed,
                )
            )
    if family == "qwen2" and config.get("use_sliding_window") is True:
        _qwen2_window(config, values, where, problems)
    if family == "gpt2" and config.get("add_cross_attention") is True:
        problems.append(
            Problem(what="cross attention is not supported", where=f"{where}: add_cross_attention")
        )
    return values


def _qwen2_window(
    config: Mapping[str, Any], values: dict[str, Any], where: str, problems: list[Problem]
) -> None:
    """Sets the window when it holds for all layers; qwen2 uses it from `max_window_layers` on."""
    first = config.get("max_window_layers", 28)
    window, allowed = check_value("window", config.get("sliding_window", 4096))
    if allowed:
        problems.append(
            Problem(
                what="bad value",
                where=f"{where}: sliding_window",
                value=config.get("sliding_window"),
                allowed=allowed,
            )
        )
    elif first == 0:
        values["window"] = window
    elif not isinstance(first, int) or first < (values.get("layers") or 0):
        problems.append(
            Problem(
                what="a window in some layers only is not supported",
                where=f"{where}: max_window_layers",
                value=first,
                allowed="0 (all layers), or at least num_hidden_layers (none)",
            )
        )


def _activation(
    config: Mapping[str, Any],
    family: str,
    values: dict[str, Any],
    where: str,
    problems: list[Problem],
) -> None:
    """Sets the activation of a gated or plain MLP, as the family has it."""
    key, default = ACTIVATION_KEYS.get(family, ("hidden_act", "silu"))
    known = _GATED if family in GATED_FAMILIES else _PLAIN
    if family in ENCODER_DECODERS:
        known = _FEED_FORWARD
    given = config.get(key) or default
    if isinstance(given, str) and given in known:
        values["activation"] = known[given]
    else:
        problems.append(
            Problem(
                what="unknown activation",
                where=f"{where}: {key}",
                value=given,
                allowed=", ".join(sorted(known)),
            )
        )


def _fill(
    config: Mapping[str, Any],
    family: str,
    values: dict[str, Any],
    where: str,
    problems: list[Problem],
) -> tuple[str, ...]:
    """Fills in what the library itself fills in; the rest that is missing becomes problems."""
    assumed = [ASSUMED[family]] if family in ASSUMED else []
    heads, hidden = values.get("heads"), values.get("hidden")
    if family in WIDE and "ffn" not in values and hidden:
        values["ffn"] = 4 * hidden
    if family == "gpt2" and "vocab" not in values and config.get("vocab_size") is None:
        values["vocab"] = FAMILIES["gpt2"]["vocab"]
        assumed.append(f"vocab {values['vocab']}, the default of gpt2")
    if "kv_heads" not in values and heads:
        # the config class of mistral says 8 where the file says nothing, the others say heads
        values["kv_heads"] = 8 if family == "mistral" else heads
        if "num_key_value_heads" in KEYS[family]:
            assumed.append(f"kv_heads {values['kv_heads']}, the default of {family}")
    if not values.get("head_dim") and heads and hidden and hidden % heads == 0:
        values["head_dim"] = hidden // heads
    spelling = {ours: key for key, ours in KEYS[family].items()}
    problems += [
        Problem(what="missing", where=f"{where}: {spelling[ours]}")
        for ours in _REQUIRED
        if ours not in values and ours in spelling.keys() - {"ffn" if family in WIDE else ""}
    ]
    return tuple(assumed)
