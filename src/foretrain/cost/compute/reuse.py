"""How often the rows of a table are read again: distinct rows, and what the hottest rows serve.

    uniform    U = E (1 - (1 - 1/E)**N)
    Zipf       p_k = k**-s / H_s(E):  U = sum over k of 1 - (1 - p_k)**N, and the X hottest rows
               serve H_s(X) / H_s(E) of the lookups
    measured   U = distinct x N, and the hottest rows serve what the histogram's bins say

H_s(n) is the generalised harmonic number, by the Euler-Maclaurin formula beyond the first terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import expm1, log, log1p

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Terms of a harmonic number that are added one by one.
_EXACT = 16
#: Slices of the sum over rows on a logarithmic scale; 200 agree with the full sum to 0.1 %.
_SLICES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Rows that lookups find; `served` says how much of the lookups the hottest rows serve."""

    rows: float
    distinct: float
    exponent: float = 0.0
    bins: tuple[tuple[float, float], ...] = ()

    def served(self, hottest: float) -> float:
        """Returns the share of the lookups that go to the `hottest` rows, in [0, 1]."""
        if self.exponent:
            hottest = min(max(hottest, 0.0), self.rows)
            if hottest < 1.0:
                return hottest / harmonic(self.rows, self.exponent)
            return harmonic(hottest, self.exponent) / harmonic(self.rows, self.exponent)
        if not self.bins:
            return min(1.0, max(hottest, 0.0) / self.rows)
        share, left = 0.0, hottest
        for row_share, lookup_share in self.bins:
            here = row_share * self.distinct
            if here > left:
                return share + lookup_share * left / here
            share, left = share + lookup_share, left - here
        return min(1.0, share)


def reuse_of(shape: Mapping[str, float], lookups: float) -> Reuse:
    """Returns the reuse of a table of an embedding-bag event under `lookups` lookups."""
    rows, exponent = max(shape["rows"], 1.0), shape.get("zipf", 0.0)
    if "distinct" in shape:
        distinct = min(rows, max(1.0, shape["distinct"] * lookups))
        return Reuse(rows=rows, distinct=distinct, bins=_bins(shape))
    if exponent:
        distinct = zipf_distinct(rows, lookups, exponent)
        return Reuse(rows=rows, distinct=distinct, exponent=exponent)
    return Reuse(rows=rows, distinct=uniform_distinct(rows, lookups))


def _bins(shape: Mapping[str, float]) -> tuple[tuple[float, float], ...]:
    """The measured bins; without any, all rows that were read are equally hot."""
    bins: list[tuple[float, float]] = []
    while f"reuse_rows.{len(bins)}" in shape:
        i = len(bins)
        bins.append((shape[f"reuse_rows.{i}"], shape[f"reuse_lookups.{i}"]))
    return tuple(bins) or ((1.0, 1.0),)


def uniform_distinct(rows: float, lookups: float) -> float:
    """Returns how many of `rows` rows uniform lookups find on average."""
    if rows <= 1.0:
        return min(1.0, lookups)
    return -rows * expm1(lookups * log1p(-1.0 / rows))


def zipf_distinct(rows: float, lookups: float, exponent: float) -> float:
    """Returns how many of `rows` rows lookups with Zipf popularity find on average."""
    total = harmonic(rows, exponent)

    def found(ranks: Array) -> Array:
        p = np.minimum(ranks**-exponent / total, 1.0 - 1e-12)
        return -np.expm1(lookups * np.log1p(-p))

    first = int(min(rows, _EXACT))
    distinct = float(found(np.arange(1.0, first + 1.0)).sum())
    if rows <= first:
        return distinct
    low, step = log(first + 0.5), (log(rows + 0.5) - log(first + 0.5)) / _SLICES
    edges = np.exp(low + np.arange(_SLICES + 1) * step)
    middles = np.exp(low + (np.arange(_SLICES) + 0.5) * step)
    distinct += float((np.diff(edges) * found(middles)).sum())
    return min(distinct, rows, lookups)


def harmonic(n: float, exponent: float) -> float:
    """Returns the generalised harmonic number: the sum of k**-exponent for k from 1 to n."""
    first = int(min(n, _EXACT))
    total = sum(k**-exponent for k in range(1, first + 1))
    if n <= first:
        return total
    a, b = float(first), n
    integral = (
        log(b / a)
        if exponent == 1.0
        else (b ** (1 - exponent) - a ** (1 - exponent)) / (1 - exponent)
    )
    slope = exponent * (a ** (-exponent - 1) - b ** (-exponent - 1)) / 12.0
    return total + integral + (b**-exponent - a**-exponent) / 2.0 + slope
