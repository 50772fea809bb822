"""The operators of a user's calibration file (TOML): constants fitted to their measurements.

`foretrain calibrate ops` writes them, `--calibration FILE` reads them. [[operators.KIND]] holds
entries of the form of catalog/calibration, for one device each; other tables of the file belong to
other parts and are left alone here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from foretrain.cost.calibration import Entries, load
from foretrain.errors import FileFormatError, Problem

SCHEMA = 1
#: Kind of operator in the file -> table of the catalog whose entries it goes before.
TABLES: Mapping[str, str] = {
    "gemm": "gemm_fitted",
    "moe_gemm": "moe_fitted",
    "attention": "attention_fitted",
    "memory": "memory",
}
_WAY_OUT = "write it again with `foretrain calibrate ops`"


def read_operators(path: Path) -> Entries:
    """Returns the entries of a calibration file by table of the catalog.

    Raises:
        FileFormatError: not readable, not TOML, an unknown kind, or an entry that lacks a constant
            or holds one that is no finite number.
    """
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        what = f"cannot read: {error.strerror or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    except ValueError as error:
        raise FileFormatError(Problem(what=f"not TOML: {error}", where=str(path))) from None
    kinds: object = data.get("operators", {})
    problems: list[Problem] = []
    found: dict[str, list[Mapping[str, Any]]] = {}
    if not isinstance(kinds, dict):
        problems.append(Problem(what="'operators' is no table", where=str(path), way_out=_WAY_OUT))
        kinds = {}
    for kind, entries in cast("dict[str, object]", kinds).items():
        where = f"{path}, [[operators.{kind}]]"
        if kind not in TABLES:
            allowed = ", ".join(TABLES)
            problems.append(Problem(what="unknown kind", where=where, value=kind, allowed=allowed))
        elif not isinstance(entries, list):
            problems.append(Problem(what="no list of entries", where=where, way_out=_WAY_OUT))
        else:
            for number, entry in enumerate(cast("list[object]", entries), start=1):
                reason = _fault(kind, entry)
                if reason:
                    place = f"{where} number {number}"
                    problems.append(Problem(what=reason, where=place, way_out=_WAY_OUT))
                else:
                    found.setdefault(TABLES[kind], []).append(cast("Mapping[str, Any]", entry))
    if problems:
        raise FileFormatError(problems)
    return found


def _fault(kind: str, entry: object) -> str:
    """Returns what is wrong with an entry, or an empty text.

    It must name devices and dtypes as its kind does, and hold every constant that some shipped
    entry of its form holds under the same name as a number.
    """
    if not isinstance(entry, dict):
        return "the entry is no table"
    values = cast("dict[str, object]", entry)
    devices = values.get("devices")
    if not isinstance(devices, list) or not devices:
        return "'devices' lists no device"
    for key, value in _numbers(values):
        if not math.isfinite(value):
            return f"{key!r} is not finite"
    shipped = _like(kind, values)
    if shipped is None:
        return "no shipped entry has this form"
    for key, value in shipped.items():
        if key in ("generations", "forms", "kernels", "band", "names"):
            continue
        given = values.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if given is None:
            return f"{key!r} is missing"
        if number and (isinstance(given, bool) or not isinstance(given, int | float)):
            return f"{key!r} is no number"
        if not number and type(given) is not type(value):
            return f"{key!r} is malformed"
    return ""


def _like(kind: str, values: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Returns a shipped entry of the same form (attention kernel, tile or roofline GEMM)."""
    for entry in (*load(TABLES[kind])["entry"], *load(_BESIDE.get(kind, TABLES[kind]))["entry"]):
        same = ("kernel", "form")
        if all(entry.get(key) == values.get(key) for key in same):
            return entry
    return None


_BESIDE = {"gemm": "gemm", "moe_gemm": "moe", "attention": "attention"}


def _numbers(values: Mapping[str, object]) -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            numbers += _numbers(cast("dict[str, object]", value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append((key, float(value)))
    return numbers


def operators_text(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns the content of a calibration file with these entries, by kind of operator."""
    lines = [
        "# Calibration of foretrain, read by --calibration. Keys: see its catalog/calibration.",
        f"schema = {SCHEMA}",
    ]
    for kind, items in entries.items():
        for entry in items:
            lines += ["", f"[[operators.{kind}]]"]
            lines += [f"{_key(key)} = {_value(value)}" for key, value in entry.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else " " for c in escaped) + '"'
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in cast("Sequence[object]", value)) + "]"
    return repr(value)
