"""The result of `validate runs`: as JSON (schema 1) and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foretrain.validation.compare import Comparison
from foretrain.validation.memory_report import margin_gib, summary_lines, verdicts
from foretrain.validation.models import model_of
from foretrain.validation.statistics import GROUPINGS, Grouping, Stats, grouped, statistics_of
from foretrain.validation.subsets import LOW_MFU

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All rows with their statistics. `stated` are the rows predicted without an assumption."""

    items: tuple[Comparison, ...]
    overall: Stats
    stated: Stats
    groups: Mapping[str, Mapping[str, Stats]]


def build_report(items: Sequence[Comparison]) -> Report:
    """Returns the statistics of all rows, of each group, and of rows without assumptions."""
    stated = [item for item in items if not item.outcome.assumed]
    return Report(
        items=tuple(items),
        overall=statistics_of(items),
        stated=statistics_of(stated),
        groups={
            name: {
                key: statistics_of(rows, counted_only=key != LOW_MFU)
                for key, rows in grouped(items, by).items()
            }
            for name, by in GROUPINGS.items()
        },
    )


def reasons(items: Sequence[Comparison]) -> list[tuple[str, int]]:
    """Returns why rows are not predicted and how many, the most frequent first.

    Numbers and names in a reason are left out, so that equal causes count together.
    """
    counts = Counter(
        short_reason(item.outcome.reason or "")
        for item in items
        if item.outcome.status == "unsupported"
    )
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def short_reason(reason: str) -> str:
    """Returns a reason without values and hints, e.g. 'plan.pp: N stages do not divide ...'."""
    first = reason.split("; ")[0].split(" (got ")[0]
    return re.sub(r"(?<![A-Za-z])\d+(\.\d+)?", "N", first)


def to_json(report: Report) -> dict[str, Any]:
    """Returns the JSON form, docs/reference/json.md."""
    return {
        "schema": SCHEMA,
        "overall": asdict(report.overall),
        "without_assumptions": asdict(report.stated),
        "out_of_memory": {key: asdict(stats) for key, stats in verdicts(report.items).items()},
        "groups": {
            name: {key: asdict(stats) for key, stats in groups.items()}
            for name, groups in report.groups.items()
        },
        "rows": [_row_json(item) for item in report.items],
    }


def _row_json(item: Comparison) -> dict[str, Any]:
    outcome = item.outcome
    prediction = outcome.prediction
    return {
        "id": item.row.id,
        "status": outcome.status,
        "reason": outcome.reason,
        "assumed": list(outcome.assumed),
        "counted": item.counted,
        "step_time_s": {
            "measured": item.measured_s,
            "value": prediction.step_s if prediction else None,
            "low": prediction.low_s if prediction else None,
            "high": prediction.high_s if prediction else None,
            "error": _error(item.time_ratio),
        },
        "peak_gib": {
            "measured": item.measured_gib,
            "value": item.predicted_gib,
            "error": _error(item.memory_ratio),
            "quantity": item.memory_quantity,
        },
        "fits": {
            "measured": item.fits_measured,
            "value": prediction.fits if prediction else None,
            "margin_gib": margin_gib(item) if prediction else None,
        },
    }


def _error(ratio: float | None) -> float | None:
    return None if ratio is None else abs(ratio - 1)


#: What `validate runs --by` may list one line for each of; the others are in every report.
BY: Mapping[str, Grouping] = {**GROUPINGS, "model": model_of}


def render_by(report: Report, name: str) -> str:
    """Returns one line for each family, device, scale, class, subset or model with a prediction."""
    stats = {
        key: statistics_of(rows, counted_only=key != LOW_MFU)
        for key, rows in grouped(report.items, BY[name]).items()
    }
    shown = {key: group for key, group in stats.items() if group.predicted}
    return "\n".join([_headline(report), "", *_table(name.replace("_", " ").capitalize(), shown)])


def render(report: Report) -> str:
    """Returns the text for a terminal: overall, families, scale, device, what is unsupported."""
    lines = [_headline(report), ""]
    names = {"family": "Family", "gpu": "Device", "scale": "Devices"}
    rows = {"all": report.overall, "without assumptions": report.stated}
    lines += _table("Rows", {**rows, **report.groups["subset"]})
    for key, title in names.items():
        lines += ["", *_table(title, report.groups[key])]
    if len(report.groups["model_class"]) > 1:
        lines += ["", *_table("Class", report.groups["model_class"])]
    memory = summary_lines(report.items)
    if memory:
        lines += ["", *memory]
    listed = reasons(report.items)
    if listed:
        lines += ["", "Not predicted:"]
        lines += [f"  {count:6,d}  {reason}" for reason, count in listed]
    errors = [item for item in report.items if item.outcome.status == "error"]
    if errors:
        lines += ["", "Faults of foretrain:"]
        lines += [f"  {item.row.id}: {item.outcome.reason}" for item in errors]
    return "\n".join(lines)


def _headline(report: Report) -> str:
    stats = report.overall
    counts = Counter(item.outcome.status for item in report.items)
    text = f"{stats.rows:,} rows: {counts['ok']:,} predicted, {counts['unsupported']:,} unsupported"
    text += f", {counts['error']:,} errors"
    if stats.time.n:
        text += f". Step time of {stats.time.n:,} rows: median error {percent(stats.time.median)}"
        text += f", by configuration {percent(stats.time.group_median)}"
        text += f", bias {signed(stats.time.bias)}"
    return text + "."


def _table(title: str, groups: Mapping[str, Stats]) -> list[str]:
    width = max(len(title), *(len(name) for name in groups)) if groups else len(title)
    columns = ("rows", "pred.", "timed", "median", "group", "bias", "p90", "in band")
    lines = [f"{title:{width}s}" + "".join(f"{column:>9s}" for column in columns) + "  memory  oom"]
    for name, stats in groups.items():
        time, oom = stats.time, stats.oom
        cells = (
            f"{stats.rows:,}",
            f"{stats.predicted:,}",
            f"{time.n:,}",
            percent(time.median),
            percent(time.group_median),
            signed(time.bias),
            percent(time.p90),
            percent(time.in_band),
        )
        tail = f"  {percent(stats.memory.median):>6s}  {oom.tp}/{oom.fp}/{oom.fn}/{oom.tn}"
        lines.append(f"{name:{width}s}" + "".join(f"{cell:>9s}" for cell in cells) + tail)
    return lines


def percent(value: float | None) -> str:
    """Returns a share as a percentage, '-' for None."""
    return "-" if value is None else f"{value:.1%}"


def signed(value: float | None) -> str:
    """Returns a share as a percentage with its sign, '-' for None."""
    return "-" if value is None else f"{value:+.1%}"
