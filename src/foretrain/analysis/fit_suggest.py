"""Which three plans of a job tell the constants apart best, before anything is measured.

Plans are simulated with each constant off either way: those that lean on one constant by their
settings, those that differ most, and then neighbours of what shows best the constant that the best
three plans so far show worst. Choosing is in fit_choice.py; the share of faults that `fit` would
name from the three plans is found by trying it on simulated measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from foretrain.analysis.fit import NOISE, judge
from foretrain.analysis.fit_choice import COUNT, FAULTS, Chooser, Triple, effect
from foretrain.analysis.fit_plans import OtherPlan, distance, spread
from foretrain.analysis.fit_posterior import GRID, Array, probabilities
from foretrain.analysis.fit_probes import extremes, probing_plans, shorter_plans
from foretrain.analysis.fit_quick import quick_model
from foretrain.analysis.fit_response import CONSTANTS, StepModel, log_time_of
from foretrain.errors import ForetrainError, InputError, Problem
from foretrain.predict import predict
from foretrain.run.spec import RunSpec

#: Plans that are looked at before the search, beside the extreme ones: those that differ most.
MOST_SPREAD = 12
#: Rounds of the search, constants it helps in one, and plans it looks at for each.
ROUNDS, HELPED, NEIGHBOURS = 3, 2, 4
#: The search ends where a round adds less than this to the chances of a name, all constants added.
LITTLE = 0.02
#: A constant whose faults are named in this share of cases needs no better plan.
GOOD = 0.9
#: A constant whose faults are named less often than this is hidden: a shorter sequence may show it
HIDDEN = 0.75
#: Plans this many times slower than the fastest are not worth measuring, a few steps are enough.
SLOWEST = 8.0
#: What may be simulated, in tasks of the simulator (about 20 us each), and what a plan costs beside
#: its simulations. A count and no clock: the same run always gets the same plans.
BUDGET, FIXED = 3_000_000, 8_000
#: Where a response is simulated: both ways for the choice, more for the plans that are chosen.
CHOICE, CHOSEN = (-log(1.6), log(1.6)), (-log(4.0), -0.2, 0.2, log(4.0))
#: Simulated measurements per fault.
DRAWS = 20

#: Is told how many plans have been looked at, and 0 at the end.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Plans worth measuring, with the share of faults of 20 to 50 % that `fit` would name.

    `named` is by constant, of simulated faults with `noise`; `steps_s` has the predicted steps. A
    constant that no plan uses is not in `named`. `tried` plans were simulated.
    """

    plans: tuple[OtherPlan, ...]
    steps_s: tuple[float, ...]
    named: Mapping[str, float]
    noise: float
    tried: int


def suggest(run: RunSpec, *, noise: float = NOISE, progress: Progress | None = None) -> Suggestion:
    """Returns the three plans of this model, batch and cluster that tell constants apart best.

    Raises:
        InputError: fewer than three plans fit in memory.
    """
    plans = probing_plans(run)
    search = _Search(plans=plans, chooser=Chooser(noise=noise), progress=progress)
    search.look([*extremes(plans), *spread(plans, MOST_SPREAD)])
    chosen = search.best()
    for _ in range(ROUNDS):
        wishes = search.wishes(chosen) if chosen else search.near(plans[0], MOST_SPREAD)
        if not wishes:
            break
        before = search.worth(chosen)
        search.look(wishes)
        chosen = search.best()
        if chosen and search.worth(chosen) < before + LITTLE:
            break
    if search.hidden(chosen):
        search.look(shorter := shorter_plans(run), rare=True)
        chosen = search.best() if shorter else chosen
    while chosen and not search.whole_fits(chosen):
        chosen = search.best()
    if chosen is None:
        raise InputError(
            Problem(
                what=f"fewer than {COUNT} plans of this job differ and fit in memory",
                where="--suggest",
                value=f"{len(search.seen)} plan(s) tried",
                way_out="a smaller model or sequence, more devices, or runs that differ in batch",
            )
        )
    return _suggestion(search, chosen)


@dataclass(slots=True, kw_only=True)
class _Search:
    """Plans looked at so far, by their place in `plans`, and the work that is left."""

    plans: list[OtherPlan]
    chooser: Chooser
    progress: Progress | None
    seen: dict[int, StepModel] = field(default_factory=dict[int, StepModel])
    refused: set[int] = field(default_factory=set[int])  # cannot be modelled, or take too long
    fits: dict[int, bool] = field(default_factory=dict[int, bool])
    work_left: float = BUDGET

    def look(self, plans: Sequence[OtherPlan], *, rare: bool = False) -> None:
        """Simulates plans with every constant off either way, in order, while work is left.

        Of `rare` plans three that are chosen hold at most one.
        """
        known = {id(plan): i for i, plan in enumerate(self.plans)}
        for plan in plans:
            i = known.setdefault(id(plan), len(self.plans))
            if i == len(self.plans):
                self.plans.append(plan)
            if i in self.seen or i in self.refused:
                continue
            model = self._modelled(plan)
            if model is None:
                self.refused.add(i)
                continue
            for constant in CONSTANTS:
                for point in CHOICE:
                    model.response(constant).at(point)
            self.seen[i] = model
            self.chooser.add(i, model, rare=rare)
            if self.progress is not None:
                self.progress(len(self.seen))

    def _modelled(self, plan: OtherPlan) -> StepModel | None:
        if self.work_left <= 0.0:
            return None
        try:
            model = quick_model(plan.run)
        except ForetrainError:
            return None  # not a plan that can be modelled
        work = FIXED + (1 + len(CHOICE) * len(CONSTANTS)) * model.num_tasks
        if work > self.work_left:
            return None
        self.work_left -= work
        return model

    def best(self) -> Triple | None:
        """Returns the most telling three plans that are not slow and fit in memory."""
        left = self._not_slow()
        while (chosen := self.chooser.best(left)) is not None:
            unfit = [i for i in chosen if not self._fits(i)]
            if not unfit:
                return chosen
            left = [i for i in left if i not in unfit]
        return None

    def worth(self, chosen: Triple | None) -> float:
        """Returns the chances of a name with three plans, all constants added."""
        return sum(self.chooser.chances(chosen).values()) if chosen else 0.0

    def wishes(self, chosen: Triple) -> list[OtherPlan]:
        """Returns plans near those that show best what the chosen plans show worst."""
        chances = self.chooser.chances(chosen)
        used = [c for c in CONSTANTS if any(m.response(c).works for m in self.seen.values())]
        shown = [c for c in used if chances[c] < GOOD]
        worst = sorted(shown, key=lambda c: chances[c])
        found: list[OtherPlan] = []
        for constant in worst[:HELPED]:
            shown = sorted(self._not_slow(), key=lambda i: -self._exposure(i, constant))
            near = next((self.plans[i] for i in shown if self._fits(i)), self.plans[0])
            ranked = self.near(near, HELPED * NEIGHBOURS)
            found += [plan for plan in ranked if plan not in found][:NEIGHBOURS]
        return found

    def near(self, plan: OtherPlan, count: int) -> list[OtherPlan]:
        """Returns the plans most like this one that were not looked at yet."""
        known = self.seen.keys() | self.refused
        unseen = [other for i, other in enumerate(self.plans) if i not in known]
        return sorted(unseen, key=lambda other: distance(other, plan))[:count]

    def hidden(self, chosen: Triple | None) -> bool:
        """Returns whether the cluster has a constant that three plans hardly show."""
        cluster = self.plans[0].run.cluster
        missing = ("nic",) if cluster.nodes == 1 else ()
        missing = (*missing, "scaleup") if cluster.devices_per_node == 1 else missing
        if chosen is None:
            return False
        chances = self.chooser.chances(chosen)
        return any(chances[c] < HIDDEN for c in CONSTANTS if c not in missing)

    def _exposure(self, i: int, constant: str) -> float:
        response = self.seen[i].response(constant)
        low, high = (log(response.at(point)) for point in CHOICE)
        return high - low

    def _not_slow(self) -> list[int]:
        """Returns what is not slow; a shorter sequence is no measure of it."""
        given = self.plans[0].run.training.sequence
        steps = [m.base_s for m in self.seen.values() if m.run.training.sequence == given]
        fastest = min(steps, default=0.0)
        return [i for i, model in self.seen.items() if model.base_s <= SLOWEST * fastest]

    def whole_fits(self, chosen: Triple) -> bool:
        """Returns whether plans fit with all their micro-batches; those that do not are out."""
        for i in chosen:
            self.fits[i] = predict(self.plans[i].run).fits
        return all(self.fits[i] for i in chosen)

    def _fits(self, i: int) -> bool:
        if i not in self.fits:
            self.fits[i] = predict(self.seen[i].short).fits
        return self.fits[i]


def _suggestion(search: _Search, chosen: Triple) -> Suggestion:
    models = [search.seen[i] for i in chosen]
    for model in models:
        for constant in CONSTANTS:
            for point in CHOSEN:
                model.response(constant).at(point)
    noise = search.chooser.noise
    if search.progress is not None:
        search.progress(0)
    return Suggestion(
        plans=tuple(search.plans[i] for i in chosen),
        steps_s=tuple(model.base_s for model in models),
        named=forecast(models, noise),
        noise=noise,
        tried=len(search.seen),
    )


def forecast(models: Sequence[StepModel], noise: float = NOISE) -> dict[str, float]:
    """Returns by constant the share of faults of 20 to 50 % that `fit` names from these runs.

    Measurements are drawn with `noise` from a fixed seed, from what has been simulated so far.
    """
    used = [c for c in CONSTANTS if any(model.response(c).works for model in models)]
    curves = {c: np.array([effect(model, c, GRID) for model in models]) for c in used}
    random = np.random.default_rng(0)
    shares: dict[str, float] = {}
    for constant in used:
        right = 0
        for factor in FAULTS:
            truth = _values(curves[constant], log_time_of(constant, factor))
            for _ in range(DRAWS):
                gaps = truth + random.normal(0.0, noise, len(truth))
                misses = {c: curve - gaps[:, None] for c, curve in curves.items()}
                right += judge(probabilities(misses, list(gaps), noise))[1] == constant
        shares[constant] = right / (len(FAULTS) * DRAWS)
    return shares


def _values(curves: Array, at: float) -> Array:
    """Returns the values of curves (runs, points of GRID) at one log time factor."""
    found = np.zeros(len(curves))
    for i in range(len(curves)):
        curve: Array = curves[i]
        found[i] = float(np.interp(at, GRID, curve))
    return found
