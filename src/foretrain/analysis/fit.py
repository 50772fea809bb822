"""What measured steps imply about the constants of the cost model.

Four constants may be off, each for all its events at once: the efficiency of operators, the
bandwidth of links inside a node, that of the NICs, the host's time per launch. One measured step
is one equation: it says what each of them would have to be, not which one it is. Steps of runs
that differ in plan lean on the constants differently and can tell. For one constant with time
factor t = exp(u) and runs r, the most probable u minimises

    score(u) = sum_r (ln(T_r(u) / measured_r) / noise)^2 + 4 ln(1 + (u / sigma)^2 / 3)

The prior is the cost model's own band, sigma = ln(band) / 1.645. It is log-normal in its middle and
has the tails of Student's t: a band says little about what lies far outside of it (a cable that
runs at half its rate), so there the measurements decide. A cause is named when nothing else comes
close with its prior (a difference of 3 in score is odds of 4 to 1), and nothing else fits the
measurements as well without it: a prior alone names no cause. Explained in
docs/how-to/fit-a-measured-time.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from foretrain.analysis.fit_response import CONSTANTS
from foretrain.analysis.fit_search import Explanation, Measured, exact, most_probable
from foretrain.errors import InputError, Problem

#: Repeated measurements of a step differ by about this share.
NOISE = 0.02
#: A cause is named when its score is this much better than that of any other: odds of 4 to 1.
DECISIVE = 3.0
#: A constant explains the runs when it leaves no more than this many noises (root mean square).
MISFIT = 3.0


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
    search = exact if len(runs) == 1 else most_probable
    found = [search(runs, constant, noise) for constant in CONSTANTS]
    found.sort(key=lambda e: (e.factor is None, e.score))
    explanations = tuple(found)
    gaps = sum((run.log_gap / noise) ** 2 for run in runs)
    if gaps <= (4.0 if len(runs) == 1 else len(runs) + 3.0 * sqrt(2.0 * len(runs))):
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
    if not good:  # gaps of two noises that nothing explains better than chance are no gaps
        verdict = "agrees" if gaps <= 4.0 * len(runs) else "none"
        return Fit(runs=tuple(runs), verdict=verdict, explanations=explanations)
    best = good[0]
    close = tuple(
        e.constant
        for e in explanations
        if e is best
        or (e in good and e.score < best.score + DECISIVE)
        or e.data_score < best.data_score + DECISIVE
    )
    if len(close) > 1:
        return Fit(runs=tuple(runs), verdict="tied", explanations=explanations, tied=close)
    return Fit(runs=tuple(runs), verdict="named", explanations=explanations, named=best.constant)


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
