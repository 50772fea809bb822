"""`validate runs`: read, predict, compare, in one function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrain.errors import InputError, Problem
from foretrain.validation.compare import compare
from foretrain.validation.predict_rows import Progress, predict_rows
from foretrain.validation.report import Report, build_report
from foretrain.validation.rows import MeasuredRun, read_rows


def validate_runs(
    path: Path,
    *,
    families: Sequence[str] = (),
    limit: int | None = None,
    ids: Sequence[str] = (),
    workers: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Returns predicted against measured for the rows of a file (.csv or .csv.gz).

    Args:
        path: a table with the columns of docs/reference/json.md.
        families: only these; empty means all.
        ids: only these; empty means all.
        limit: only the first rows of what is left.
        workers: processes.
        progress: is told the distinct runs done, and of how many.

    Raises:
        FileFormatError: the file cannot be read.
        InputError: no row is left of the families and ids asked for.
    """
    runs = chosen(read_rows(path), families=families, ids=ids, limit=limit)
    if not runs and (families or ids):
        asked = ", ".join([*families, *ids][:5])
        raise InputError(Problem(what="no rows of these families and ids", value=asked))
    outcomes = predict_rows([run.row for run in runs], workers=workers, progress=progress)
    return build_report(compare(outcomes, [run.measured for run in runs]))


def chosen(
    runs: Sequence[MeasuredRun], *, families: Sequence[str], ids: Sequence[str], limit: int | None
) -> list[MeasuredRun]:
    """Returns the rows of these families and ids, the first `limit` of them."""
    wanted = set(ids)
    kept = [
        run
        for run in runs
        if (not families or run.row.family in families) and (not wanted or run.row.id in wanted)
    ]
    return kept[:limit]
