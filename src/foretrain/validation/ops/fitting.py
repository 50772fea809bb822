"""Fitting positive constants to measured times, held by priors.

Minimises over the logarithms x of the constants

    sum_i w_i sqrt(r_i**2 + soft**2) + soft sum_j ((x_j - start_j) / width_j)**2,
    r_i = log(model / measured)

by Levenberg-Marquardt with reweighting. The first sum is close to the mean absolute error, so that
a few odd rows do not decide; the second makes a constant that the rows say nothing about stay where
it was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Errors well below this are noise: they count quadratically.
SOFT = 0.02
_STEP = 0.02  # of a logarithm: beyond the kinks that waves of tiles make
_LONGEST = 0.7


def fit_cost(
    model: Callable[[Array], Array], measured: Array, values: Array, start: Array, width: Array
) -> float:
    """Returns what `fit_constants` makes small, to choose among the fits of several starts."""
    errors = np.log(model(values)) - np.log(measured)
    return _cost(errors, (np.log(values) - np.log(start)) / width, np.ones(len(measured)))


def _cost(errors: Array, moved: Array, weights: Array) -> float:
    """The cost of errors, and of constants that moved by so many widths of their priors."""
    prior = SOFT * float(np.sum(moved**2))
    return float(np.sum(weights * np.sqrt(errors * errors + SOFT * SOFT))) + prior


def fit_constants(
    model: Callable[[Array], Array],
    measured: Array,
    start: Array,
    width: Array,
    *,
    low: Array | None = None,
    high: Array | None = None,
    weight: Array | None = None,
    rounds: int = 25,
) -> Array:
    """Returns the constants that fit.

    Args:
        model: from the constants to the predicted times of all rows.
        measured: the times, in the unit of the model.
        start: where the constants are before the rows are seen.
        width: the standard deviation of the logarithm of each, by the prior.
        low: bounds from below, none by default.
        high: bounds from above, none by default.
        weight: of each row, 1 by default.
        rounds: at most so many steps.
    """
    x0 = np.log(start)
    floor = np.full(x0.shape, -np.inf) if low is None else np.log(low)
    ceiling = np.full(x0.shape, np.inf) if high is None else np.log(high)
    weights = np.ones(len(measured)) if weight is None else weight
    target = np.log(measured)

    def errors(x: Array) -> Array:
        return np.log(model(np.exp(x))) - target

    def cost(r: Array, x: Array) -> float:
        return _cost(r, (x - x0) / width, weights)

    x = np.clip(x0, floor, ceiling)
    r = errors(x)
    best, damping = cost(r, x), 1e-2
    for _ in range(rounds):
        slopes = np.stack([(errors(x + _STEP * row) - r) / _STEP for row in np.eye(len(x))], axis=1)
        share = weights / np.sqrt(r * r + SOFT * SOFT)
        matrix = (slopes * share[:, None]).T @ slopes + np.diag(2.0 * SOFT / width**2)
        gradient = slopes.T @ (share * r) + 2.0 * SOFT * (x - x0) / width**2
        for _ in range(6):
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -gradient)
            moved = x + np.clip(step, -_LONGEST, _LONGEST)
            trial: Array = np.asarray(np.clip(moved, floor, ceiling), dtype=np.float64)
            r_trial = errors(trial)
            better = cost(r_trial, trial)
            if better < best - 1e-9:
                break
            damping *= 4.0
        else:
            break
        gain, x, r, best = best - better, trial, r_trial, better
        damping = max(damping / 3.0, 1e-4)
        if gain < 1e-4 * best:
            break
    return np.exp(x)
