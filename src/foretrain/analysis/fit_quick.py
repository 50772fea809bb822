"""A step of many micro-batches from two short ones: fast enough to look at many plans.

Every further micro-batch adds what the busiest stage does for one, so the step of n micro-batches
lies on the straight line through two shorter steps that have filled the pipeline. Serves to choose
plans; what is said of a chosen plan is simulated whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from foretrain.analysis.fit_response import CONSTANTS, Response, StepModel
from foretrain.cost.adjust import Adjustments
from foretrain.predict import data_parallel
from foretrain.run.spec import RunSpec

#: Programs with fewer tasks than this are simulated whole: to compile once more takes longer.
LONG = 3_000
#: Steps of so few micro-batches x stages are not worth a look whether they are long.
FEW = 512


class QuickModel(StepModel):
    """A run whose step is continued in a straight line from two with fewer micro-batches."""

    def __init__(self, run: RunSpec, few: StepModel, more: StepModel) -> None:
        self.run = run
        self.program, self.prices = more.program, more.prices
        self._few, self._more = few, more
        self._responses = {name: Response(model=self, constant=name) for name in CONSTANTS}
        count = _microbatches(more.run)
        self._beyond = (_microbatches(run) - count) / (count - _microbatches(few.run))

    @property
    def short(self) -> RunSpec:
        """Returns the run with fewer micro-batches, which holds about as many of them at once."""
        return self._few.run

    @cached_property
    def num_tasks(self) -> int:
        """Returns about how many tasks one look at the step plays."""
        return self._few.num_tasks + self._more.num_tasks

    def event_counts(self) -> Mapping[int, float]:
        """Returns how often each event happens in the whole step."""
        few, more = self._few.event_counts(), self._more.event_counts()
        return {i: n + self._beyond * (n - few.get(i, 0)) for i, n in more.items()}

    def step_s(self, adjustments: Adjustments) -> float:
        """Returns the predicted step in seconds with other constants."""
        few, more = self._few.step_s(adjustments), self._more.step_s(adjustments)
        return more + self._beyond * (more - few)


def quick_model(run: RunSpec) -> StepModel:
    """Returns a model of a run that is cheap to ask: exact where that is cheap, else a line."""
    counts = _counts(run)
    if counts is None:
        return StepModel(run)
    few = StepModel(_with_microbatches(run, counts[0]))
    if few.num_tasks * _microbatches(run) < LONG * counts[0]:
        return StepModel(run)
    return QuickModel(run, few, StepModel(_with_microbatches(run, counts[1])))


def _counts(run: RunSpec) -> tuple[int, int] | None:
    """Returns two numbers of micro-batches that stand for the run; None: it is simulated whole."""
    plan, whole = run.plan, _microbatches(run)
    if plan.schedule == "gpipe" or plan.in_flight is not None:
        return None  # all are in flight at once, or a limit counts them
    sharded = (plan.zero or 0) >= 2 or plan.preset == "fsdp"
    if not sharded and whole * plan.pp < FEW:
        return None
    few, more = 2 * plan.pp, 3 * plan.pp
    return (few, more) if more < whole else None


def _microbatches(run: RunSpec) -> int:
    return run.training.accumulation(data_parallel(run))


def _with_microbatches(run: RunSpec, count: int) -> RunSpec:
    batch = run.training.microbatch * data_parallel(run) * count
    return replace(run, training=replace(run.training, global_batch=batch))
