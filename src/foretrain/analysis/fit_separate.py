"""Which further measurement would tell apart constants that explain the measured steps alike.

Every explanation predicts the same steps for the runs that were measured, but not for other plans.
The change of one setting whose predictions lie farthest apart is the run worth measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log

from foretrain.analysis.candidates import Candidate, candidates
from foretrain.analysis.fit import NOISE, Explanation, Measured
from foretrain.analysis.fit_response import StepModel
from foretrain.cost.adjust import Adjustments
from foretrain.errors import ForetrainError
from foretrain.predict import predict

#: Other plans are tried in the order of `candidates`, no more than this many.
MOST_TRIED = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """A run worth measuring: `name` with one change, and its step by explanation, in seconds.

    `ratio` is the smallest ratio between the steps of two explanations, slower over faster.
    """

    name: str
    title: str
    changes: Mapping[str, object]
    steps_s: Mapping[str, float]
    ratio: float


def separate(runs: Sequence[Measured], explanations: Sequence[Explanation]) -> Separation | None:
    """Returns the single change of a plan that tells the explanations apart best.

    None where no change that fits in memory puts all of them more than two noises apart (the
    smallest ratio decides), or where there is nothing to tell apart.
    """
    open_ = [e for e in explanations if e.factor is not None]
    if len(open_) < 2:
        return None
    measured = runs[0]
    run = measured.model.run
    if run.plan.tree is not None:
        return None
    found: list[tuple[Separation, Candidate]] = []
    for candidate in candidates(run, predict(run))[:MOST_TRIED]:
        try:
            model = StepModel(candidate.run)
        except ForetrainError:
            continue  # not a plan that can be modelled
        steps = {e.constant: model.step_s(_adjustments(e)) for e in open_}
        ratio = exp(min(abs(log(a / b)) for a, b in combinations(steps.values(), 2)))
        separation = Separation(
            name=measured.name,
            title=candidate.title,
            changes=candidate.changes,
            steps_s=steps,
            ratio=ratio,
        )
        found.append((separation, candidate))
    found.sort(key=lambda pair: -pair[0].ratio)
    for separation, candidate in found:
        if log(separation.ratio) < 2.0 * NOISE:
            return None
        if predict(candidate.run).fits:
            return separation
    return None


def _adjustments(explanation: Explanation) -> Adjustments:
    return Adjustments(**{explanation.constant: explanation.factor or 1.0})
