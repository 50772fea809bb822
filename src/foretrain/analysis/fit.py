"""What measured steps imply about the constants of the cost model.

Four constants may be off, each for all its events at once: the efficiency of operators, the
bandwidth of links inside a node, that of the NICs, the host's time per launch. One measured step
is one equation: it says what each of them would have to be, not which one it is. Steps of runs
that differ in plan lean on the constants differently and can tell. For one constant with time
factor t = exp(u) and runs r, the most probable u minimises

    score(u) = sum_r (ln(T_r(u) / measured_r) / noise)^2 + (u / sigma)^2

with the log-normal prior of the cost model's own band, sigma = ln(band) / 1.645. A difference of
4 in score is odds of 7 to 1. Explained in docs/how-to/fit-a-measured-time.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from foretrain.analysis.fit_response import CONSTANTS, Z90, Response, StepModel, factor_of
from foretrain.errors import InputError, Problem

#: Repeated measurements of a step differ by about this share.
NOISE = 0.02
#: A cause is named when its score is this much better than that of any other: odds of 7 to 1.
DECISIVE = 4.0
#: A constant explains the runs when it leaves no more than this many noises (root mean square).
MISFIT = 3.0
#: Time factors beyond these are no explanation: 64 times slower or faster.
LIMIT = log(64.0)
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
    square of ln(predicted / measured). `score` is comparable between constants, lower is better.
    `error` is the factor's own 90 % interval as a factor.
    """

    constant: str
    factor: float | None
    prior: float
    steps_s: tuple[float, ...]
    misfit: float
    score: float
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The outcome; `verdict` is one of five words.

    - `one run`: a single run, nothing is named; `explanations` lists what alone could explain it;
    - `agrees`: prediction and measurement differ by no more than noise;
    - `named`: `named` explains the runs and nothing else does as well;
    - `tied`: the constants in `tied` explain them about equally well;
    - `none`: no single constant explains them.

    `explanations` holds all constants, the best score first.
    """

    runs: tuple[Measured, ...]
    verdict: str
    explanations: tuple[Explanation, ...]
    named: str | None = None
    tied: tuple[str, ...] = ()

    def of(self, constant: str) -> Explanation:
        """Returns the explanation by one constant."""
        return next(e for e in self.explanations if e.constant == constant)


def fit(runs: Sequence[Measured], *, noise: float = NOISE) -> Fit:
    """Returns what the measured steps of runs on one cluster imply.

    Raises:
        InputError: the runs differ in device, links, fabric or stack.
    """
    _check_same_machine(runs)
    search = _exact if len(runs) == 1 else _most_probable
    found = [search(runs, constant, noise) for constant in CONSTANTS]
    found.sort(key=lambda e: (e.factor is None, e.score))
    explanations = tuple(found)
    gaps = sum((run.log_gap / noise) ** 2 for run in runs)
    if gaps <= len(runs) + 2.0 * sqrt(2.0 * len(runs)):
        return Fit(runs=tuple(runs), verdict="agrees", explanations=explanations)
    if len(runs) == 1:
        return Fit(runs=tuple(runs), verdict="one run", explanations=explanations)
    return _compared(runs, explanations, gaps, noise)


def _compared(
    runs: Sequence[Measured], explanations: tuple[Explanation, ...], gaps: float, noise: float
) -> Fit:
    good = [
        e
        for e in explanations
        if e.factor is not None and e.misfit <= MISFIT * noise and e.score < gaps - DECISIVE
    ]
    if not good:
        return Fit(runs=tuple(runs), verdict="none", explanations=explanations)
    close = tuple(e.constant for e in good if e.score < good[0].score + DECISIVE)
    if len(close) > 1:
        return Fit(runs=tuple(runs), verdict="tied", explanations=explanations, tied=close)
    return Fit(runs=tuple(runs), verdict="named", explanations=explanations, named=good[0].constant)


def _check_same_machine(runs: Sequence[Measured]) -> None:
    """Raises InputError unless all runs share what the constants belong to."""
    problems: list[Problem] = []
    first = _machine(runs[0])
    for other in runs[1:]:
        for word, value in _machine(other).items():
            if value != first[word] and "none" not in (value, first[word]):
                problems.append(
                    Problem(
                        what=f"the {word} differs from that of {runs[0].name} ({first[word]})",
                        where=other.name,
                        value=value,
                        way_out="fit runs of one cluster and one stack together",
                    )
                )
    if problems:
        raise InputError(problems)


def _machine(run: Measured) -> dict[str, str]:
    """Returns what the constants belong to; a single node has no fabric ("none")."""
    cluster = run.model.run.cluster
    return {
        "device": cluster.device.name,
        "link inside a node": cluster.scaleup,
        "fabric": cluster.fabric,
        "stack": run.model.run.stack.name,
    }


def _exact(runs: Sequence[Measured], constant: str, noise: float) -> Explanation:
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
    return _explanation(runs, constant, log_time, band, noise)


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


def _most_probable(runs: Sequence[Measured], constant: str, noise: float) -> Explanation:
    """Returns the maximum a posteriori over one constant for several runs."""
    responses = [run.model.response(constant) for run in runs]
    widths = [run.model.log_width(constant) for run in runs]
    used = [w for w, response in zip(widths, responses, strict=True) if response.works and w > 0]
    if not used:
        return _impossible(runs, constant, _idle_reason(constant))
    log_width = sum(used) / len(used)
    for response in responses:
        for point in FIRST_POINTS:
            response.at(point)
    edge = FIRST_POINTS[-1]
    best = 0.0
    for _ in range(12):
        grid = np.linspace(-edge, edge, 4001)
        score = (grid * Z90 / log_width) ** 2
        for run, response in zip(runs, responses, strict=True):
            score = score + (np.log(response.between(grid) / run.step_s) / noise) ** 2
        best = float(grid[int(np.argmin(score))])
        if abs(best) > edge - TOLERANCE and edge < LIMIT:
            edge = min(LIMIT, 2.0 * edge)
            best = edge if best > 0 else -edge
        if max(response.gap(best) for response in responses if response.works) < TOLERANCE:
            break
        for response in responses:
            response.at(best)
    return _explanation(runs, constant, best, exp(log_width), noise)


def _explanation(
    runs: Sequence[Measured], constant: str, log_time: float, band: float, noise: float
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
        score=sum((miss / noise) ** 2 for miss in misses) + (log_time / sigma) ** 2,
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
        reason=reason,
    )


def _idle_reason(constant: str) -> str:
    if constant == "scaleup":
        return "nothing is sent inside a node"
    return "nothing is sent over the NICs" if constant == "nic" else "it takes no time"
