"""Loading stack files: catalog/stacks/*.toml, or a TOML file of one's own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import msgspec

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, FileFormatError, Problem, nearest
from foretrain.graph.precision import Precision
from foretrain.stack import Stack
from foretrain.strategy.plan import PRESETS
from foretrain.units import COMPUTE_DTYPES

#: The stack that people usually run a preset with.
USUAL_STACK: Mapping[str, str] = {
    "megatron": "megatron-te",
    "fsdp": "fsdp",
    "deepspeed": "deepspeed",
    "ddp": "pytorch-eager",
    "dlrm": "pytorch-dlrm",
    "plain": "pytorch-eager",
}

ROLES = tuple(field.name for field in fields(Precision))


def list_stacks() -> list[str]:
    """Returns the names of all stacks of the catalog, sorted."""
    return list(names("stacks"))


def load_stack(name: str) -> Stack:
    """Returns the stack of the catalog called `name`, or that of a TOML file at this path.

    Raises:
        CatalogError: there is no such stack.
        FileFormatError: the file is not readable, or a field is unknown or of the wrong type.
    """
    word = name.strip().lower().replace("_", "-")
    known = list_stacks()
    if word in known:
        return stack_from_mapping(read_toml("stacks", word), f"catalog/stacks/{word}.toml")
    if word.endswith(".toml"):
        return parse_stack(_read(Path(name)), name)
    raise CatalogError(
        Problem(
            what="unknown stack",
            where="stack",
            value=name,
            allowed=f"{', '.join(known)}, or a .toml file",
            way_out=nearest(word, known),
        )
    )


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise FileFormatError(Problem(what="not a text file in UTF-8", where=str(path))) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"cannot read the stack file: {reason or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None


#: No constant of a stack comes near this; larger ones are typing errors (NaN fails the test too).
LARGEST = 1e30

#: Device generations whose Megatron runs are usually without Transformer Engine, which came with
#: Hopper for its fp8: their published runs use the unfused attention of Megatron-LM.
BEFORE_TE = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere")


def usual_stack(preset: str, *, generation: str, images: bool = False) -> str:
    """Returns the stack that a preset is usually run with on a device generation."""
    name = USUAL_STACK[preset]
    if images and name == "pytorch-eager":
        return "pytorch-vision"
    return "megatron" if name == "megatron-te" and generation in BEFORE_TE else name


def parse_stack(text: str, where: str) -> Stack:
    """Returns the stack of a TOML text; FileFormatError with every problem found."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(Problem(what=f"not valid TOML: {error}", where=where)) from None
    return stack_from_mapping(values, where)


def stack_from_mapping(values: Mapping[str, Any], where: str) -> Stack:
    """Returns the stack of a file's content; FileFormatError with every problem found."""
    known = [field.name for field in fields(Stack)]
    problems = [
        Problem(what="unknown field", where=f"{where}: {key}", way_out=nearest(key, known))
        for key in values
        if key not in known
    ]
    problems += [
        Problem(what="required field is missing", where=f"{where}: {key}")
        for key in ("name", "preset")
        if key not in values
    ]
    problems += [*_not_finite(values, where), *_wrong_precision(values, where)]
    if values.get("preset", "plain") not in PRESETS:
        value, allowed = values["preset"], ", ".join(PRESETS)
        place = f"{where}: preset"
        problems.append(Problem(what="unknown preset", where=place, value=value, allowed=allowed))
    if problems:
        raise FileFormatError(problems)
    try:
        return msgspec.convert(values, Stack)
    except msgspec.ValidationError as error:
        raise FileFormatError(Problem(what=str(error), where=where)) from None


def _not_finite(value: object, where: str) -> list[Problem]:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, object]", value).items()
        return [problem for key, item in items for problem in _not_finite(item, f"{where}: {key}")]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    if 0 <= value < LARGEST:
        return []
    return [Problem(what="must be a finite number >= 0", where=where, value=value)]


def _wrong_precision(values: Mapping[str, Any], where: str) -> list[Problem]:
    tables = values.get("precision", {})
    if not isinstance(tables, Mapping):
        return [Problem(what="must be a table", where=f"{where}: precision", value=tables)]
    problems: list[Problem] = []
    for word, roles in cast("Mapping[str, Any]", tables).items():
        place = f"{where}: precision.{word}"
        if not isinstance(roles, Mapping):
            problems.append(Problem(what="must be a table of roles", where=place, value=roles))
            continue
        for role, dtype in cast("Mapping[str, Any]", roles).items():
            if role not in ROLES:
                allowed = ", ".join(ROLES)
                problems.append(
                    Problem(what="unknown role", where=f"{place}.{role}", allowed=allowed)
                )
            elif dtype not in COMPUTE_DTYPES and not (role == "master" and dtype == "none"):
                allowed = ", ".join(COMPUTE_DTYPES)
                problems.append(
                    Problem(
                        what="unknown dtype",
                        where=f"{place}.{role}",
                        value=dtype,
                        allowed=allowed,
                    )
                )
    return problems
