"""Fits straggler_sigma of step.toml from measured weak scaling.

Usage: python studies/costs/straggler.py RUNS.csv.gz [FAMILY...]

Groups of rows that differ in the number of devices (and of data-parallel copies) only do the same
work per device. Their step time grows with communication, which the model predicts, and with the
slowest device. sigma is what remains: the weighted median over groups of
log(measured growth / growth predicted with sigma 0) over the growth of the expected maximum.
Printed per family and over all, and with each family left out; FP8 apart, where
ranks may also wait for each other's scales.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from math import log
from pathlib import Path
from statistics import median

from foretrain.cost import straggler
from foretrain.validation.compare import measured_step
from foretrain.validation.mapping import map_row
from foretrain.validation.mapping.words import Unsupported
from foretrain.validation.outcomes import Prediction
from foretrain.validation.predict_rows import predict_mapped
from foretrain.validation.rows import MeasuredRun, read_rows

FAMILIES = ("nvidia_dgxc", "internevo", "llm_foundry_mpt", "megatron_papers")
SMALLEST, MIN_GROWTH = 16, 3.0


def main(path: Path, families: tuple[str, ...]) -> None:
    """Prints sigma per family and over all."""
    straggler.load = lambda _: {"straggler_sigma": 0.0}  # predictions without stragglers
    found: dict[str, list[float]] = defaultdict(list)
    for rows in _weak_groups(path, families):
        first, last = rows[0], rows[-1]
        ends = [_predict(first), _predict(last)]
        if None in ends:
            continue
        (small, small_m), (large, large_m) = ends
        n0, n1 = first.row.n_gpus or 1, last.row.n_gpus or 1
        span = straggler.slowest_of(n1) - straggler.slowest_of(n0)
        excess = log(large_m / small_m) - log(large / small)
        fp8 = " FP8" if "8" in first.row.precision else ""
        found[f"{first.row.family}{fp8}"].append(excess / span)
        print(
            f"{first.row.id} .. {last.row.id} {n0} -> {n1}: measured {large_m / small_m:.3f}, "
            f"predicted {large / small:.3f}, sigma {excess / span:+.4f}"
        )
    for family, values in found.items():
        print(f"{family}: {median(values):.4f} over {len(values)}")
    print(f"median over families: {median(median(v) for v in found.values()):.4f}")
    for family in found:
        rest = median(median(v) for f, v in found.items() if f != family)
        print(f"  without {family}: {rest:.4f}")


def _weak_groups(path: Path, families: tuple[str, ...]) -> list[list[MeasuredRun]]:
    groups: dict[tuple[object, ...], list[MeasuredRun]] = defaultdict(list)
    for run in read_rows(path):
        row = run.row
        if row.family not in families or not row.gbs or not row.n_gpus or row.n_gpus < SMALLEST:
            continue
        key = (
            row.family,
            row.model,
            row.n_layers,
            row.hidden,
            row.gpu_norm,
            row.gpu_mem_gb,
            row.precision,
            row.tp,
            row.pp,
            row.vpp,
            row.cp,
            row.ep,
            row.mbs,
            row.seq_len,
            row.gbs / row.n_gpus,
            row.framework,
            row.framework_version,
            row.recompute,
            row.zero_stage,
            row.sharding,
            row.sp,
            row.task,
        )
        groups[key].append(run)
    result: list[list[MeasuredRun]] = []
    for rows in groups.values():
        rows.sort(key=lambda run: run.row.n_gpus or 0)
        if (rows[-1].row.n_gpus or 0) >= MIN_GROWTH * (rows[0].row.n_gpus or 1):
            result.append(rows)
    return result


def _predict(run: MeasuredRun) -> tuple[float, float] | None:
    measured = measured_step(run.row, run.measured)
    try:
        answer = predict_mapped(map_row(run.row))
    except Unsupported:
        return None
    if measured is None or not isinstance(answer, Prediction):
        return None
    return answer.step_s, measured


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or FAMILIES)
