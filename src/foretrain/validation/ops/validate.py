"""`validate ops`: read, price, compare, in one function."""

from __future__ import annotations

from pathlib import Path

from foretrain.validation.ops.classes import Part, is_left_out, shape_key
from foretrain.validation.ops.events import OPS
from foretrain.validation.ops.predict import predict_ops
from foretrain.validation.ops.report import OpResult, results_of
from foretrain.validation.ops.table import MeasuredOp, read_ops


def validate_ops(path: Path, *, part: Part = "all", limit: int | None = None) -> list[OpResult]:
    """Returns predicted against measured for the rows of a table.

    `part` keeps the rows whose shapes took part in the fits of the shipped constants ("fitted"),
    those that were left out, or all.

    Raises:
        FileFormatError: the file cannot be read.
        InputError: Parquet without the packages that read it.
    """
    items = [item for item in read_ops(path) if part == "all" or _part(item) == part][:limit]
    outcomes = predict_ops([item.row for item in items])
    return results_of(outcomes, [item.latency_us for item in items])


def _part(item: MeasuredOp) -> Part:
    op = OPS.get(item.row.op, item.row.op)
    return "left-out" if is_left_out(shape_key(op, item.row.shape)) else "fitted"
