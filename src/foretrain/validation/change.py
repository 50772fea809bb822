"""What a change of the code did to predictions: the same rows before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, cast

from foretrain.errors import FileFormatError, Problem
from foretrain.validation.report import Report, percent, signed

#: A prediction that moves by less is called unchanged: a baseline has six digits.
SAME = 1e-5
#: Rows that moved most are named.
NAMED = 10


def read_baseline(path: Path) -> dict[str, float]:
    """Returns id -> predicted seconds of an earlier `--json` file (or a reduced one).

    Raises:
        FileFormatError: the file is no such JSON.
    """
    try:
        form = json.loads(path.read_text("utf-8"))
        if "predicted_s" in form:
            return {str(name): float(value) for name, value in form["predicted_s"].items()}
        rows = cast("list[Mapping[str, Any]]", form["rows"])
        return {
            str(row["id"]): float(row["step_time_s"]["value"])
            for row in rows
            if row["step_time_s"]["value"] is not None
        }
    except OSError as error:
        what = f"cannot read: {error.strerror or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        what = "not the JSON of `validate runs`"
        raise FileFormatError(Problem(what=what, where=str(path))) from None


def reduced(report: Report) -> dict[str, Any]:
    """Returns the part of the JSON form that a baseline needs, rounded to six digits."""
    return {
        "schema": 1,
        "predicted_s": {
            item.row.id: float(f"{prediction.step_s:.6g}")
            for item in report.items
            if (prediction := item.outcome.prediction) is not None
        },
    }


def describe_change(report: Report, before: Mapping[str, float]) -> str:
    """Returns how many predictions moved, the errors before and after, and the largest moves."""
    moves: list[tuple[float, str]] = []
    errors_before: list[float] = []
    errors_after: list[float] = []
    for item in report.items:
        old, prediction = before.get(item.row.id), item.outcome.prediction
        if old is None or prediction is None:
            continue
        move = prediction.step_s / old - 1
        if abs(move) > SAME:
            moves.append((move, item.row.id))
        if item.measured_s is not None and item.counted:
            errors_before.append(abs(old / item.measured_s - 1))
            errors_after.append(abs(prediction.step_s / item.measured_s - 1))
    now = {item.row.id for item in report.items if item.outcome.prediction is not None}
    lines = [
        f"Against the baseline of {len(before):,} rows: {len(moves):,} predictions moved, "
        f"{len(now - before.keys()):,} are new, {len(before.keys() - now):,} are gone."
    ]
    if errors_before:
        lines.append(
            f"Median error before {percent(median(errors_before))}, "
            f"after {percent(median(errors_after))} ({len(errors_before):,} rows)."
        )
    moves.sort(key=lambda pair: (-abs(pair[0]), pair[1]))
    lines += [f"  {signed(move):>8s}  {name}" for move, name in moves[:NAMED]]
    return "\n".join(lines)
