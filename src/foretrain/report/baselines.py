"""Lines and JSON of the baselines: what simpler models say of the same run."""

from __future__ import annotations

from typing import Any

from foretrain.analysis.baselines import Baselines
from foretrain.report.tables import table
from foretrain.simulator.result import Result
from foretrain.units import format_seconds


def baseline_lines(found: Baselines, result: Result) -> list[str]:
    """Returns one line per baseline: its step time and how far it is from the prediction."""
    step = result.step_time_s.value
    rows = [("foretrain", format_seconds(step), "")]
    for name, seconds in (
        ("without overlap slowdown and link sharing", found.plain_s),
        ("task graph with nominal links", found.task_graph_s),
        ("analytical formula", found.analytical_s),
    ):
        if seconds is None:
            rows.append((name, "-", f"cannot express {found.task_graph_reason}"))
        else:
            rows.append((name, format_seconds(seconds), f"{100 * (seconds / step - 1):+.1f} %"))
    return ["What simpler models say", *table(rows, left=(0, 2))]


def baseline_json(found: Baselines) -> dict[str, Any]:
    """Returns the baselines as JSON values, seconds; null where a model cannot express the run."""
    return {
        "plain_s": found.plain_s,
        "task_graph_s": found.task_graph_s,
        "task_graph_cannot_express": found.task_graph_reason or None,
        "analytical_s": found.analytical_s,
    }
