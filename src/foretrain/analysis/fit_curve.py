"""Three-segment curves from measured sizes and times (foretrain.cost.network.measured).

m1 is the last size before the time rises by more than 10 % over the small messages' median; m2 is
two samples past the first that reaches 95 % of the best bus bandwidth. Between them a logistic
curve of log10 busbw over log2 of the size is fitted, its ends included, so that time never falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foretrain.analysis.simplex import Vector, minimise
from foretrain.cost.network.curve import bus_factor
from foretrain.cost.network.measured import MeasuredCurve, bus_bandwidth
from foretrain.units import GB

_RISE, _NEAR_PEAK = 1.10, 0.95
#: Only messages up to this size can show the latency.
_TINY = 65_536.0
#: Bus bandwidth may at most double when the size does, or time would fall.
_STEEPEST = 4.0 * np.log10(2.0)


def fit_curve(
    sizes: Sequence[float],
    times: Sequence[float],
    *,
    device: str,
    nodes: int,
    ranks: int,
    fabric: str,
    collective: str,
    source: str,
) -> MeasuredCurve:
    """Returns the curve through samples (bytes, seconds); several times of a size: their median.

    Needs at least three sizes, which the caller checks. `mean_error` and `max_error` of the result
    are |predicted / measured - 1| over its own samples.
    """
    size = np.unique(np.asarray(sizes, dtype=np.float64))
    every, raw = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    time = np.array([float(np.median(raw[every == s])) for s in size])
    moved = size * bus_factor(collective, ranks)
    flat = _plateau(time) if size[0] <= _TINY else -1
    latency = float(np.median(time[: flat + 1])) if flat >= 0 else float(time[0])
    busbw = moved / time
    top = int(np.argmax(busbw >= _NEAR_PEAK * float(busbw.max())))
    last = min(top + 2, len(size) - 1)
    rest = np.maximum(time[last:] - (latency if flat >= 0 else 0.0), 1e-12)
    curve = MeasuredCurve(
        device=device,
        nodes=nodes,
        ranks=ranks,
        fabric=fabric,
        collective=collective,
        latency_s=latency if flat >= 0 else 0.0,
        plateau=flat >= 0,
        m1=float(size[flat]) if flat >= 0 else 0.0,
        m2=float(size[last]),
        bandwidth=float(np.median(moved[last:] / rest)),
        sigmoid=(),
        smallest=float(size[0]),
        largest=float(size[-1]),
        mean_error=0.0,
        max_error=0.0,
        source=source,
    )
    inner = slice(max(flat, 0), last + 1)
    if last - max(flat, 0) >= 2:
        curve = replace(curve, sigmoid=_sigmoid(size[inner], time[inner], moved[inner]))
    errors = np.abs(curve.seconds(size) / time - 1.0)
    return replace(curve, mean_error=float(errors.mean()), max_error=float(errors.max()))


def _plateau(time: NDArray[np.float64]) -> int:
    """Returns the index of the last small message, -1 where time rises from the first size on."""
    flat = -1
    for i in range(1, len(time)):
        if time[i] > _RISE * float(np.median(time[: i + 1])):
            break
        flat = i
    return flat


def _sigmoid(
    size: NDArray[np.float64], time: NDArray[np.float64], moved: NDArray[np.float64]
) -> tuple[float, ...]:
    """Returns (L, k, x0, b) that fit log10 of the bus bandwidth in GB/s over log2 of the size."""
    x, y = np.log2(size), np.log10(moved / time / GB)
    span = max(float(y[-1] - y[0]), 0.05)

    def loss(p: Vector) -> float:
        height, slope = np.exp(p[0]), np.exp(p[1])
        fitted = bus_bandwidth(size, (height, slope, p[2], p[3])) / GB
        gap = np.log10(fitted) - y
        over = max(0.0, height * slope - _STEEPEST)
        return float(np.mean(gap**2) + 0.1 * np.max(gap**2) + over**2)

    candidates: list[tuple[Vector, float]] = []
    for share in (0.2, 0.4, 0.6):  # where the middle may lie
        middle = float(x[0] + share * (x[-1] - x[0]))
        start = [np.log(1.5 * span), np.log(0.6), middle, float(y[-1]) - 1.5 * span]
        candidates.append(minimise(loss, start, [0.3, 0.4, 1.5, 0.3], iterations=1500))
    p, _ = min(candidates, key=lambda found: found[1])
    return (float(np.exp(p[0])), float(np.exp(p[1])), float(p[2]), float(p[3]))
