"""Writes fitted numbers into catalog/calibration/network.toml, for fit_network.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.cost import calibration


class _Inline(str):
    """The text of an inline table."""


def _inline(values: Mapping[str, float]) -> _Inline:
    cells = ", ".join(f"{name} = {value}" for name, value in values.items())
    return _Inline(f"{{ {cells} }}")


def write_constants(table: Mapping[str, Any]) -> None:
    """Puts the fitted numbers of `table` into network.toml; comments and order stay."""
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
        elif where == ("node",) and key == "most_gbs":
            values = {key: _inline(table["node"][entry].get(key, {}))}
        elif where == ("rules",) and key in ("no_p2p_gbs", "pairs_ring"):
            values = table["rules"]
        elif where[:1] == ("fabric",):
            for part in where:
                values = values[part]
        else:
            continue
        if equals and isinstance(values.get(key), int | float | list | _Inline):
            new = list(values[key]) if isinstance(values[key], list) else values[key]
            value, hash_sign, comment = old.partition("#")
            gap = value[len(value.rstrip()) :]
            if value.strip() != str(new):
                lines[i] = f"{key} = {new}{gap}{hash_sign}{comment}"
    path.write_text("\n".join(lines) + "\n")
