"""A model of one's own as a file: the fields of an inline model, in TOML or YAML.

A TOML file may also be one in the style of the catalog, with one `[[model]]` table. What the
catalog says about a model (aliases, num_parameters, source) may stand in it and is ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from foretrain.errors import FileFormatError, Problem

ENDINGS = (".toml", ".yaml", ".yml")
#: A date of month 13, or a tag (!!int, !!bool) on a text that it does not fit.
_ODD_VALUE = (ValueError, LookupError, AttributeError, TypeError)
ABOUT = ("aliases", "num_parameters", "source")


def read_model_file(path: Path) -> dict[str, Any]:
    """Returns the fields of the model in a file. Raises FileFormatError."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise _refusal("not a text file in UTF-8", path) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise _refusal(f"cannot read the model file: {reason or error}", path) from None
    content = _toml(text, path) if path.suffix.lower() == ".toml" else _yaml(text, path)
    if not isinstance(content, Mapping):
        raise _refusal("must be a mapping of fields such as family", path)
    fields = {str(k): v for k, v in cast("Mapping[Any, Any]", content).items() if k not in ABOUT}
    if "family" not in fields:
        raise _refusal("the field family is missing, e.g. family: dlrm", path)
    return fields


def _toml(text: str, path: Path) -> object:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is one, too
        raise _refusal(f"not valid TOML: {error}", path) from None
    listed = content.get("model")
    if listed is None:
        return content
    models = cast("list[object]", listed) if isinstance(listed, list) else [listed]
    if len(models) != 1:
        raise _refusal(f"has {len(models)} models, and can have one", path)
    return models[0]


def _yaml(text: str, path: Path) -> object:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, *_ODD_VALUE) as error:
        first = str(error).splitlines()[0] if str(error) else "syntax error"
        raise _refusal(f"not valid YAML: {first}", path) from None


def _refusal(what: str, path: Path) -> FileFormatError:
    return FileFormatError(Problem(what=what, where=str(path)))
