"""What measured steps imply about the constants of the cost model.

Four constants may be off, each for all its events at once: the efficiency of operators, the
bandwidth of links inside a node, that of the NICs, the host's time per launch. One measured step
is one equation: it says what each of them would have to be, not which one it is. Steps of runs
that differ in plan lean on the constants differently and can tell; fit_posterior.py weighs them.
Explained in docs/explain/fit.md, used in docs/how-to/fit-a-measured-time.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.analysis.fit_posterior import NOTHING, SOMETHING_ELSE, Array, probabilities
from foretrain.analysis.fit_response import CONSTANTS
from foretrain.analysis.fit_search import Explanation, Measured, exact, misses, most_probable
from foretrain.errors import InputError, Problem

#: Repeated measurements of a step differ by about this share.
NOISE = 0.02
#: A cause is named when it is this probable: twice as probable as all else together.
NAMED = 2.0 / 3.0
#: What is this many times less probable than the best explanation is no rival of it.
NO_RIVAL = 20.0
#: Nothing needs an explanation unless one is this many times more probable than none.
NEEDED = 2.0
#: What is less probable at a first look is not simulated more closely.
HOPELESS = 1e-3
#: Up to this scatter it is tried whether a name would still hold, in steps of 10 %.
MOST_SCATTER = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The outcome; `verdict` is one of five words.

    - `one run`: a single run, nothing is named; `explanations` lists what alone could explain it;
    - `agrees`: prediction and measurement differ by no more than noise;
    - `named`: `named` explains the runs and nothing else does nearly as well;
    - `tied`: the constants in `tied`, the most probable first, cannot be told apart (a single one:
      it cannot be told from noise or from another cause);
    - `none`: no single constant explains them.

    `explanations` holds all constants, the most probable first. `probability` has those of the
    constants in use, of `nothing` and of something `else`; it is empty for one run. A name holds
    while measurement and model together scatter by no more than `holds_to` from run to run.
    """

    runs: tuple[Measured, ...]
    verdict: str
    noise: float
    explanations: tuple[Explanation, ...]
    probability: Mapping[str, float] = field(default_factory=dict[str, float])
    named: str | None = None
    holds_to: float | None = None
    tied: tuple[str, ...] = ()

    def of(self, constant: str) -> Explanation:
        """Returns the explanation by one constant."""
        return next(e for e in self.explanations if e.constant == constant)


def fit(runs: Sequence[Measured], *, noise: float = NOISE) -> Fit:
    """Returns what the measured steps of runs on one cluster imply.

    `noise` is the standard deviation of ln(measured step) around what a right model predicts.

    Raises:
        InputError: the runs differ in device, links, fabric or stack.
    """
    _check_same_machine(runs)
    if len(runs) == 1:
        return _single(runs, noise)
    gaps = [run.log_gap for run in runs]
    found = {constant: most_probable(runs, constant, noise) for constant in CONSTANTS}
    curves = {c: misses(runs, c) for c, e in found.items() if e.factor is not None}
    for constant, rough in probabilities(curves, gaps, noise).items():
        if constant in curves and rough > HOPELESS:
            found[constant] = most_probable(runs, constant, noise, edges=True)
            curves[constant] = misses(runs, constant)
    probability = probabilities(curves, gaps, noise)
    order = sorted(CONSTANTS, key=lambda c: -probability.get(c, -1.0))
    verdict, named, tied = judge(probability)
    return Fit(
        runs=tuple(runs),
        verdict=verdict,
        noise=noise,
        explanations=tuple(found[c] for c in order),
        probability=probability,
        named=named,
        holds_to=_holds_to(named, curves, gaps, noise) if named else None,
        tied=tied,
    )


def judge(probability: Mapping[str, float]) -> tuple[str, str | None, tuple[str, ...]]:
    """Returns verdict, named constant and tied constants for the probabilities of all causes."""
    ranked = sorted((c for c in CONSTANTS if c in probability), key=lambda c: -probability[c])
    best = ranked[0] if ranked else NOTHING
    if best != NOTHING and probability[best] >= NAMED:
        return "named", best, ()
    causes = (*ranked, SOMETHING_ELSE)
    if max(probability[c] for c in causes) < NEEDED * probability[NOTHING]:
        return "agrees", None, ()
    if probability[SOMETHING_ELSE] > probability[best]:
        return "none", None, ()
    tied = tuple(c for c in ranked if probability[c] * NO_RIVAL >= probability[best])
    return "tied", None, tied


def _single(runs: Sequence[Measured], noise: float) -> Fit:
    """Returns what one run implies: values that would do, the most plausible first, no name."""
    found = [exact(runs, constant, noise) for constant in CONSTANTS]
    found.sort(key=lambda e: (e.factor is None, e.distance))
    verdict = "agrees" if abs(runs[0].log_gap) <= 2.0 * noise else "one run"
    return Fit(runs=tuple(runs), verdict=verdict, noise=noise, explanations=tuple(found))


def _holds_to(
    named: str, curves: Mapping[str, Array], gaps: Sequence[float], noise: float
) -> float:
    """Returns the largest scatter, up to `MOST_SCATTER`, for which the name stays."""
    holds = noise
    while holds < MOST_SCATTER and judge(probabilities(curves, gaps, 1.1 * holds))[1] == named:
        holds *= 1.1
    return holds


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
