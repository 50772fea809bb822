"""How probable it is that one constant of the cost model is what measured steps deviate by.

Hypotheses, equally probable before the measurements: for every constant that the runs use, that
it alone is off; that nothing is; that something else is (two causes, a plan that is not what ran).
With the log time factor u of a constant, misses m_r(u) = ln(T_r(u) / measured_r), T_r simulated,
and independent normal noise of standard deviation s on every ln(step), the evidence is

    constant   integral over u of prior(u) * product over runs r of normal(m_r(u); 0, s)
    nothing    product over r of normal(m_r(0); 0, s)
    else       product over r of normal(m_r(0); 0, sqrt(s^2 + ELSE^2))

and the probability of a hypothesis its share of the sum (Bayes' rule). The integral weighs every
value that would do, so a constant that would have to be far off, or just so, pays for it; what is
common to all runs and what differs between them count alike. docs/explain/fit.md derives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Time factors beyond these are no explanation: 64 times slower or faster.
LIMIT = log(64.0)
#: Log time factors at which the evidence is summed; 0 is one of them.
GRID: Array = np.linspace(-LIMIT, LIMIT, 4001)
#: A constant that is off is so by up to this factor in nine of ten cases, either way. One figure
#: for all: how well a constant is known when all works says little about what fails.
USUAL_FAULT = 2.5
#: Degrees of freedom of the prior (Student's t): a cable can run at a tenth of its rate.
FREEDOM = 3.0
#: Half of a 90 % interval over the standard deviation of a normal distribution.
Z90 = 1.645
#: Standard deviation of ln(measured / predicted) when something else is off.
ELSE = 0.3

NOTHING, SOMETHING_ELSE = "nothing", "else"


def log_density(misses: Array, noise: float) -> Array:
    """Returns ln(prior x likelihood) on `GRID` for misses of shape (runs, grid points)."""
    return _log_normal(misses, noise).sum(axis=0) + LOG_PRIOR


def probabilities(
    misses: Mapping[str, Array], gaps: Sequence[float], noise: float
) -> dict[str, float]:
    """Returns the probability of every constant in `misses`, of `NOTHING` and `SOMETHING_ELSE`.

    `misses` has ln(predicted / measured) of shape (runs, grid points) by constant, `gaps` the
    ln(measured / predicted) as things stand; `noise` the standard deviation of both.
    """
    step = float(GRID[1] - GRID[0])
    evidence = {
        constant: float(np.logaddexp.reduce(log_density(values, noise))) + log(step)
        for constant, values in misses.items()
    }
    as_is = np.asarray(gaps, dtype=np.float64)
    evidence[NOTHING] = float(_log_normal(as_is, noise).sum())
    evidence[SOMETHING_ELSE] = float(_log_normal(as_is, float(np.hypot(noise, ELSE))).sum())
    total = float(np.logaddexp.reduce(np.array(list(evidence.values()))))
    return {name: float(np.exp(value - total)) for name, value in evidence.items()}


def quantiles(log_densities: Array, shares: Sequence[float]) -> list[float]:
    """Returns the log time factors below which these shares of the probability lie."""
    weight = np.exp(log_densities - log_densities.max())
    below = np.cumsum(weight) / weight.sum()
    return [float(np.interp(share, below, GRID)) for share in shares]


def _log_normal(values: Array, sigma: float) -> Array:
    return -0.5 * (values / sigma) ** 2 - log(sigma)


def _log_prior() -> Array:
    sigma = log(USUAL_FAULT) / Z90
    shape = -0.5 * (FREEDOM + 1.0) * np.log1p((GRID / sigma) ** 2 / FREEDOM)
    return shape - np.logaddexp.reduce(shape) - log(float(GRID[1] - GRID[0]))


LOG_PRIOR: Array = _log_prior()
