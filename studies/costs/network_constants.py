"""Writes fitted numbers into catalog/calibration/network.toml, for fit_network.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.cost import calibration


def write_constants(table: Mapping[str, Any]) -> None:
    """Puts the numbers of `table` into network.toml; comments and order stay."""
    path = Path(calibration.__file__).parents[1] / "catalog" / "calibration" / "network.toml"
    lines, entry, where = path.read_text().splitlines(), -1, ()
    for i, line in enumerate(lines):
        if line.startswith("["):
            entry += line == "[[node]]"
            where = tuple(line.strip("[]").split("."))
            continue
        key, equals, old = line.partition(" = ")
        values: Any = table
        if where[:2] == ("node", "curves"):
            values = table["node"][entry]["curves"][where[2]]
        elif where[:1] == ("fabric",):
            for part in where:
                values = values[part]
        else:
            continue
        if equals and isinstance(values.get(key), int | float | list):
            new = list(values[key]) if isinstance(values[key], list) else values[key]
            lines[i] = line if old.partition("#")[0].strip() == repr(new) else f"{key} = {new}"
    path.write_text("\n".join(lines) + "\n")
