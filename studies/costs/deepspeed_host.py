"""Host constants of the stack `deepspeed`, from the layer times behind vTrain's measured steps.

    python studies/costs/deepspeed_host.py measured_runs.csv.gz

The steps of one node in VIA-Research/vTrain (data/ground_truth_single.csv) are sums of parts that
were timed one by one (src/foretrain/validation/mapping/apart.py): for pp = 1

    step = c + u L + m (head + layer L)        m micro-batches, L layers

with one `layer` and one `head` for each hidden size, tp and micro-batch. Least squares finds them
(the rest is below 0.01 %): 32 of each, all that 930 rows know. A block that starts from idle takes
as long as the longer of its two clocks, host and device (the walk of the simulator); the device
side is what foretrain predicts. Fitted are host_launch_us, host_op_us, host_comm_us, host_backward
and rank_skew_us, on the 32 layer times, to the least mean |log error|; heads and steps are not read
by the fit. Nothing is left to check them with: no other source states host-bound runs of this
software.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np

from foretrain.analysis.simplex import Vector, minimise
from foretrain.cost.host import host_seconds
from foretrain.cost.model import build_cost_model
from foretrain.cost.prices import Prices
from foretrain.predict import compile_run
from foretrain.program import Program
from foretrain.simulator.segment_play import play_segment
from foretrain.simulator.simulate import event_times
from foretrain.stack import Stack
from foretrain.validation.mapping import map_row
from foretrain.validation.predict_rows import run_of
from foretrain.validation.rows import MeasuredRun, read_rows

FIELDS = ("host_launch_us", "host_op_us", "host_comm_us", "host_backward", "rank_skew_us")
START = (20.0, 120.0, 60.0, 0.25, 200.0)
LAYER = slice(2, 4)  # segments of a program without recompute: embedding, layer, head


def parts(runs: Sequence[MeasuredRun]) -> dict[int, tuple[float, float]]:
    """Returns (head, layer) in seconds by micro-batch, of runs of one hidden size, tp and dp."""
    batches = sorted({run.row.mbs or 1 for run in runs})
    table = np.zeros((len(runs), 2 + 2 * len(batches)))
    seconds = np.array([run.measured.iter_time_s for run in runs], dtype=float)
    for line, run in zip(table, runs, strict=True):
        layers, micro = run.row.n_layers or 0, run.row.ga_steps or 0
        at = 2 + 2 * batches.index(run.row.mbs or 1)
        line[:2] = (1.0, layers)
        line[at : at + 2] = (micro, micro * layers)
    found, _, rank, _ = np.linalg.lstsq(table / seconds[:, None], np.ones(len(runs)), rcond=None)
    rest = np.abs(table @ found / seconds - 1.0).max()
    if rank < table.shape[1] or rest > 5e-4:
        return {}
    return {b: (found[2 + 2 * i], found[3 + 2 * i]) for i, b in enumerate(batches)}


def cells(runs: Sequence[MeasuredRun]) -> list[tuple[MeasuredRun, float, float]]:
    """Returns a run of each hidden size, tp and micro-batch with its measured head and layer."""
    groups: dict[tuple[int, int, int], list[MeasuredRun]] = {}
    for run in runs:
        key = (run.row.hidden or 0, run.row.tp or 1, run.row.dp or 1)
        groups.setdefault(key, []).append(run)
    found: dict[tuple[int, int, int], tuple[MeasuredRun, float, float]] = {}
    for (hidden, tp, _), group in groups.items():
        for batch, (head, layer) in parts(group).items():
            one = next(run for run in group if run.row.mbs == batch)
            found[hidden, tp, batch] = (one, head, layer)
    return [found[key] for key in sorted(found)]


def layer_seconds(program: Program, prices: Prices, stack: Stack, device: Prices) -> float:
    """Returns the time of a layer, forward and backward, each from idle."""
    host = [
        host_seconds(event, float(kernels), stack)
        for event, kernels in zip(program.events, device.kernels, strict=True)
    ]
    times = event_times(replace(prices, host_s=np.array(host), synced=True), {}, plain=True)
    return sum(play_segment(segment, times)[0].gpu for segment in program.segments[LAYER])


def main(path: str) -> None:
    """Prints the constants and the error of every layer time."""
    runs = [
        run
        for run in read_rows(Path(path))
        if run.row.family == "vtrain_groundtruth" and run.row.pp == 1
    ]
    measured = cells(runs)
    specs = [run_of(map_row(run.row)) for run, _, _ in measured]
    programs = [compile_run(spec).program for spec in specs]
    still = [replace(spec.stack, rank_skew_us=0.0) for spec in specs]
    moved = [replace(spec.stack, rank_skew_us=1.0) for spec in specs]
    fixed, per_us = (
        [
            build_cost_model(spec.cluster, stack).price(program.events)
            for spec, stack, program in zip(specs, stacks, programs, strict=True)
        ]
        for stacks in (still, moved)
    )

    def errors(point: Vector) -> list[float]:
        values = [abs(float(x)) for x in point]
        stack = replace(specs[0].stack, **dict(zip(FIELDS, values, strict=True)))
        return [
            log(layer_seconds(program, skewed(low, high, stack), stack, low) / layer)
            for program, low, high, (_, _, layer) in zip(
                programs, fixed, per_us, measured, strict=True
            )
        ]

    def skewed(low: Prices, high: Prices, stack: Stack) -> Prices:
        value = low.value_s + stack.rank_skew_us * (high.value_s - low.value_s)
        return replace(low, value_s=value)

    edges = [0.3 * x for x in START]
    best, _ = minimise(lambda p: float(np.mean(np.abs(errors(p)))), START, edges, iterations=160)
    print(*(f"{name} = {abs(x):.4g}" for name, x in zip(FIELDS, best, strict=True)), sep="\n")
    found = errors(best)
    print(f"mean |log error| {np.mean(np.abs(found)):.3f}")
    for (run, head, layer), error in zip(measured, found, strict=True):
        row = run.row
        print(
            f"hidden {row.hidden} tp {row.tp} micro-batch {row.mbs}: layer {1e3 * layer:.2f} ms "
            f"({np.expm1(error):+.0%}), head {1e3 * head:.2f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1])
