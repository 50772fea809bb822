"""Values as TOML, for the calibration files that `foretrain calibrate` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """Returns one line `key = value` for each entry of a table."""
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else " " for c in escaped) + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(toml_lines(cast("Mapping[str, Any]", value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in cast("Sequence[object]", value)) + "]"
    return repr(value)
