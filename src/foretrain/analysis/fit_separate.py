"""Which further measurement would tell apart constants that explain the measured steps alike.

Every explanation predicts the same steps for the runs that were measured, but not for other plans.
The plan whose predictions lie farthest apart is the run worth measuring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

from foretrain.analysis.fit import NOISE
from foretrain.analysis.fit_plans import SLOWEST, OtherPlan, other_plans, spread
from foretrain.analysis.fit_posterior import NOTHING
from foretrain.analysis.fit_quick import quick_model
from foretrain.analysis.fit_response import StepModel
from foretrain.analysis.fit_search import Explanation, Measured
from foretrain.cost.adjust import Adjustments
from foretrain.errors import ForetrainError
from foretrain.predict import predict

#: Other plans that are tried, the most different ones.
MOST_TRIED = 16
#: Noises between the ln(step) of two explanations: told apart, and so for certain.
CLEAR, CERTAIN = 3.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """A run worth measuring: `name` with `changes`, and its step by explanation, in seconds."""

    name: str
    plan: OtherPlan
    steps_s: Mapping[str, float]

    @property
    def distances(self) -> list[float]:
        """Returns |ln| of the ratio of the steps of every two explanations."""
        return [abs(log(a / b)) for a, b in combinations(self.steps_s.values(), 2)]

    def merit(self, noise: float) -> float:
        """Returns the summed distances, each counted up to what tells two apart for certain."""
        return sum(min(distance, CERTAIN * noise) for distance in self.distances)


def separate(
    runs: Sequence[Measured],
    explanations: Sequence[Explanation],
    *,
    noise: float = NOISE,
    nothing: bool = False,
) -> Separation | None:
    """Returns the plan of the first run's job that tells the explanations apart best.

    `nothing` counts "all is as predicted" among them. None where no plan that fits in memory puts
    two of them further apart than `CLEAR` noises, or where there is nothing to tell apart. Of
    plans that do as well the one with fewest changes is taken.
    """
    causes = {
        e.constant: Adjustments(**{e.constant: e.factor})
        for e in explanations
        if e.factor is not None
    }
    if nothing:
        causes[NOTHING] = Adjustments()
    if len(causes) < 2:
        return None
    found = _tried(runs, causes)
    fastest = min((model.base_s for _, model in found), default=0.0)
    options = [(s, model) for s, model in found if model.base_s <= SLOWEST * fastest]
    options.sort(key=lambda o: (-round(o[0].merit(noise) / noise, 1), len(o[0].plan.changes)))
    for separation, _ in options:
        if max(separation.distances) <= CLEAR * noise:
            continue
        if predict(separation.plan.run).fits:
            return separation
    return None


def _tried(
    runs: Sequence[Measured], causes: Mapping[str, Adjustments]
) -> list[tuple[Separation, StepModel]]:
    measured = runs[0]
    known = [(run.model.run.plan, run.model.run.training) for run in runs]
    found: list[tuple[Separation, StepModel]] = []
    for plan in spread(other_plans(measured.model.run), MOST_TRIED):
        if (plan.run.plan, plan.run.training) in known:
            continue
        try:
            model = quick_model(plan.run)
        except ForetrainError:
            continue  # not a plan that can be modelled
        steps = {cause: model.step_s(adjust) for cause, adjust in causes.items()}
        found.append((Separation(name=measured.name, plan=plan, steps_s=steps), model))
    return found
