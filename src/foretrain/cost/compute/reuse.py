"""How often the rows of tables are read again: distinct rows, and what the hottest rows serve.

    uniform    U = E (1 - (1 - 1/E)**N)
    Zipf       p_k = k**-s / H_s(E):  U = sum over k of 1 - (1 - p_k)**N, and the X hottest rows
               serve H_s(X) / H_s(E) of the lookups
    measured   U = distinct x N, and the hottest rows serve what the histogram's bins say

H_s(n) is the generalised harmonic number, by the Euler-Maclaurin formula beyond the first terms.
Everything works on many tables at once: arrays with one element per table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bins = tuple[tuple[Array, Array], ...]

#: Terms of a harmonic number that are added one by one.
_EXACT = 16
#: Slices of the sum over rows on a logarithmic scale; 200 agree with the full sum to 0.1 %.
_SLICES = 200
#: Tables at a time: their slices stay in the cache of a core.
_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Rows that lookups find; `served` says how much of the lookups the hottest rows serve.

    `exponent`: of Zipf popularity, 0 where it is none. `measured`: where `bins` (share of the
    distinct rows, share of the lookups, hottest first) say how popular rows are.
    """

    rows: Array
    distinct: Array
    exponent: Array
    measured: NDArray[np.bool_]
    bins: Bins = ()

    def served(self, hottest: Array) -> Array:
        """Returns the share of the lookups that go to the `hottest` rows, in [0, 1]."""
        share = np.minimum(1.0, np.maximum(hottest, 0.0) / self.rows)
        zipf = self.exponent > 0.0
        if zipf.any():
            rows, s = self.rows[zipf], self.exponent[zipf]
            some = np.clip(hottest[zipf], 0.0, rows)
            first = np.where(some < 1.0, some, harmonic(np.maximum(some, 1.0), s))
            share[zipf] = first / harmonic(rows, s)
        if self.measured.any():
            share[self.measured] = self._binned(hottest)[self.measured]
        return share

    def _binned(self, hottest: Array) -> Array:
        """Returns the share by the bins: whole ones first, then a part of the next."""
        share, left = np.zeros(self.rows.shape), np.maximum(hottest, 0.0)
        for row_share, lookup_share in self.bins:
            here = row_share * self.distinct
            share += lookup_share * np.minimum(left, here) / np.maximum(here, 1e-300)
            left = np.maximum(left - here, 0.0)
        return np.minimum(1.0, share)


def reuse_of(columns: Mapping[str, Array], lookups: Array) -> Reuse:
    """Returns the reuse of tables of embedding bags, each under its number of `lookups`.

    `columns`: rows, and where they are known zipf, distinct and the bins (compiler/bags.py), 0
    for tables of which they are not.
    """
    rows, none = np.maximum(columns["rows"], 1.0), np.zeros(lookups.shape)
    share = columns.get("distinct", none)
    measured = share > 0.0
    exponent = np.where(measured, 0.0, columns.get("zipf", none))
    distinct = uniform_distinct(rows, lookups)
    zipf = exponent > 0.0
    if zipf.any():
        distinct[zipf] = _popular(rows[zipf], lookups[zipf], exponent[zipf])
    found = np.minimum(rows, np.maximum(1.0, share * lookups))
    return Reuse(
        rows=rows,
        distinct=np.where(measured, found, distinct),
        exponent=exponent,
        measured=measured,
        bins=_bins(columns) if measured.any() else (),
    )


def _bins(columns: Mapping[str, Array]) -> Bins:
    """The measured bins; without any, all rows that were read are equally hot."""
    first = columns.get("reuse_rows.0", np.zeros(columns["rows"].shape))
    bins = [(np.where(first > 0.0, 0.0, 1.0), np.where(first > 0.0, 0.0, 1.0))]
    while f"reuse_rows.{len(bins) - 1}" in columns:
        i = len(bins) - 1
        bins.append((columns[f"reuse_rows.{i}"], columns[f"reuse_lookups.{i}"]))
    return tuple(bins)


def _popular(rows: Array, lookups: Array, exponent: Array) -> Array:
    """Returns the distinct rows under Zipf popularity, summed once for equal tables."""
    tables = np.stack([rows, lookups, exponent], axis=1)
    different, where = np.unique(tables, axis=0, return_inverse=True)
    return zipf_distinct(*different.T)[where.reshape(-1)]


def uniform_distinct(rows: Array, lookups: Array) -> Array:
    """Returns how many of `rows` rows uniform lookups find on average."""
    many = np.maximum(rows, 1.0 + 1e-12)
    return np.where(
        rows <= 1.0,
        np.minimum(1.0, lookups),
        -many * np.expm1(lookups * np.log1p(-1.0 / many)),
    )


def zipf_distinct(rows: Array, lookups: Array, exponent: Array) -> Array:
    """Returns how many of `rows` rows lookups with Zipf popularity find on average."""
    columns = [np.atleast_1d(x)[:, None] for x in np.broadcast_arrays(rows, lookups, exponent)]
    starts = range(0, len(columns[0]), _BLOCK)
    return np.concatenate([_zipf_block(*(x[i : i + _BLOCK] for x in columns)) for i in starts])


def _zipf_block(rows: Array, lookups: Array, exponent: Array) -> Array:
    """The sum over ranks: the first one by one, the others in slices of equal ratio."""
    total = harmonic(rows, exponent)

    def found(log_ranks: Array) -> Array:
        p = np.minimum(np.exp(-exponent * log_ranks) / total, 1.0 - 1e-12)
        return -np.expm1(lookups * np.log1p(-p))

    ranks = np.arange(1.0, _EXACT + 1.0)
    first = np.floor(np.minimum(rows, _EXACT))
    distinct = np.where(ranks <= first, found(np.log(ranks)), 0.0).sum(axis=1)
    low = np.log(first + 0.5)
    step = np.where(rows > first, np.log(rows + 0.5) - low, 0.0) / _SLICES
    middles = low + (np.arange(_SLICES) + 0.5) * step
    distinct += (np.exp(middles) * found(middles)).sum(axis=1) * 2.0 * np.sinh(step[:, 0] / 2.0)
    least = np.minimum(rows, lookups)[:, 0]
    return np.where((rows <= first)[:, 0], distinct, np.minimum(distinct, least))


def harmonic(n: Array, exponent: Array) -> Array:
    """Returns the generalised harmonic numbers: the sum of k**-exponent for k from 1 to n."""
    first = np.floor(np.minimum(n, _EXACT))
    total = sum(np.where(k <= first, float(k) ** -exponent, 0.0) for k in range(1, _EXACT + 1))
    a, b = first, np.maximum(n, first)
    flat = np.where(exponent == 1.0, 0.5, 1.0 - exponent)
    integral = np.where(exponent == 1.0, np.log(b / a), (b**flat - a**flat) / flat)
    slope = exponent * (a ** (-exponent - 1) - b ** (-exponent - 1)) / 12.0
    rest = integral + (b**-exponent - a**-exponent) / 2.0 + slope
    return total + np.where(n > first, rest, 0.0)
