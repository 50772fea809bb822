"""A small least-squares fitter for positive constants, with nothing but numpy.

Levenberg-Marquardt over the logarithms of the constants, with Huber weights: a tenth of odd rows
(clock glitches, kernels that switched) must not move the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def fit(
    residual: Callable[[Array], Array],
    start: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    rounds: int = 60,
    delta: float = 0.15,
    weights: Array | float = 1.0,
) -> tuple[Array, float]:
    """Returns (constants, Huber cost) that minimise the residuals (logarithms of ratios).

    `weights` of the residuals multiply their costs.
    """
    x, lo, hi = (np.log(np.asarray(v, dtype=float)) for v in (start, low, high))
    damping = 1e-2
    r = residual(np.exp(x))
    cost = _huber(r, delta, weights)
    for _ in range(rounds):
        slopes = np.empty((len(r), len(x)))
        for i in range(len(x)):
            y = x.copy()
            y[i] += 1e-4
            slopes[:, i] = (residual(np.exp(y)) - r) / 1e-4
        weight = weights * np.minimum(1.0, delta / np.maximum(np.abs(r), 1e-9))
        normal = (slopes * weight[:, None]).T @ slopes
        gradient = (slopes * weight[:, None]).T @ r
        scale = np.diag(np.diag(normal) + 1e-3 * np.trace(normal) / len(x) + 1e-12)
        for _ in range(8):
            step = np.clip(np.linalg.solve(normal + damping * scale, -gradient), -0.5, 0.5)
            y = np.clip(x + step, lo, hi)
            r_new = residual(np.exp(y))
            new = _huber(r_new, delta, weights)
            if new < cost - 1e-12:
                break
            damping *= 4.0
        else:
            break
        gain, x, r, cost, damping = cost - new, y, r_new, new, max(damping / 3.0, 1e-6)
        if gain < 1e-6 * cost:
            break
    return np.exp(x), cost


def held_out(keys: Sequence[str], share: int = 3) -> NDArray[np.bool_]:
    """Returns which rows are left out of a fit: those of one in `share` shape keys, by CRC-32."""
    return np.array([zlib.crc32(key.encode()) % share == 0 for key in keys])


def folds(shape: NDArray[np.str_], count: int) -> NDArray[np.intp]:
    """Returns the fold of each row: whole shapes, dealt in the order of a checksum."""
    names, where = np.unique(shape, return_inverse=True)
    order = np.argsort([zlib.crc32(f"fold {name}".encode()) for name in names])
    fold = np.empty(len(names), dtype=np.intp)
    fold[order] = np.arange(len(names)) % count
    return fold[where]


def _huber(r: Array, delta: float, weights: Array | float) -> float:
    size = np.abs(r)
    cost = np.where(size < delta, 0.5 * r * r, delta * (size - 0.5 * delta))
    return float((weights * cost).sum())
