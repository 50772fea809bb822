"""Latency of rings over RoCE on A100 nodes: tau_ring_us of [fabric.roce.generation.ampere].

    python studies/costs/owner_broadcasts.py measured_runs.csv.gz

Published tables of gathers over RoCE end at two nodes. InternEvo's table of training performance
has steps of one job on 64 to 1,024 A100 whose optimizer states lie with all data-parallel ranks or
with those of one node. Each weight has one owner, which broadcasts it (`owner_broadcasts`): over
all ranks in the one case, inside the node in the other. All else is equal, so that the difference
of the two steps is that of the broadcasts. Printed: the tau_ring at which the predicted difference
is the measured one, for every pair, the medians, and what InfiniBand has. The constant is the
median of tp 1; tp 2 is not in the fit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from foretrain.cost import calibration
from foretrain.cost.network import collectives
from foretrain.validation.compare import measured_step
from foretrain.validation.mapping import map_row
from foretrain.validation.outcomes import Prediction
from foretrain.validation.predict_rows import predict_mapped
from foretrain.validation.rows import MeasuredRun, read_rows

LOW, HIGH, STEPS = 0.5, 40.0, 12


def with_tau(tau_us: float) -> None:
    """Makes predictions use a ring latency over RoCE."""

    def load(name: str) -> Mapping[str, Any]:
        known = calibration.load(name)
        if name != "network":
            return known
        roce = known["fabric"]["roce"]
        ampere = {**roce.get("generation", {}).get("ampere", {}), "tau_ring_us": tau_us}
        changed = {**roce, "generation": {**roce.get("generation", {}), "ampere": ampere}}
        return {**known, "fabric": {**known["fabric"], "roce": changed}}

    collectives.load = load  # pyright: ignore[reportPrivateImportUsage]


def predicted(run: MeasuredRun) -> float:
    """Returns the predicted step."""
    answer = predict_mapped(map_row(run.row))
    if not isinstance(answer, Prediction):
        raise SystemExit(f"{run.row.id}: {answer}")
    return answer.step_s


def tau_of(wide: MeasuredRun, near: MeasuredRun) -> float:
    """Returns the tau_ring (us) that makes the predicted difference the measured one."""
    steps = [measured_step(run.row, run.measured) for run in (wide, near)]
    if steps[0] is None or steps[1] is None:
        raise SystemExit(f"{wide.row.id}, {near.row.id}: no step time")
    low, high = LOW, HIGH
    for _ in range(STEPS):
        middle = (low + high) / 2.0
        with_tau(middle)
        short = predicted(wide) - predicted(near) < steps[0] - steps[1]
        low, high = (middle, high) if short else (low, middle)
    return (low + high) / 2.0


def main(path: str) -> None:
    """Prints the constant of each pair and the medians."""
    groups: dict[tuple[int, int], dict[bool, MeasuredRun]] = defaultdict(dict)
    for run in read_rows(Path(path)):
        row = run.row
        if row.family != "internevo" or "pack_sample_into_one=False" not in row.notes:
            continue
        if row.tp and row.n_gpus and row.n_gpus > 8 and row.recompute == "none":
            groups[row.tp, row.n_gpus]["all" in row.zero_stage] = run
    found: dict[int, list[float]] = defaultdict(list)
    for (tp, devices), pair in sorted(groups.items()):
        if len(pair) == 2:
            found[tp].append(tau_of(pair[True], pair[False]))
            print(f"tp {tp}, {devices} devices: {found[tp][-1]:.1f} us")
    for tp, values in found.items():
        print(f"tp {tp}: median {median(values):.1f} us")
    print(f"InfiniBand: {calibration.load('network')['fabric']['ib']['tau_ring_us']} us")


if __name__ == "__main__":
    main(*sys.argv[1:])
