"""The time of a collective as a function of its size.

    x = S factor / B (1 + (S0 / S)**p S / (S + Sl))          t = (alpha**r + x**r) ** (1/r)

alpha is the time of a small message, B the bus bandwidth of a large one, S0 the size where
protocol and pipelining halve B, p how sharply, r how sharply the two regimes meet. Below Sl a
protocol of low latency carries the message, which does not fill the pipeline first (0: the same
protocol for all sizes). For p <= 1 the time never falls with the size. Explained in
docs/explain/network.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from foretrain.units import GB, MIB, US

Array = NDArray[np.float64]
#: One number for all sizes, or one for each.
Value = float | Array


_Ranks = TypeVar("_Ranks", float, Array, Value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """alpha in s, B in bytes/s of bus bandwidth, S0 and Sl in bytes, p, r.

    `cap` bounds the bus bandwidth of any size; `peak` is the largest one measured.
    """

    alpha_s: float
    bandwidth: float
    half_bytes: float = 0.0
    p: float = 1.0
    r: float = 1.0
    low_bytes: float = 0.0
    cap: float = float("inf")
    peak: float = float("inf")

    def seconds(self, num_bytes: float, factor: float) -> float:
        """Returns the time of a collective of `num_bytes` whose bus factor is `factor`."""
        if num_bytes <= 0.0 or factor <= 0.0:
            return self.alpha_s
        filling = (self.half_bytes / num_bytes) ** self.p / (1.0 + self.low_bytes / num_bytes)
        x = num_bytes * factor / self.bandwidth * (1.0 + filling)
        floor = num_bytes * factor / self.cap
        peak = max(self.alpha_s, x)
        t = peak * ((self.alpha_s / peak) ** self.r + (x / peak) ** self.r) ** (1.0 / self.r)
        return max(t, floor)

    def many(self, num_bytes: Array, factor: float) -> Array:
        """Returns the times of many sizes at once: `seconds` of each."""
        return curve_seconds(self, num_bytes, factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The fields of `Curve`, each one number or one for every group of a table."""

    alpha_s: Value
    bandwidth: Value
    half_bytes: Value = 0.0
    p: Value = 1.0
    r: Value = 1.0
    low_bytes: Value = 0.0
    cap: Value = float("inf")
    peak: Value = float("inf")

    def single(self) -> Curve:
        """Returns the curve of a single group."""
        return Curve(**{name: float(getattr(self, name)) for name in self.__slots__})


def curve_seconds(curve: Curve | Curves, num_bytes: Array, factor: Value) -> Array:
    """Returns the times of many sizes on one curve, or of each size on a curve of its own."""
    alpha, p, r = curve.alpha_s, curve.p, curve.r
    size = np.maximum(num_bytes, 0.0)
    # S (S0 / S)**p S / (S + Sl), without a division by a size of 0
    filled = curve.half_bytes**p * size / np.maximum(size + curve.low_bytes, 1e-300)
    x = (size + size ** (1.0 - p) * filled) * (factor / curve.bandwidth)
    if isinstance(r, float) and r == 1.0:
        t = x + alpha
    else:
        peak = np.maximum(np.maximum(alpha, x), 1e-300)
        t = peak * (1.0 + (np.minimum(alpha, x) / peak) ** r) ** (1.0 / r)
    return np.maximum(t, size * (factor / curve.cap))


def bus_factor(collective: str, num_ranks: _Ranks) -> _Ranks:
    """Returns busbw / algbw of a collective over `num_ranks` ranks."""
    sent = num_ranks
    if collective == "all_reduce":
        sent = 2.0 * (num_ranks - 1)
    elif collective in ("all_gather", "reduce_scatter", "all_to_all"):
        sent = num_ranks - 1
    return sent / num_ranks


def curve_from_row(row: Sequence[float], *, scale: float, headroom: float) -> Curve:
    """Returns the curve of one row [alpha us, B GB/s, S0 MiB, p, r, peak GB/s] of network.toml.

    `scale` is the device's link speed over that of the row; the bus bandwidth is capped at
    `headroom` times the largest measured one.
    """
    alpha, bandwidth, half, p, r, peak = (float(value) for value in row)
    measured = peak * GB * scale if peak > 0.0 else float("inf")
    return Curve(
        alpha_s=alpha * US,
        bandwidth=bandwidth * GB * scale,
        half_bytes=half * MIB,
        p=p,
        r=r,
        cap=headroom * measured,
        peak=measured,
    )


def interpolate(
    rows: Mapping[str, Sequence[float]], num_ranks: int, *, doubling_us: float
) -> list[float]:
    """Returns the row for a group of `num_ranks`, between the two measured sizes around it.

    Alpha, B, S0 and the peak are interpolated over log2 of the size. Beyond the largest measured
    size B stays and alpha grows by `doubling_us` per doubling; below the smallest it is taken.
    """
    known = sorted((int(size), [float(v) for v in row]) for size, row in rows.items())
    if num_ranks <= known[0][0]:
        return known[0][1]
    for (low, left), (high, right) in itertools.pairwise(known):
        if num_ranks <= high:
            share = log2(num_ranks / low) / log2(high / low)
            return [a + share * (b - a) for a, b in zip(left, right, strict=True)]
    size, row = known[-1]
    return [row[0] + doubling_us * log2(num_ranks / size), *row[1:]]
