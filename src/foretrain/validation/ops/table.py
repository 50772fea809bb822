"""Reading measured operators: one row per kernel or call, CSV or Parquet.

Columns (docs/reference/operator-tables.md): id, device, op, pass, dtype, stack, launch_included,
host_us, latency_us, and the shape columns of the operator. Other columns are ignored.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from foretrain.errors import FileFormatError, InputError, Problem
from foretrain.validation.rows import read_text

#: Columns that are no shape; every other one that holds a number belongs to the shape.
FIXED = ("id", "device", "op", "pass", "dtype", "stack", "launch_included", "host_us",
         "latency_us")  # fmt: skip
NEEDED = ("id", "device", "op", "latency_us")
#: The shape columns of the format; "distribution" is a word or a number.
SHAPE = (
    "b", "m", "n", "k",
    "batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v", "causal", "window",
    "c", "h", "w", "r", "s", "stride", "padding", "groups", "oh", "ow",
    "tokens", "hidden", "ffn", "experts", "topk", "ep", "tp", "gated", "distribution",
    "rows", "cols", "operands", "tables", "dim", "pooling", "params",
)  # fmt: skip
#: No size of an operator is larger; more is a damaged cell, and its work no finite number.
MOST = 1e12
#: An hour: no operator lasts longer.
MOST_US = 3.6e9
PASSES = ("forward", "backward", "full", "backward_input", "backward_weight")
_TRUE = ("true", "yes", "1", "1.0", "y", "t")
_FALSE = ("false", "no", "0", "0.0", "n", "f", "", "nan", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """What was run. `part` is "forward", "backward", "full", "backward_input" or "..._weight".

    `shape` holds what the row states of SHAPE. `unreadable` names columns with bad content.
    `host_us`: what the host took until the launch, where the source tells; None: the stack's.
    """

    id: str
    device: str
    op: str
    part: str
    dtype: str
    stack: str
    launch_included: bool
    shape: Mapping[str, float]
    unreadable: tuple[str, ...] = ()
    host_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """One line of the file: what was run, and its time (None: no number above zero)."""

    row: OpRow
    latency_us: float | None


def read_ops(path: Path) -> list[MeasuredOp]:
    """Returns the lines of a .csv, .csv.gz or .parquet file.

    Raises:
        FileFormatError: the file cannot be read, lacks a needed column, or repeats an id.
        InputError: Parquet without the packages that read it.
    """
    lines = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    items: list[MeasuredOp] = []
    for where, line in lines:
        name = line.get("id", "").strip()
        if not name:
            problems.append(Problem(what="the column 'id' is empty", where=f"{path}, {where}"))
        elif name in seen:
            what = f"the id is given twice ({seen[name]})"
            problems.append(Problem(what=what, where=f"{path}, {where}", value=name))
        else:
            seen[name] = where
            items.append(_item(name, line))
    if problems:
        raise FileFormatError(problems[:20])
    return items


def _csv(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        _check_columns(reader.fieldnames or (), path)
        for line in reader:
            cells = {key: value or "" for key, value in line.items() if isinstance(key, str)}
            yield f"line {reader.line_num}", cells
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise FileFormatError(Problem(what=f"not a CSV file: {error}", where=where)) from None


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        way_out = "pip install 'foretrain[data]', or save the table as CSV"
        problem = Problem(what="reading Parquet needs pyarrow", where=str(path), way_out=way_out)
        raise InputError(problem) from None
    try:
        table: Any = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise FileFormatError(Problem(what=f"cannot read: {error}", where=str(path))) from None
    names = [str(name) for name in table.column_names]
    _check_columns(names, path)
    kept = [name for name in names if name in FIXED or name in SHAPE]
    columns: list[list[object]] = [table.column(name).to_pylist() for name in kept]
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield (
            f"row {number}",
            {
                name: "" if value is None else str(value)
                for name, value in zip(kept, values, strict=True)
            },
        )


def _check_columns(names: Iterable[str], path: Path) -> None:
    missing = [name for name in NEEDED if name not in set(names)]
    if missing:
        raise FileFormatError(
            Problem(
                what=f"no table of operators: no column {', '.join(map(repr, missing))}",
                where=str(path),
                way_out="the first line names the columns, see docs/reference/operator-tables.md",
            )
        )


def _item(name: str, line: Mapping[str, str]) -> MeasuredOp:
    bad: list[str] = []
    shape: dict[str, float] = {}
    for key in SHAPE:
        text = line.get(key, "").strip()
        if not text or text.lower() in ("nan", "none"):
            continue
        value = _distribution(text) if key == "distribution" else _number(text)
        if value is None or not 0 <= value <= MOST:
            bad.append(f"{key} {text!r}")
        else:
            shape[key] = value
    part = line.get("pass", "").strip().lower() or "forward"
    if part not in PASSES:
        bad.append(f"pass {part!r}")
    included = line.get("launch_included", "").strip().lower()
    if included not in (*_TRUE, *_FALSE):
        bad.append(f"launch_included {included!r}")
    host_us, text = None, line.get("host_us", "").strip()
    if text and text.lower() not in ("nan", "none"):
        host_us = _number(text)
        if host_us is None or not 0 <= host_us <= MOST_US:
            bad.append(f"host_us {text!r}")
    text = line.get("latency_us", "").strip()
    latency = _number(text)
    if text and latency is None:
        bad.append(f"latency_us {text!r}")
    row = OpRow(
        id=name,
        device=line.get("device", "").strip(),
        op=line.get("op", "").strip().lower(),
        part=part,
        dtype=line.get("dtype", "").strip().lower(),
        stack=line.get("stack", "").strip(),
        launch_included=included in _TRUE,
        host_us=host_us,
        shape=shape,
        unreadable=tuple(bad),
    )
    return MeasuredOp(row=row, latency_us=latency if latency and 0 < latency <= MOST_US else None)


def _number(text: str) -> float | None:
    if text.lower() in _TRUE[:2]:
        return 1.0
    if text.lower() in _FALSE[:2]:
        return 0.0
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _distribution(text: str) -> float | None:
    """0 for balanced experts, the exponent for "power_law_1.2", 1 for any other skew."""
    word = text.lower()
    if word in ("balanced", "uniform"):
        return 0.0
    if word.startswith("power_law"):
        return _number(word.removeprefix("power_law").strip("_ ") or "1")
    return _number(text)
