"""What residuals (residual.py) ask of an operator: its sizes, how it fills the device, the formula.

Each function returns a table (features, rows). Order and meaning belong to the shipped trees: a
change here needs a new fit (studies/costs/residuals.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: Tiles whose waves a product is asked for.
TILES = ((128.0, 128.0), (256.0, 128.0), (128.0, 256.0), (64.0, 128.0))
#: Powers of two that divide a size count up to this one.
_DIVISOR = 256


def gemm_features(columns: Mapping[str, Array], seconds: Array, sms: int) -> Array:
    """Returns the features of products b m n k whose formula gives `seconds`."""
    b, m, n, k = (columns[name] for name in "bmnk")
    logs = [np.log2(x) for x in (b, m, n, k)]
    work = logs[0] + logs[1] + logs[2] + logs[3]
    rows = [*logs, work, work - logs[0] - np.log2(m * n + n * k + k * m), np.log2(seconds)]
    for tm, tn in TILES:
        down, across = np.ceil(m / tm), np.ceil(n / tn)
        waves = b * down * across / sms
        rows += [np.log2(waves), waves / np.ceil(waves) * m * n / (down * tm * across * tn)]
    rows += [_divisor(n), _divisor(k)]
    return np.stack(rows)


def _divisor(size: Array) -> Array:
    """Returns the largest power of two that divides whole sizes, up to `_DIVISOR`."""
    whole = np.maximum(size, 1.0).astype(np.int64)
    return np.minimum(whole & -whole, _DIVISOR).astype(np.float64)
