"""Which three plans of a job tell the constants apart best, before anything is measured.

Every plan is simulated with each constant off either way. For three plans and a fault of one
constant, the nearest rival is the other constant (or none) at the value that comes closest in all
three steps. The three plans that keep the rivals farthest apart are proposed, and the share of
faults that `fit` would name from them is found by trying it on simulated measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np

from foretrain.analysis.fit import NOISE, judge
from foretrain.analysis.fit_plans import SLOWEST, OtherPlan, other_plans, spread
from foretrain.analysis.fit_posterior import GRID, LOG_PRIOR, Array, probabilities
from foretrain.analysis.fit_response import CONSTANTS, StepModel, log_time_of
from foretrain.errors import ForetrainError, InputError, Problem
from foretrain.predict import predict
from foretrain.run.spec import RunSpec

#: Plans that are simulated, the most different ones.
MOST_TRIED = 24
#: Runs that are proposed.
COUNT = 3
#: Faults that should be recognised: factors on a constant, 20 to 50 % off either way.
FAULTS = (0.5, 0.65, 0.8, 1.2, 1.35, 1.5)
#: Where a response is simulated: both ways for the choice, more for the plans that are chosen.
CHOICE, CHOSEN = (-log(1.6), log(1.6)), (-log(4.0), -0.2, 0.2, log(4.0))
#: Simulated measurements per fault.
DRAWS = 20
#: Values of a rival that are compared: every so many points of GRID within a factor of 6.
RIVALS: Array = GRID[np.abs(GRID) < log(6.0)][::20]
RIVAL_PRIOR: Array = LOG_PRIOR[np.abs(GRID) < log(6.0)][::20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Plans worth measuring, with the share of faults of 20 to 50 % that `fit` would name.

    `named` is by constant, of simulated faults with `noise`; `steps_s` has the predicted steps. A
    constant that no plan uses is not in `named`.
    """

    plans: tuple[OtherPlan, ...]
    steps_s: tuple[float, ...]
    named: Mapping[str, float]
    noise: float
    tried: int


def suggest(run: RunSpec, *, noise: float = NOISE) -> Suggestion:
    """Returns the three plans of this model, batch and cluster that tell constants apart best.

    Raises:
        InputError: fewer than three plans fit in memory.
    """
    plans = spread(other_plans(run), MOST_TRIED)
    models = _modelled(plans)
    effects = [_effects(model) for _, model in models]
    left = _not_slow([model.base_s for _, model in models])
    while len(left) >= COUNT:
        chosen = _best(left, effects, noise)
        unfit = [i for i in chosen if not predict(models[i][0].run).fits]
        if not unfit:
            return _suggestion([models[i] for i in chosen], noise, len(models))
        left = [i for i in left if i not in unfit]
    raise InputError(
        Problem(
            what=f"fewer than {COUNT} plans of this job differ and fit in memory",
            where="--suggest",
            value=f"{len(plans)} plan(s) tried",
            way_out="a smaller model or sequence, more devices, or runs that differ in batch",
        )
    )


def _modelled(plans: Sequence[OtherPlan]) -> list[tuple[OtherPlan, StepModel]]:
    found: list[tuple[OtherPlan, StepModel]] = []
    for plan in plans:
        try:
            model = StepModel(plan.run)
        except ForetrainError:
            continue  # not a plan that can be modelled
        for constant in CONSTANTS:
            for point in CHOICE:
                model.response(constant).at(point)
        found.append((plan, model))
    return found


def _not_slow(steps_s: Sequence[float]) -> list[int]:
    fastest = min(steps_s, default=0.0)
    return [i for i, step in enumerate(steps_s) if step <= SLOWEST * fastest]


def _effects(model: StepModel) -> tuple[Array, Array]:
    """Returns ln(step / predicted): (constants, faults), and (constants, values of a rival)."""
    faults = [
        [float(_effect(model, c, np.array(log_time_of(c, factor)))) for factor in FAULTS]
        for c in CONSTANTS
    ]
    return np.array(faults), np.array([_effect(model, c, RIVALS) for c in CONSTANTS])


def _effect(model: StepModel, constant: str, log_times: Array) -> Array:
    return np.log(model.response(constant).between(log_times) / model.base_s)


def _best(
    left: Sequence[int], effects: Sequence[tuple[Array, Array]], noise: float
) -> tuple[int, ...]:
    """Returns the three plans with the largest summed merit over all faults."""
    apart = {i: _apart(*effects[i]) / noise**2 for i in left}
    alone = {i: (effects[i][0] / noise) ** 2 for i in left}
    penalty = 2.0 * (_prior_of_faults()[:, :, None, None] - RIVAL_PRIOR)

    def merit(plans: tuple[int, ...]) -> float:
        # twice the log odds against every rival at its best value, and against nothing
        odds = np.sum([apart[i] for i in plans], axis=0) + penalty
        nearest: Array = odds.min(axis=3)  # (constants, faults, rivals)
        for index in range(len(CONSTANTS)):
            nearest[index, :, index] = np.inf
        none = np.sum([alone[i] for i in plans], axis=0)
        distance = np.minimum(nearest.min(axis=2), none)
        return float(_chance(distance).sum())

    return max(combinations(left, COUNT), key=merit)


def _apart(faults: Array, rivals: Array) -> Array:
    """Returns squared distances (constants, faults, rivals, values of a rival) in ln(step)."""
    return (faults[:, :, None, None] - rivals[None, None, :, :]) ** 2


def _values(curves: Array, at: float) -> Array:
    """Returns the values of curves (runs, points of GRID) at one log time factor."""
    found = np.zeros(len(curves))
    for i in range(len(curves)):
        curve: Array = curves[i]
        found[i] = float(np.interp(at, GRID, curve))
    return found


def _prior_of_faults() -> Array:
    log_times = [[log_time_of(c, factor) for factor in FAULTS] for c in CONSTANTS]
    return np.interp(np.array(log_times), GRID, LOG_PRIOR)


def _chance(distance: Array) -> Array:
    """Returns about how likely a name is at these squared distances: 0 to 1, smooth.

    The log odds have mean d / 2 and standard deviation sqrt(d); a name takes odds of 2 to 1. The
    normal distribution is taken as a logistic one, which is within 2 % of it.
    """
    d = np.clip(distance, 0.1, 1e3)
    return 1.0 / (1.0 + np.exp(-1.7 * (0.5 * d - log(2.0)) / np.sqrt(d)))


def _suggestion(
    chosen: Sequence[tuple[OtherPlan, StepModel]], noise: float, tried: int
) -> Suggestion:
    models = [model for _, model in chosen]
    for model in models:
        for constant in CONSTANTS:
            for point in CHOSEN:
                model.response(constant).at(point)
    return Suggestion(
        plans=tuple(plan for plan, _ in chosen),
        steps_s=tuple(model.base_s for model in models),
        named=forecast(models, noise),
        noise=noise,
        tried=tried,
    )


def forecast(models: Sequence[StepModel], noise: float = NOISE) -> dict[str, float]:
    """Returns by constant the share of faults of 20 to 50 % that `fit` names from these runs.

    Measurements are drawn with `noise` from a fixed seed, from what has been simulated so far.
    """
    used = [c for c in CONSTANTS if any(model.response(c).works for model in models)]
    curves = {c: np.array([_effect(model, c, GRID) for model in models]) for c in used}
    random = np.random.default_rng(0)
    shares: dict[str, float] = {}
    for constant in used:
        right = 0
        for factor in FAULTS:
            at = log_time_of(constant, factor)
            truth = _values(curves[constant], at)
            for _ in range(DRAWS):
                gaps = truth + random.normal(0.0, noise, len(truth))
                misses = {c: curve - gaps[:, None] for c, curve in curves.items()}
                right += judge(probabilities(misses, list(gaps), noise))[1] == constant
        shares[constant] = right / (len(FAULTS) * DRAWS)
    return shares
