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
from foretrain.cost.residual import has_residual
from foretrain.cost.toml_text import toml_lines
from foretrain.errors import FileFormatError, Problem

SCHEMA = 1
#: Kind of operator in the file -> table of the catalog whose entries it goes before.
TABLES: Mapping[str, str] = {
    "gemm": "gemm_fitted",
    "moe_gemm": "moe_fitted",
    "attention": "attention_fitted",
    "conv2d": "convolution_fitted",
    "memory": "memory",
}
_WAY_OUT = "write it again with `foretrain calibrate ops`"
#: Shares of a peak: without a floor a time is infinite. MOST: no constant of any kind is larger.
SHARES, LEAST_SHARE, MOST = ("e", "e_b", "e_c", "e_d", "op"), 1e-4, 1e12


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
    except (ValueError, RecursionError) as error:
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

    It must name devices and dtypes as its kind does, and hold every constant that all shipped
    entries of its form hold, under the same name as a number. What only some of them hold is
    optional.
    """
    if not isinstance(entry, dict):
        return "the entry is no table"
    values = cast("dict[str, object]", entry)
    devices = values.get("devices")
    if not isinstance(devices, list) or not devices:
        return "'devices' lists no device"
    for key in ("devices", "dtypes", "kernels"):
        listed = values.get(key, [])
        if not isinstance(listed, list) or not all(
            isinstance(item, str) for item in cast("list[object]", listed)
        ):
            return f"{key!r} must list names"
    for key, value in _numbers(values):
        if not math.isfinite(value):
            return f"{key!r} is not finite"
        low = LEAST_SHARE if key in SHARES else 0.0
        if not low <= value <= MOST:
            return f"{key!r} is {value:g}, and must lie between {low:g} and {MOST:g}"
    if values.get("calibrated", True) is not True:
        return "'calibrated' can only be true"
    if "residual" in values and not (values.get("calibrated") and has_residual(values["residual"])):
        return f"'residual' is {values['residual']!r}, which names no shipped one: leave it out"
    shipped = _like(kind, values)
    if not shipped:
        return "no shipped entry has this form"
    common = {key: value for key, value in shipped[0].items() if all(key in s for s in shipped)}
    return _missing(values, common) or _odd_words(values, shipped)


def _missing(values: Mapping[str, object], common: Mapping[str, Any]) -> str:
    """Returns which of the constants of all shipped entries is absent or of another type."""
    for key, value in common.items():
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


def _odd_words(values: Mapping[str, object], shipped: Sequence[Mapping[str, Any]]) -> str:
    """Returns which word or interval has a form that no shipped entry has."""
    band, known = values.get("band"), [entry["band"] for entry in shipped if "band" in entry]
    if band is not None and known and not any(_same_form(band, other) for other in known):
        return "'band' is malformed"
    tiles = {entry.get("tiles") for entry in (*shipped, *load("gemm_fitted")["entry"])}
    if values.get("tiles") not in tiles:
        return f"'tiles' is none of {', '.join(sorted(str(word) for word in tiles))}"
    return ""


def _same_form(value: object, other: object) -> bool:
    """Whether both are a number, or lists of as many numbers."""
    if isinstance(other, list):
        items = cast("list[object]", value) if isinstance(value, list) else []
        numbers = all(isinstance(x, int | float) and math.isfinite(x) and x >= 1.0 for x in items)
        return numbers and len(items) == len(cast("list[object]", other))
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1.0


def _like(kind: str, values: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """Returns the shipped entries of the same form (attention kernel, tile or roofline GEMM)."""
    beside = load(_BESIDE[kind])["entry"] if kind in _BESIDE else ()
    every = (*load(TABLES[kind])["entry"], *beside)
    return [
        entry
        for entry in every
        if all(entry.get(key) == values.get(key) for key in ("kernel", "form"))
    ]


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
            lines += toml_lines(entry)
    return "\n".join(lines) + "\n"
