"""Which three of many plans would tell the constants apart best.

For three plans and a fault of one constant, the nearest rival is the other constant (or none) at
the value that comes closest in all three steps; how far it stays away says how likely `fit` is to
name the fault. Three plans are worth the chance of a name, summed over the constants, and once more
that of the constant that fares worst beside the best three plans for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log

import numpy as np
from numpy.typing import NDArray

from foretrain.analysis.fit import NAMED
from foretrain.analysis.fit_posterior import GRID, LOG_PRIOR, Array
from foretrain.analysis.fit_response import CONSTANTS, StepModel, log_time_of

#: Runs that are proposed.
COUNT = 3
#: Faults that should be recognised: factors on a constant, 20 to 50 % off either way.
FAULTS = (0.5, 0.65, 0.8, 1.2, 1.35, 1.5)
#: Values of a rival that are compared: every so many points of GRID within a factor of 6.
_NEAR = np.abs(GRID) < log(6.0)
RIVALS: Array = GRID[_NEAR][::30]
RIVAL_PRIOR: Array = LOG_PRIOR[_NEAR][::30]

Small = NDArray[np.float32]
Triple = tuple[int, int, int]


@dataclass(slots=True, kw_only=True)
class Chooser:
    """Effects of the constants on plans, by any number, and what three of them are worth.

    What was worked out for three plans is kept, so that plans can be added one after the other.
    """

    noise: float
    _apart: dict[int, Small] = field(default_factory=dict[int, "Small"])
    _alone: dict[int, Small] = field(default_factory=dict[int, "Small"])
    _rare: set[int] = field(default_factory=set[int])
    _chances: dict[Triple, Array] = field(default_factory=dict[Triple, "Array"])

    def add(self, key: int, model: StepModel, *, rare: bool = False) -> None:
        """Takes a plan in, from what was simulated of it; at most one of three may be `rare`."""
        if rare:
            self._rare.add(key)
        faults = np.array(
            [effect(model, c, np.array([log_time_of(c, f) for f in FAULTS])) for c in CONSTANTS]
        )
        rivals = np.array([effect(model, c, RIVALS) for c in CONSTANTS])
        # squared distances (constants, faults, rivals, values of a rival) in ln(step)
        apart = ((faults[:, :, None, None] - rivals[None, None, :, :]) / self.noise) ** 2
        self._apart[key] = apart.astype(np.float32)
        self._alone[key] = ((faults / self.noise) ** 2).astype(np.float32)

    def chances(self, triple: Triple) -> Mapping[str, float]:
        """Returns by constant about how likely its faults are named from three plans."""
        return dict(zip(CONSTANTS, (float(c) for c in self._chances[triple]), strict=True))

    def best(self, keys: Sequence[int]) -> Triple | None:
        """Returns the most telling three of these plans, None where there are fewer."""
        self._complete(sorted(keys))
        allowed = [t for t in combinations(sorted(keys), COUNT) if t in self._chances]
        if not allowed:
            return None
        chances = np.array([self._chances[t] for t in allowed])
        most = np.maximum(chances.max(axis=0), 1e-9)
        worth = chances.sum(axis=1) + (chances / most).min(axis=1)
        return allowed[int(np.argmax(worth))]

    def _complete(self, keys: Sequence[int]) -> None:
        """Works out the chances of all triples that are not known yet."""
        penalty = (2.0 * (_prior_of_faults()[:, :, None, None] - RIVAL_PRIOR)).astype(np.float32)
        for i, first in enumerate(keys):
            for j in range(i + 1, len(keys)):
                third = [k for k in keys[j + 1 :] if self._wanted((first, keys[j], k))]
                if not third:
                    continue
                pair = (first, keys[j])
                # twice the log odds against every rival at its best value, and against nothing
                shared = self._apart[first] + self._apart[keys[j]] + penalty
                odds = np.stack([self._apart[k] for k in third]) + shared
                # by plan, constant, fault and rival
                nearest: Array = odds.min(axis=4).astype(np.float64)
                for index in range(len(CONSTANTS)):
                    nearest[:, index, :, index] = np.inf
                none = np.stack([self._alone[k] for k in third]) + sum(self._alone[k] for k in pair)
                chance = _chance(np.minimum(nearest.min(axis=3), none)).mean(axis=2)
                for k, found in zip(third, chance, strict=True):
                    self._chances[*pair, k] = found

    def _wanted(self, triple: Triple) -> bool:
        return triple not in self._chances and len(self._rare.intersection(triple)) <= 1


def effect(model: StepModel, constant: str, log_times: Array) -> Array:
    """Returns ln(step / predicted) at log time factors of a constant."""
    return np.log(model.response(constant).between(log_times) / model.base_s)


def _prior_of_faults() -> Array:
    log_times = [[log_time_of(c, factor) for factor in FAULTS] for c in CONSTANTS]
    return np.interp(np.array(log_times), GRID, LOG_PRIOR)


def _chance(distance: Array) -> Array:
    """Returns about how likely a name is at these squared distances: 0 to 1, smooth.

    The log odds have mean d / 2 and standard deviation sqrt(d); a name takes those of `NAMED`. The
    normal distribution is taken as a logistic one, which is within 2 % of it.
    """
    d = np.clip(distance, 0.1, 1e3)
    return 1.0 / (1.0 + np.exp(-1.7 * (0.5 * d - log(NAMED / (1.0 - NAMED))) / np.sqrt(d)))
