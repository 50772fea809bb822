"""How far predictions of one job scatter from plan to plan, against measured runs.

    python studies/fit/plan_scatter.py RUNS.csv.gz --ids            # writes the ids to predict
    foretrain validate runs RUNS.csv.gz --ids ids.txt --json runs.json
    python studies/fit/plan_scatter.py RUNS.csv.gz runs.json

A strategy group holds measured runs that differ in plan only. Within it a wrong constant of the
cost model moves all runs one way, more or less; what is left, the standard deviation of
ln(predicted / measured) around the mean of its group, bounds the model's own error from plan to
plan from above (it holds the noise of the measurements and what different plans do with a wrong
constant). It is the figure to give to `foretrain fit --noise` for real measurements. Up to
`MOST_GROUPS` groups of a family are taken, by a fixed seed.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Hashable
from math import log
from pathlib import Path
from statistics import median, stdev

from foretrain.validation.ranking import plan_of, situation
from foretrain.validation.rows import Row, read_rows

MOST_GROUPS, MIN_PLANS, MOST_PLANS = 4, 3, 8


def main(table: str, results: str) -> None:
    """Prints the scatter by family, or the ids of the rows that are needed."""
    rows = _groups(Path(table))
    if results == "--ids":
        ids = sorted(row.id for group in rows for row in group)
        sys.stdout.write("\n".join(ids) + "\n")
        return
    ratios: dict[str, float] = {}
    for row in json.loads(Path(results).read_text())["rows"]:
        time = row.get("step_time_s") or {}
        if row["status"] == "ok" and time.get("measured"):
            ratios[row["id"]] = log(time["value"] / time["measured"])
    scatter: dict[str, list[float]] = defaultdict(list)
    for group in rows:
        found = [ratios[row.id] for row in group if row.id in ratios]
        if len(found) >= MIN_PLANS:
            scatter[group[0].family].append(stdev(found))
    for family, values in sorted(scatter.items()):
        listed = ", ".join(f"{value:.3f}" for value in values)
        sys.stdout.write(f"{family:24s} {median(values):.3f}  ({listed})\n")
    every = [value for values in scatter.values() for value in values]
    families = median(median(values) for values in scatter.values())
    sys.stdout.write(
        f"median of {len(every)} groups {median(every):.3f}, of families {families:.3f}\n"
    )


def _groups(table: Path) -> list[list[Row]]:
    """Returns up to MOST_GROUPS groups of each family, one row for each of up to MOST_PLANS."""
    groups: dict[Hashable, dict[Hashable, Row]] = defaultdict(dict)
    for run in read_rows(table):
        if run.measured.iter_time_s or run.measured.tokens_per_s or run.measured.samples_per_s:
            groups[situation(run.row)].setdefault(plan_of(run.row), run.row)
    families: dict[str, list[list[Row]]] = defaultdict(list)
    for plans in groups.values():
        if len(plans) >= MIN_PLANS:
            chosen = list(plans.values())
            families[chosen[0].family].append(chosen)
    draw = random.Random(0)
    found: list[list[Row]] = []
    for _, members in sorted(families.items()):
        groups_taken = draw.sample(members, min(MOST_GROUPS, len(members)))
        found += [draw.sample(group, min(MOST_PLANS, len(group))) for group in groups_taken]
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
