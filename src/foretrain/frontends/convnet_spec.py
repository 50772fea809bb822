"""Reading the shape of a convolutional network: `{family: resnet, depths: [3, 4, 6, 3]}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, cast

from foretrain.errors import InputError, Problem, nearest
from foretrain.frontends.convnet import FAMILIES, build_conv_graph
from foretrain.frontends.spec import ConvSpec

#: What each family needs (`depths`: how many stages, None any number) and its usual image.
STAGES: Mapping[str, int | None] = {"vgg": 5, "resnet": 4, "densenet": None}
IMAGES: Mapping[str, int] = {"inception-v3": 299}
_ABOUT = ("layers", "num_parameters", "source", "assumed")
_KEYS = tuple(field.name for field in fields(ConvSpec) if field.name not in _ABOUT)
_FLAGS = ("bottleneck", "batch_norm", "squeeze", "auxiliary")
_INTEGERS = ("image", "classes", "groups", "width", "growth")
_NUMBERS = ("width_multiplier", "depth_multiplier", "dropout")


def is_conv_family(family: object) -> bool:
    """Returns whether a model of this family is a convolutional network."""
    return isinstance(family, str) and family.strip().lower() in FAMILIES


def conv_spec_from_mapping(mapping: Mapping[str, Any], *, where: str = "model") -> ConvSpec:
    """Returns the ConvSpec of an inline model or a catalog entry.

    What is left out has the default of ConvSpec. Raises InputError with every problem found.
    """
    family = str(mapping["family"]).strip().lower()
    values: dict[str, Any] = {"family": family, "image": IMAGES.get(family, 224)}
    problems: list[Problem] = []
    for key, value in mapping.items():
        if key in ("family", "layers") or value is None:
            continue  # the number of blocks follows from the depths
        if key not in _KEYS:
            problems.append(
                Problem(what="unknown key", where=f"{where}.{key}", allowed=", ".join(_KEYS),
                        way_out=nearest(key, _KEYS))
            )  # fmt: skip
            continue
        wrong = _wrong(key, value)
        if wrong:
            problems.append(Problem(what=wrong, where=f"{where}.{key}", value=value))
        values[key] = tuple(cast("list[int]", value)) if key == "depths" and not wrong else value
    problems += _depths(family, values.get("depths", ()), where)
    if problems:
        raise InputError(problems)
    complete: dict[str, Any] = {"name": family, **values, "layers": 0}
    spec = ConvSpec(**complete)
    blocks = build_conv_graph(spec, batch=1).blocks
    return replace(spec, layers=sum(block.repeat for block in blocks[1:-1]))


def _depths(family: str, depths: object, where: str) -> list[Problem]:
    count = len(cast("tuple[int, ...]", depths)) if isinstance(depths, tuple) else 0
    if family not in STAGES:
        return []
    stages = STAGES[family]
    if (stages is None and count) or count == stages:
        return []
    what = f"{family} needs the number of blocks of each stage"
    allowed = "a list of whole numbers" if stages is None else f"{stages} whole numbers"
    return [Problem(what=what, where=f"{where}.depths", allowed=allowed)]


def _wrong(key: str, value: object) -> str:
    """Returns what is wrong with a value, nothing if it is right."""
    if key in _FLAGS:
        return "" if isinstance(value, bool) else "must be true or false"
    if key in _INTEGERS:
        return "" if _whole(value) else "must be a whole number above 0"
    if key in _NUMBERS:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "must be a number"
        low, high = (0.0, 0.99) if key == "dropout" else (0.05, 20.0)
        return "" if low <= value <= high else f"must be from {low:g} to {high:g}"
    if key == "depths":
        listed = cast("list[object]", value) if isinstance(value, list | tuple) else []
        return "" if listed and all(map(_whole, listed)) else "must be whole numbers above 0"
    return "" if isinstance(value, str) and value.strip() else "must be a text"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 100_000
