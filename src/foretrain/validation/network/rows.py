"""Reading measured collectives: a table (CSV or parquet) becomes rows of one form.

What a table is, its columns say: `adapters.ADAPTERS` lists the layouts that are understood.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from foretrain.errors import FileFormatError, Problem
from foretrain.validation.rows import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRow:
    """One measured collective; `bytes` as nccl-tests prints it.

    `gpus` ranks spread evenly over the nodes of `cluster` (the cluster grammar), or are `ranks`
    where a table names them. `source` tells
    systems of equal hardware apart. `time_us` is the measurement and reaches no prediction.
    `reason` says why a row cannot be predicted, empty when it can.
    """

    id: str
    cluster: str = ""
    gpus: int = 0
    ranks: tuple[int, ...] = ()
    collective: str = ""
    bytes: float = 0.0
    dtype: str = ""
    time_us: float | None = None
    stack: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()
    reason: str = ""


def read_table(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yields line number and columns of a .csv, .csv.gz or .parquet file, all values as text.

    Raises:
        FileFormatError: the file is not readable, or is no table.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        if not reader.fieldnames:
            raise FileFormatError(Problem(what="the file is empty", where=str(path)))
        for line in reader:
            yield reader.line_num, {str(k): (v or "").strip() for k, v in line.items() if k}
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise FileFormatError(Problem(what=f"not a CSV file: {error}", where=where)) from None


def _parquet(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        from pyarrow import parquet  # pyright: ignore
    except ImportError:
        raise FileFormatError(
            Problem(
                what="reading parquet needs pyarrow",
                where=str(path),
                way_out="pip install 'foretrain[data]', or convert the table to CSV",
            )
        ) from None
    try:
        table = cast("Any", parquet).read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise FileFormatError(Problem(what=f"cannot read: {error}", where=str(path))) from None
    names: list[str] = list(table.column_names)
    columns: list[list[Any]] = [table.column(name).to_pylist() for name in names]
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield number, {k: "" if v is None else str(v) for k, v in zip(names, values, strict=True)}
