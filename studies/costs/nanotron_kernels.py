"""kernel_factor and zero_gather_us of the stack nanotron.

    python studies/costs/nanotron_kernels.py measured_runs.csv.gz

kernel_factor: the Ultra-Scale Playbook ran PyTorch 2.1 with CUDA 12.1 (run_multinode.sh of nanotron
names the environment), the tables of H100 kernels are of later libraries. Rows without a pipeline
on up to four nodes, tp 1 to 8 inside the node, at least 4096 tokens per rank of the tp group (so
that neither the host nor the cut of asynchronous products into three decides):

    step = factor x computation + the rest of the prediction

zero_gather_us: with ZeRO-1 the gathered weights are copied to their places weight by weight and
rank by rank in Python (distributed.py, all_gather_coalesced). What rows of that kind on eight and
sixteen nodes take beyond the prediction with that factor, per weight and rank.

Both are medians of the models of 1B and 3B; those of 8B are printed beside, not in the fit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from foretrain.predict import predict
from foretrain.simulator.result import Result
from foretrain.validation.mapping import map_row
from foretrain.validation.predict_rows import run_of
from foretrain.validation.rows import MeasuredRun, Row, read_rows

FITTED = ("Llama-like 1B", "Llama-like 3B")
NEAR, FAR = (8, 16, 32), (64, 128)
LEAST_TOKENS, LEAST_MFU = 4096, 5.0
WEIGHTS = 9  # of a layer in our graph


def _usable(run: MeasuredRun) -> bool:
    row, measured = run.row, run.measured
    return (
        row.family == "ultrascale_playbook"
        and measured.iter_time_s is not None
        and (measured.mfu_pct or 0.0) >= LEAST_MFU
        and row.pp == 1
        and (row.tp or 1) <= 8
        and (row.mbs or 1) * (row.seq_len or 0) >= LEAST_TOKENS * (row.tp or 1)
        and row.n_gpus in (*NEAR, *FAR)
    )


def _predicted(row: Row, factor: float) -> Result:
    run = run_of(map_row(row))
    return predict(replace(run, stack=replace(run.stack, kernel_factor=factor, zero_gather_us=0.0)))


def main(path: str) -> None:
    """Prints both constants, by model."""
    runs = [run for run in read_rows(Path(path)) if _usable(run)]
    factors: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.row.n_gpus in NEAR:
            result = _predicted(run.row, 1.0)
            rest = result.step_time_s.value - result.time_parts.compute
            step = run.measured.iter_time_s or 0.0
            factors[run.row.model].append((step - rest) / result.time_parts.compute)
    fitted = [value for model in FITTED for value in factors[model]]
    factor = median(fitted)
    gathers: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.row.n_gpus in FAR and run.row.zero_stage == "1":
            rest = (run.measured.iter_time_s or 0.0) - _predicted(run.row, factor).step_time_s.value
            copies = ((run.row.n_layers or 0) * WEIGHTS + 3) * (run.row.dp or 1)
            gathers[run.row.model].append(1e6 * rest / copies)
    out = sys.stdout.write
    for model, values in sorted(factors.items()):
        apart = "" if model in FITTED else " (not fitted)"
        more = (
            f", {median(gathers[model]):.1f} us ({len(gathers[model])})" if gathers[model] else ""
        )
        out(f"{model}{apart}: factor {median(values):.3f} ({len(values)} rows){more}\n")
    out(f"kernel_factor {factor:.2f}\n")
    out(f"zero_gather_us {median([v for m in FITTED for v in gathers[m]]):.1f} with the launch\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
