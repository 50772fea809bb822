"""What the fields of a transformer must fulfil together, whatever file they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foretrain.errors import Problem

GATED = ("swiglu", "geglu")


def consistency_problems(values: Mapping[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """Returns what is wrong between fields that are each right on their own.

    `where` gives the place of a field in the user's file.
    """
    problems: list[Problem] = []
    heads, hidden = values.get("heads"), values.get("hidden")
    kv_heads = values.get("kv_heads")
    if heads and hidden and not values.get("head_dim") and hidden % heads:
        problems.append(
            Problem(
                what=f"hidden {hidden} is not divisible by heads {heads}",
                where=where("hidden"),
                value=hidden,
                way_out="change one of them or give head_dim",
            )
        )
    if heads and kv_heads and heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        problems.append(
            Problem(
                what=f"kv_heads {kv_heads} does not divide heads {heads}",
                where=where("kv_heads"),
                value=kv_heads,
                allowed=", ".join(map(str, divisors)),
            )
        )
    problems += [*_encoder_problems(values, where), *_stack_problems(values, where)]
    activation = values.get("activation")
    gated = values.get("gated")
    if activation is not None and gated is not None and gated != (activation in GATED):
        problems.append(
            Problem(
                what=f"activation {activation} contradicts gated {str(gated).lower()}",
                where=where("activation"),
                value=activation,
                way_out="gated activations are " + ", ".join(GATED),
            )
        )
    learned = values.get("positions") == "learned"
    if learned and not values.get("max_positions") and not values.get("image"):
        problems.append(
            Problem(
                what="learned positions need the size of their table",
                where=where("max_positions"),
            )
        )
    return problems


#: What a decoder beside an encoder cannot be, and why (frontends/encoder_decoder.py).
_NOT_BESIDE: tuple[tuple[str, Any], ...] = (
    ("head", "lm"),
    ("image", None),
    ("token_types", 0),
    ("embedding_norm", False),
    ("projection", None),
    ("scaled_embedding", False),
    ("parallel", False),
    ("norm_order", "pre"),
    ("window", None),
    ("causal", True),
    ("position_padding", 0),
)


def _stack_problems(values: Mapping[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """Returns what is not modelled of a decoder beside an encoder, and of alternating windows."""
    problems: list[Problem] = []
    if values.get("decoder_layers"):
        problems += [
            Problem(
                what="is not modelled of an encoder with a decoder",
                where=where(key),
                value=values[key],
                allowed="leave it out" if usual is None else str(usual).lower(),
            )
            for key, usual in _NOT_BESIDE
            if values.get(key, usual) != usual
        ]
    if values.get("window_alternates") and not values.get("window"):
        what = "a window in every second layer needs its size"
        problems.append(Problem(what=what, where=where("window")))
    return problems


def _encoder_problems(values: Mapping[str, Any], where: Callable[[str], str]) -> list[Problem]:
    """Returns what is wrong between image, patch, vocabulary and head."""
    image, patch, head = values.get("image"), values.get("patch"), values.get("head", "lm")
    if image is not None and patch is not None:
        if image % patch:
            what = f"patches of {patch} do not divide an image of {image}"
            return [Problem(what=what, where=where("image"), value=image)]
        if head not in ("classification", "none"):
            what = "an encoder of images has no words to predict"
            allowed = "classification, none"
            return [Problem(what=what, where=where("head"), value=head, allowed=allowed)]
        return []
    if values.get("vocab") == 0:
        allowed = "a whole number of at least 1"
        return [Problem(what="bad value", where=where("vocab"), value=0, allowed=allowed)]
    return []
