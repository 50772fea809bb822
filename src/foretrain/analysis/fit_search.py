"""The value that one constant of the cost model would have to take.

For one run: where the prediction equals the measured step. For several: the most probable value,
see fit_posterior.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from foretrain.analysis.fit_posterior import GRID, LIMIT, Z90, Array, log_density, quantiles
from foretrain.analysis.fit_response import Response, StepModel, factor_of

#: Where a response is simulated before a search adds points.
FIRST_POINTS = (-log(4.0), -log(1.6), log(1.6), log(4.0))
#: A search ends when the next point is this close to a simulated one, in log time factor or as a
#: share of the 90 % interval.
TOLERANCE, SHARE = 5e-4, 0.1
MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run with its measured step."""

    name: str
    model: StepModel
    step_s: float

    @property
    def log_gap(self) -> float:
        """Returns ln(measured / predicted)."""
        return log(self.step_s / self.model.base_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What one constant would have to be; `factor` None: no value of it explains the runs.

    `factor` multiplies the efficiency, the bandwidth or the host cost, `low` to `high` is its 90 %
    interval if this constant is what is off; `band` is the half-width, as a factor, of the 90 %
    band in which the cost model knows the constant. `steps_s` are the predicted steps with it,
    `misfit` the root mean square of ln(predicted / measured).
    """

    constant: str
    factor: float | None
    band: float
    steps_s: tuple[float, ...]
    misfit: float
    low: float = 0.0
    high: float = float("inf")
    reason: str = ""

    @property
    def distance(self) -> float:
        """Returns how many half-widths of the 90 % band the factor is away from 1."""
        return abs(log(self.factor)) / log(self.band) if self.factor else float("inf")

    @property
    def plausibility(self) -> str:
        """Returns 'plausible' within the 90 % band, 'unlikely' within twice, or 'implausible'."""
        if self.distance <= 1.0:
            return "plausible"
        return "unlikely" if self.distance <= 2.0 else "implausible"


def exact(runs: Sequence[Measured], constant: str, noise: float) -> Explanation:
    """Returns the value at which the prediction of the one run equals its measured step."""
    run = runs[0]
    response = run.model.response(constant)
    if not usable(runs, constant):
        return impossible(runs, constant, _idle_reason(constant))
    low, high = 0.0, 0.0
    step = log(1.6) if run.log_gap > 0 else -log(1.6)
    while (response.at(high) - run.step_s) * step < 0.0 and abs(high) < LIMIT:
        low, high = high, max(-LIMIT, min(LIMIT, 2.0 * high + step))
    if (response.at(high) - run.step_s) * step < 0.0:
        way = "faster" if step < 0 else "slower"
        limit = f"even {exp(LIMIT):.0f} times {way} it gives {response.at(high):.4g} s"
        return impossible(runs, constant, limit)
    log_time = _root(response, run.step_s, *sorted((low, high)))
    slope = response.slope(log_time)
    error = Z90 * noise / slope if slope > 0.0 else 0.0
    return _explanation(runs, constant, log_time, (log_time - error, log_time + error))


def _root(response: Response, target_s: float, low: float, high: float) -> float:
    """Returns where a response crosses a step time: secant in the time factor, with bisection."""
    for i in range(40):
        below, above = response.at(low), response.at(high)
        x_low, x_high = exp(low), exp(high)
        middle = 0.5 * (low + high)
        if i % 3 < 2 and above > below:
            x = x_low + (target_s - below) / (above - below) * (x_high - x_low)
            middle = log(min(max(x, x_low), x_high))
        if high - low < TOLERANCE or abs(response.at(middle) / target_s - 1.0) < TOLERANCE:
            return middle
        if response.at(middle) < target_s:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def usable(runs: Sequence[Measured], constant: str) -> bool:
    """Returns whether the constant decides anything in any of the runs."""
    return any(
        run.model.response(constant).works and run.model.log_width(constant) > 0.0 for run in runs
    )


def misses(runs: Sequence[Measured], constant: str) -> Array:
    """Returns ln(predicted / measured) of shape (runs, points of GRID), from what was simulated."""
    return np.array(
        [np.log(run.model.response(constant).between(GRID) / run.step_s) for run in runs]
    )


def most_probable(
    runs: Sequence[Measured], constant: str, noise: float, *, edges: bool = False
) -> Explanation:
    """Returns the most probable value of one constant for several runs, and its interval.

    Simulates the runs around that value until straight lines between the points serve; with
    `edges` also around the ends of the interval, which the evidence needs.
    """
    if not usable(runs, constant):
        return impossible(runs, constant, _idle_reason(constant))
    responses = [run.model.response(constant) for run in runs]
    working = [response for response in responses if response.works]
    for response in working:
        for point in FIRST_POINTS:
            response.at(point)
    best, low, high = _summary(runs, constant, noise)
    for _ in range(MOST_ROUNDS):
        near = max(TOLERANCE, SHARE * (high - low))
        points = (best, low, high) if edges else (best,)
        new = [p for p in points if max(r.gap(p) for r in working) > near]
        if not new:
            break
        for response in working:
            for point in new:
                response.at(point)
        best, low, high = _summary(runs, constant, noise)
    return _explanation(runs, constant, best, (low, high))


def _summary(runs: Sequence[Measured], constant: str, noise: float) -> tuple[float, float, float]:
    """Returns the most probable log time factor and its 90 % interval."""
    density = log_density(misses(runs, constant), noise)
    low, high = quantiles(density, (0.05, 0.95))
    return float(GRID[int(np.argmax(density))]), low, high


def _explanation(
    runs: Sequence[Measured], constant: str, log_time: float, interval: tuple[float, float]
) -> Explanation:
    steps = tuple(run.model.response(constant).at(log_time) for run in runs)
    low, high = sorted(factor_of(constant, edge) for edge in interval)
    return Explanation(
        constant=constant,
        factor=factor_of(constant, log_time),
        band=_band(runs, constant),
        steps_s=steps,
        misfit=_root_mean_square([log(s / run.step_s) for s, run in zip(steps, runs, strict=True)]),
        low=low,
        high=high,
    )


def impossible(runs: Sequence[Measured], constant: str, reason: str) -> Explanation:
    """Returns the explanation that no value of the constant gives."""
    return Explanation(
        constant=constant,
        factor=None,
        band=_band(runs, constant),
        steps_s=tuple(run.model.base_s for run in runs),
        misfit=_root_mean_square([run.log_gap for run in runs]),
        reason=reason,
    )


def _band(runs: Sequence[Measured], constant: str) -> float:
    """Returns the mean 90 % band of the constant over the runs that use it, 1 where none does."""
    models = [run.model for run in runs if run.model.response(constant).works]
    widths = [width for model in models if (width := model.log_width(constant)) > 0.0]
    return exp(sum(widths) / len(widths)) if widths else 1.0


def _root_mean_square(values: Sequence[float]) -> float:
    return sqrt(sum(value**2 for value in values) / len(values))


def _idle_reason(constant: str) -> str:
    if constant == "scaleup":
        return "nothing is sent inside a node"
    return "nothing is sent over the NICs" if constant == "nic" else "it takes no time"
