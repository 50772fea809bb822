"""The operators of a user's calibration file (TOML): constants fitted to their measurements.

`foretrain calibrate ops` writes them, `--calibration FILE` reads them. [[operators.KIND]] holds
entries of the form of catalog/calibration, for one device each; other tables of the file belong to
other parts and are left alone here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from foretrain.cost.calibration import MARKS, Entries, load
from foretrain.cost.residual import has_residual
from foretrain.cost.toml_text import toml_lines
from foretrain.errors import FileFormatError, Problem
from foretrain.units import COMPUTE_DTYPES, DTYPE_BYTES

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
#: Shares of a peak: without a floor a time is infinite.
SHARES, LEAST_SHARE, MOST_SHARE = ("e", "e_b", "e_c", "e_d", "op", "multi_tensor"), 1e-4, 1.5
#: In the tables of attention by case, whose windows skip some of the work that is counted.
MOST_CASE_SHARE = 2.0
#: What a time is divided by besides shares; no constant of any kind is larger than MOST.
DIVISORS = (
    "l2_ratio", "l2_share", "clock_ms", "sigma_us", "tile", "rho", "piece", "weight_piece",
    "non_fused",
)  # fmt: skip
MOST = 1e12
#: Constants that some entries of a kind have: tiles by name, numbers.
TILES = ("tiles", "input_tiles", "weight_tiles")
OPTIONAL = ("piece", "weight_piece", "most_taps", "call_us", "slower_us", "narrow", "weight_limit")
#: What convolutions have beside the constants of a GEMM.
OF_PRODUCT = ("fused", "non_fused", "transform", "stride_power", "weight_limit", "input", "weight")
#: No interval is a factor wider than that.
MOST_BAND = 100.0
#: A name or pattern: every bracket is closed around something.
_NAME = re.compile(r"(?:[^\[\]]|\[[^\[\]]+\])+")
#: Tables that entries of attention hold.
_CASE = re.compile(r"dim|(causal|full|window)(_fp8)?(_backward)?")


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
    if values.get("calibrated", True) is not True:
        return "'calibrated' can only be true"
    if "residual" in values and not (values.get("calibrated") and has_residual(values["residual"])):
        return f"'residual' is {values['residual']!r}, which names no shipped one: leave it out"
    reason = _odd_names(values) or next(_odd_numbers(values), "")
    if reason:
        return reason
    shipped = _like(kind, values)
    if not shipped:
        return "no shipped entry has this form"
    common = {key: value for key, value in shipped[0].items() if all(key in s for s in shipped)}
    reason = _missing(values, common) or _odd_words(values, shipped)
    return reason or (_odd_sizes(values) if kind == "attention" else "")


def _odd_names(values: Mapping[str, object]) -> str:
    """Returns which list of names, or which word, no entry can have."""
    for key in ("devices", "dtypes", "kernels"):
        listed = values.get(key, ["*"])
        names = cast("list[object]", listed) if isinstance(listed, list) else []
        if not names or not all(isinstance(name, str) for name in names):
            return f"{key!r} must list names"
        odd = [name for name in names if not _NAME.fullmatch(str(name))]
        if key == "dtypes" and key in values:
            odd = [name for name in names if name not in DTYPE_BYTES]
        if odd:
            allowed = f", allowed: {', '.join(DTYPE_BYTES)}" if key == "dtypes" else ""
            return f"{key!r} lists {odd[0]!r}, which names nothing{allowed}"
    for key, words in (("mark", MARKS), ("units", COMPUTE_DTYPES)):
        if key in values and values[key] not in words:
            return f"{key!r} is {values[key]!r}, and must be one of {', '.join(words)}"
    return ""


def _odd_numbers(values: Mapping[str, object]) -> Iterator[str]:
    """Yields which number of an entry lies outside its range, and what in a table is no number."""
    for path, role, value in _leaves(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            if len(path) > 1 and not _is_other(path[-1], value):
                yield f"{'.'.join(path)!r} is no number"
            continue
        name = path[-1] if len(path) == 1 else ".".join(path)
        try:
            number = float(value)
        except OverflowError:  # TOML has whole numbers of any length
            number = math.inf
        if not math.isfinite(number):
            yield f"{name!r} is not finite"
        low = LEAST_SHARE if role in SHARES or role in DIVISORS else 0.0
        share = MOST_SHARE if len(path) <= 2 else MOST_CASE_SHARE
        high = share if role in SHARES else MOST
        if not low <= number <= high:
            yield f"{name!r} is {number:g}, and must lie between {low:g} and {high:g}"


def _is_other(key: str, value: object) -> bool:
    """Whether a key of a nested table rightly holds no number: a switch, a range of head counts."""
    if key == "heads" and isinstance(value, list):
        ends = cast("list[object]", value)
        return len(ends) == 2 and all(isinstance(x, int | float) and 0 < x < MOST for x in ends)
    return key == "skips" and isinstance(value, bool)


def _leaves(
    values: Mapping[str, object], path: tuple[str, ...] = (), role: str = ""
) -> Iterator[tuple[tuple[str, ...], str, object]]:
    """Yields path, role and value: what a table of shares (`e`, `op`) holds is a share."""
    for key, value in values.items():
        here = role or key
        if isinstance(value, dict):
            inner = here if here in SHARES else ""
            yield from _leaves(cast("dict[str, object]", value), (*path, key), inner)
        else:
            yield (*path, key), here, value


def _odd_sizes(values: Mapping[str, object], path: str = "") -> str:
    """Returns which table of attention lacks its shares `e` by head size, or misnames a size."""
    shares = values.get("e")
    if not isinstance(shares, dict) or not shares:
        return f"'{path}e' is missing: shares of the peak by size of a head"
    for size, share in cast("dict[str, object]", shares).items():
        if not _number(share):
            return f"'{path}e.{size}' is no number"
        if not (size.isascii() and size.isdecimal() and int(size) > 0):
            return f"'{path}e' names {size!r}, which is no size of a head"
    for key, value in values.items():
        if not isinstance(value, dict) and _CASE.fullmatch(key):
            return f"'{path}{key}' is no table"
        if not isinstance(value, dict) or key == "e":
            continue
        table = cast("dict[str, object]", value)
        inner = table if key == "dim" else {key: table}
        for name, part in inner.items():
            within = f"{path}{key}.{name}." if key == "dim" else f"{path}{key}."
            if not isinstance(part, dict):
                return f"'{within[:-1]}' is no table"
            given = cast("dict[str, object]", part)
            lacks = [word for word in ("e_b", "t0_us", "g") if word not in given]
            if lacks and key != "dim":  # a size of head takes the others from what holds it
                return f"'{within}{lacks[0]}' is missing"
            reason = _odd_sizes(given, within)
            if reason:
                return reason
    return ""


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
    for key in TILES:
        tiles = [entry.get(key) for entry in (*shipped, *load("gemm_fitted")["entry"])]
        if values.get(key) not in tiles:
            return f"{key!r} is none of {', '.join(sorted({str(word) for word in tiles if word}))}"
    numbers = {key for entry in shipped for key in entry if _number(entry[key])}
    for key in sorted(numbers.union(OPTIONAL) - {"band"}):
        if key in values and not _number(values[key]):
            return f"{key!r} is no number"
    return ""


def _same_form(value: object, other: object) -> bool:
    """Whether both are a number, or lists of as many numbers."""
    if isinstance(other, list):
        items = cast("list[object]", value) if isinstance(value, list) else []
        return all(map(_factor, items)) and len(items) == len(cast("list[object]", other))
    return _factor(value)


def _factor(value: object) -> bool:
    """Whether it is a factor that an interval may have."""
    return _number(value) and 1.0 <= cast("float", value) <= MOST_BAND


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(kind: str, values: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """Returns the shipped entries of the same form (attention kernel, tile or roofline GEMM)."""
    every = [e for table in (TABLES[kind], *_BESIDE.get(kind, ())) for e in load(table)["entry"]]
    if kind == "conv2d" and "narrow" not in values:
        every = _of_product()
    return [
        entry
        for entry in every
        if all(entry.get(key) == values.get(key) for key in ("kernel", "form"))
    ]


def _of_product() -> list[Mapping[str, Any]]:
    """Returns what convolutions of devices without measured ones start from: entries of GEMM.

    They have no narrow kernels, and hold what convolution.toml adds.
    """
    added = {**dict.fromkeys(OF_PRODUCT, 1.0), "kind": "tensor", "band": 1.0}
    every = [entry for table in ("gemm_fitted", "gemm") for entry in load(table)["entry"]]
    return [{key: e[key] for key in e if key != "dtypes"} | added for e in every]


#: Kind of operator -> tables that a cost model reads behind that of `TABLES`.
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("gemm",),
    "moe_gemm": ("moe",),
    "attention": ("attention_published", "attention"),
}


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
