"""Fits `band` of src/foretrain/catalog/calibration/step.toml from `foretrain validate runs --json`.

    foretrain validate runs ../shared/data/runs/measured_runs.csv.gz --json runs.json
    python studies/accuracy/step_band.py runs.json

The interval of a prediction combines the errors of its operators and collectives with what whole
runs add: software versions, clocks, shared fabrics, data loading. This prints, for a range of that
extra factor, which share of the measured steps lies inside: over all rows, and as a median over
families, so that one large grid does not decide. The factor shipped is the smallest of the range
whose median over families reaches 90 %.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from math import log, sqrt
from pathlib import Path
from statistics import median

FACTORS = (1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4)


def main(path: str) -> None:
    """Prints coverage by factor. The JSON must come from a model with band = 1."""
    rows = json.loads(Path(path).read_text())["rows"]
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        time = row.get("step_time_s") or {}
        if row["status"] == "ok" and time.get("measured"):
            family = row["id"].rsplit("-", 1)[0]
            error = log(time["measured"] / time["value"])
            if abs(error) < log(3.0):  # beyond a factor of 3 the run or its mapping is broken
                errors[family].append((error, log(time["high"] / time["value"])))
    out = sys.stdout.write
    out(f"{sum(map(len, errors.values()))} rows of {len(errors)} families\n")
    out("factor  all rows  median over families\n")
    for factor in FACTORS:
        inside = {
            family: [abs(error) <= sqrt(width**2 + log(factor) ** 2) for error, width in pairs]
            for family, pairs in errors.items()
        }
        every = [hit for hits in inside.values() for hit in hits]
        by_family = median(sum(hits) / len(hits) for hits in inside.values())
        out(f"{factor:6.2f}  {sum(every) / len(every):8.1%}  {by_family:8.1%}\n")


if __name__ == "__main__":
    main(sys.argv[1])
