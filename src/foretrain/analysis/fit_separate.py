"""Which further measurement would tell apart constants that explain the measured steps alike.

Every explanation predicts the same steps for the runs that were measured, but not for other plans.
The change of one setting whose predictions lie farthest apart is the run worth measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

from foretrain.analysis.candidates import Candidate, candidates
from foretrain.analysis.fit import NOISE
from foretrain.analysis.fit_response import StepModel
from foretrain.analysis.fit_search import Explanation, Measured
from foretrain.cost.adjust import Adjustments
from foretrain.errors import ForetrainError
from foretrain.predict import predict

#: Other plans are tried in the order of `candidates`, no more than this many.
MOST_TRIED = 14
#: Distances of ln(step): two explanations are told apart, and so for certain.
CLEAR, CERTAIN = 3.0 * NOISE, 10.0 * NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """A run worth measuring: `name` with one change, and its step by explanation, in seconds."""

    name: str
    title: str
    changes: Mapping[str, object]
    steps_s: Mapping[str, float]

    @property
    def distances(self) -> list[float]:
        """Returns |ln| of the ratio of the steps of every two explanations."""
        return [abs(log(a / b)) for a, b in combinations(self.steps_s.values(), 2)]

    @property
    def merit(self) -> float:
        """Returns the summed distances, each counted up to what tells two apart for certain."""
        return sum(min(distance, CERTAIN) for distance in self.distances)


def separate(runs: Sequence[Measured], explanations: Sequence[Explanation]) -> Separation | None:
    """Returns the single change of a plan that tells the explanations apart best.

    None where no change that fits in memory puts two of them further apart than `CLEAR`, or where
    there is nothing to tell apart.
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
        separation = Separation(
            name=measured.name,
            title=candidate.title,
            changes=candidate.changes,
            steps_s=steps,
        )
        found.append((separation, candidate))
    found.sort(key=lambda pair: -pair[0].merit)
    for separation, candidate in found:
        if max(separation.distances) > CLEAR and predict(candidate.run).fits:
            return separation
    return None


def _adjustments(explanation: Explanation) -> Adjustments:
    return Adjustments(**{explanation.constant: explanation.factor or 1.0})
