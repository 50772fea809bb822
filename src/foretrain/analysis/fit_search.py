"""The value that one constant of the cost model would have to take.

For one run: where the prediction equals the measured step. For several: the most probable value,
see fit.py for the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from foretrain.analysis.fit_response import Z90, Response, StepModel, factor_of

#: Time factors beyond these are no explanation: 64 times slower or faster.
LIMIT = log(64.0)
#: Values further from 1 than this many half-widths of the prior are no rival of an explanation.
FAR = 6.0
#: Where a response is simulated before a search adds points.
FIRST_POINTS = (-log(4.0), -log(1.6), log(1.6), log(4.0))
#: A search ends when the next point is this close to a simulated one.
TOLERANCE = 5e-4


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

    `factor` multiplies the efficiency, the bandwidth or the host cost; `prior` is the half-width of
    its 90 % band as a factor. `steps_s` are the predicted steps with it, `misfit` the root mean
    square of ln(predicted / measured). `score` (with the prior) is comparable between constants,
    lower is better; `data_score` is its part from the measurements, at the value within `FAR`
    half-widths of the prior that fits them best. `error` is the factor's own 90 % interval, as a
    factor.
    """

    constant: str
    factor: float | None
    prior: float
    steps_s: tuple[float, ...]
    misfit: float
    score: float
    data_score: float
    error: float = 1.0
    reason: str = ""

    @property
    def distance(self) -> float:
        """Returns how many half-widths of the 90 % band the factor is away from 1."""
        return abs(log(self.factor)) / log(self.prior) if self.factor else float("inf")

    @property
    def plausibility(self) -> str:
        """Returns 'plausible' within the 90 % band, 'unlikely' within twice, or 'implausible'."""
        if self.distance <= 1.0:
            return "plausible"
        return "unlikely" if self.distance <= 2.0 else "implausible"


def exact(runs: Sequence[Measured], constant: str, noise: float) -> Explanation:
    """Returns the value at which the prediction of the one run equals its measured step."""
    run = runs[0]
    response, band = run.model.response(constant), exp(run.model.log_width(constant))
    if not response.works or band <= 1.0:
        return _impossible(runs, constant, _idle_reason(constant))
    low, high = 0.0, 0.0
    step = log(1.6) if run.log_gap > 0 else -log(1.6)
    while (response.at(high) - run.step_s) * step < 0.0 and abs(high) < LIMIT:
        low, high = high, max(-LIMIT, min(LIMIT, 2.0 * high + step))
    if (response.at(high) - run.step_s) * step < 0.0:
        way = "faster" if step < 0 else "slower"
        limit = f"even {exp(LIMIT):.0f} times {way} it gives {response.at(high):.4g} s"
        return _impossible(runs, constant, limit)
    log_time = _root(response, run.step_s, *sorted((low, high)))
    return _explanation(runs, constant, log_time, band, noise, 0.0)


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


def most_probable(runs: Sequence[Measured], constant: str, noise: float) -> Explanation:
    """Returns the maximum a posteriori over one constant for several runs."""
    models = [run.model for run in runs if run.model.response(constant).works]
    widths = [width for model in models if (width := model.log_width(constant)) > 0.0]
    if not widths:
        return _impossible(runs, constant, _idle_reason(constant))
    log_width = sum(widths) / len(widths)
    for model in models:
        for point in FIRST_POINTS:
            model.response(constant).at(point)
    far = min(LIMIT, FAR * log_width)
    free, data_score = _lowest(runs, constant, noise, None, far)
    best, _ = _lowest(runs, constant, noise, log_width, max(far, abs(free)))
    return _explanation(runs, constant, best, exp(log_width), noise, data_score)


def _lowest(
    runs: Sequence[Measured], constant: str, noise: float, log_width: float | None, edge: float
) -> tuple[float, float]:
    """Returns the log time factor in [-edge, edge] with the lowest score, and that score.

    Without `log_width` the prior is left out.
    """
    grid = np.linspace(-edge, edge, 4001)
    responses = [run.model.response(constant) for run in runs]
    best = lowest = 0.0
    for _ in range(12):
        score = np.zeros_like(grid) if log_width is None else _surprise(grid, log_width)
        for run, response in zip(runs, responses, strict=True):
            score = score + (np.log(response.between(grid) / run.step_s) / noise) ** 2
        index = int(np.argmin(score))
        best, lowest = float(grid[index]), float(score[index])
        if max(response.gap(best) for response in responses if response.works) < TOLERANCE:
            break
        for response in responses:
            response.at(best)
    return best, lowest


def _surprise(log_time: NDArray[np.float64], log_width: float) -> NDArray[np.float64]:
    """Returns -2 ln of the prior relative to its maximum: Student's t with three degrees."""
    return 4.0 * np.log1p((log_time * Z90 / log_width) ** 2 / 3.0)


def _explanation(
    runs: Sequence[Measured],
    constant: str,
    log_time: float,
    band: float,
    noise: float,
    data_score: float,
) -> Explanation:
    steps = tuple(run.model.response(constant).at(log_time) for run in runs)
    misses = [log(step / run.step_s) for step, run in zip(steps, runs, strict=True)]
    sigma = log(band) / Z90
    slopes = [run.model.response(constant).slope(log_time) for run in runs]
    precision = sum((slope / noise) ** 2 for slope in slopes)
    if len(runs) > 1:  # one run's value is what its step implies, whatever was likely before
        precision += 1.0 / sigma**2
    return Explanation(
        constant=constant,
        factor=factor_of(constant, log_time),
        prior=band,
        steps_s=steps,
        misfit=sqrt(sum(miss**2 for miss in misses) / len(misses)),
        score=sum((miss / noise) ** 2 for miss in misses)
        + float(_surprise(np.array(log_time), log(band))),
        data_score=data_score,
        error=exp(Z90 / sqrt(precision)) if precision > 0.0 else 1.0,
    )


def _impossible(runs: Sequence[Measured], constant: str, reason: str) -> Explanation:
    return Explanation(
        constant=constant,
        factor=None,
        prior=exp(runs[0].model.log_width(constant)),
        steps_s=tuple(run.model.base_s for run in runs),
        misfit=sqrt(sum(run.log_gap**2 for run in runs) / len(runs)),
        score=float("inf"),
        data_score=float("inf"),
        reason=reason,
    )


def _idle_reason(constant: str) -> str:
    if constant == "scaleup":
        return "nothing is sent inside a node"
    return "nothing is sent over the NICs" if constant == "nic" else "it takes no time"
