"""Minimising a function of a few numbers without derivatives (Nelder and Mead, 1965)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def minimise(
    function: Callable[[Vector], float],
    start: Sequence[float],
    steps: Sequence[float],
    *,
    iterations: int = 600,
    tolerance: float = 1e-10,
) -> tuple[Vector, float]:
    """Returns the best point found and its value, starting from `start` with edges `steps`.

    Deterministic: no random numbers. Stops when the values of the corners agree to `tolerance`.
    """
    points: list[Vector] = [np.array(start, dtype=np.float64)]
    for i, step in enumerate(steps):
        corner = points[0].copy()
        corner[i] += step
        points.append(corner)
    values = [function(point) for point in points]
    for _ in range(iterations):
        order = sorted(range(len(values)), key=values.__getitem__)
        points, values = [points[i] for i in order], [values[i] for i in order]
        if abs(values[-1] - values[0]) <= tolerance * (abs(values[0]) + tolerance):
            break
        _step(function, points, values)
    best = min(range(len(values)), key=values.__getitem__)
    return points[best], values[best]


def _step(function: Callable[[Vector], float], points: list[Vector], values: list[float]) -> None:
    """Replaces the worst corner, or shrinks all towards the best one."""
    centre = np.asarray(np.mean(points[:-1], axis=0))
    reflected = centre + (centre - points[-1])
    value = function(reflected)
    if value < values[0]:
        further = centre + 2.0 * (centre - points[-1])
        far = function(further)
        points[-1], values[-1] = (further, far) if far < value else (reflected, value)
        return
    if value < values[-2]:
        points[-1], values[-1] = reflected, value
        return
    nearer = centre + 0.5 * ((reflected if value < values[-1] else points[-1]) - centre)
    near = function(nearer)
    if near < min(value, values[-1]):
        points[-1], values[-1] = nearer, near
        return
    for i in range(1, len(points)):
        points[i] = points[0] + 0.5 * (points[i] - points[0])
        values[i] = function(points[i])
