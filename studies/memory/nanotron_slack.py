"""The allocator slack of the stack nanotron: fitted on some model sizes, checked on others.

Usage: python studies/memory/nanotron_slack.py measured_runs.csv.gz [EVERY]

Live bytes are those of the program (compiled and simulated, a minute for 100 rows); four shares are
searched on a grid: of all live bytes, of activations in pipelines, of the buffers of tp collectives
with one micro-batch alive, and with several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from nanotron_memory import FAMILY, say

from foretrain.cost.model import build_cost_model
from foretrain.predict import CATEGORIES, compile_run
from foretrain.simulator.device_memory import device_memory
from foretrain.simulator.simulate import event_times, simulate
from foretrain.units import GIB
from foretrain.validation.mapping import map_row
from foretrain.validation.predict_rows import run_of
from foretrain.validation.rows import MeasuredRun, read_rows

LOW_MFU = 5.0
GRID = (
    (0.02, 0.03, 0.04, 0.05, 0.06, 0.07),
    (0.0, 0.05, 0.1, 0.15, 0.2),
    (0.6, 0.8, 1.0),
    (0.2, 0.3, 0.4, 0.5),
)
HALVES = ((16, 32), (28, 80), (16, 80), (28, 32))


@dataclass(frozen=True, kw_only=True)
class Case:
    """GiB of one row: measured, sure, what each share multiplies, and what the device has left.

    `kinds` are what it has in common with other rows: size, (tp, dp), micro-batch, stages.
    """

    layers: int
    kinds: tuple[object, ...]
    measured: float
    sure: float
    shares: tuple[float, float, float, float]
    room: float

    def error(self, values: Sequence[float]) -> float:
        """Returns the error; free buffers fill the device and no more."""
        live, pipeline, one, several = (v * s for v, s in zip(values, self.shares, strict=True))
        tight = self.sure + live + pipeline
        return (tight + min(one + several, max(self.room - tight, 0.0))) / self.measured - 1


def case_of(item: MeasuredRun) -> Case:
    """Returns what the memory of a row is made of: a share of 1 against one of 0."""
    run = run_of(map_row(item.row))
    program = compile_run(run).program
    model = build_cost_model(run.cluster, run.stack)
    overlap = {name: model.overlap(name) for name in CATEGORIES}
    peak = simulate(program, event_times(model.price(program.events), overlap, plain=False)).peaks[
        0
    ]
    names = ("fragmentation", "pipeline_slack", "gather_holes", "pipeline_holes")
    none = replace(run.stack, **dict.fromkeys(names, 0.0))
    device = run.cluster.device
    endless = replace(device, memory_bytes=1e15)

    def reserved(**shares: float) -> float:
        return device_memory(program, 0, peak, replace(none, **shares), endless).reserved / GIB

    sure = reserved()
    outside = device_memory(program, 0, peak, none, endless).used / GIB - sure
    return Case(
        layers=item.row.n_layers or 0,
        kinds=(item.row.n_layers, (item.row.tp, item.row.dp), item.row.mbs, item.row.pp),
        measured=item.measured.peak_mem_gib or 1.0,
        sure=sure,
        shares=(
            reserved(fragmentation=1.0) - sure,
            reserved(pipeline_slack=1.0) - sure,
            reserved(gather_holes=1.0) - sure,
            reserved(pipeline_holes=1.0, gather_holes=1e-9) - sure,
        ),
        room=0.97 * device.memory_bytes / GIB - outside,
    )


def score(cases: Sequence[Case], values: Sequence[float]) -> tuple[float, float]:
    """Returns the median error and that which one row in ten exceeds."""
    errors = sorted(abs(case.error(values)) for case in cases)
    return median(errors), errors[int(0.9 * len(errors))]


def best(cases: Sequence[Case]) -> tuple[float, ...]:
    """Returns the shares with the least median and a quarter of the ninth decile."""
    cost: Callable[[tuple[float, ...]], float] = lambda values: (  # noqa: E731
        score(cases, values)[0] + 0.25 * score(cases, values)[1]
    )
    return min(product(*GRID), key=cost)


def left_out(cases: Sequence[Case], kind: int) -> tuple[float, float]:
    """Returns median error and ninth decile where every kind is predicted by all the others."""
    errors: list[float] = []
    for value in dict.fromkeys(case.kinds[kind] for case in cases):
        values = best([case for case in cases if case.kinds[kind] != value])
        errors += [abs(case.error(values)) for case in cases if case.kinds[kind] == value]
    errors.sort()
    return median(errors), errors[int(0.9 * len(errors))]


def main() -> None:
    """Prints the best shares of each half of the model sizes, and how they do on the other."""
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    rows = [
        item
        for item in read_rows(Path(sys.argv[1]))
        if item.row.family == FAMILY
        and item.row.quality == "A"
        and item.measured.peak_mem_gib
        and (item.measured.mfu_pct or 0.0) >= LOW_MFU
    ]
    cases = [case_of(item) for item in rows[::every]]
    say(f"{len(cases)} rows; shares of live bytes, activations, buffers of one and of several")
    for half in HALVES:
        inside = [case for case in cases if case.layers in half]
        outside = [case for case in cases if case.layers not in half]
        values = best(inside)
        say(f"{half} layers: {values}, median and ninth decile {_text(inside, values)}, "
              f"left out {_text(outside, values)}")  # fmt: skip
    for kind, name in enumerate(("size", "(tp, dp)", "micro-batch", "stages")):
        middle, tail = left_out(cases, kind)
        say(f"left out by {name}: {middle:.3f} / {tail:.3f}")
    chosen = (0.05, 0.15, 1.0, 0.3)
    say(f"chosen {chosen}: {_text(cases, chosen)}")


def _text(cases: Sequence[Case], values: Sequence[float]) -> str:
    middle, tail = score(cases, values)
    return f"{middle:.3f} / {tail:.3f}"


if __name__ == "__main__":
    main()
