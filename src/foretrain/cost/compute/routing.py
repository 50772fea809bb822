"""How a router spreads tokens over experts, and what the busiest rank gets.

Balanced: every rank gets tokens topk / ep rows, every expert an equal share. Skewed: the loads of
the experts follow a power law, density ~ x**-alpha on [1, 0.8 tokens], scaled to tokens topk rows
in total (the convention of the published tables of fused experts; [0.01, 2] where there are fewer
rows than experts); experts lie on ranks in random order, and the step waits for the busiest rank.
Its rows and its experts with work are means over seeded draws.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_DRAWS = 24
_SEED = 7


@lru_cache(maxsize=65536)
def busiest_rank(
    experts: int, ep: int, tokens: int, topk: float, alpha: float
) -> tuple[float, float]:
    """Returns (rows, experts with work) of the busiest of `ep` ranks.

    Args:
        experts: of the whole layer.
        ep: ranks that share them.
        tokens: of all ranks together.
        topk: experts of a token.
        alpha: exponent of the power law; 0 is balanced.
    """
    rows, local = tokens * topk / ep, max(1.0, experts / ep)
    if alpha <= 0.0 or experts <= 1:
        return rows, max(1.0, min(local, rows))
    total = tokens * topk
    low, high = (1.0, max(1.01, 0.8 * tokens)) if total > experts else (0.01, 2.0)
    uniform = np.random.default_rng(_SEED).random((_DRAWS, experts))
    power = 1.0 - alpha
    if abs(power) < 1e-6:
        loads = low * (high / low) ** uniform
    else:
        loads = ((high**power - low**power) * uniform + low**power) ** (1.0 / power)
    loads *= total / loads.sum(axis=1, keepdims=True)
    count = max(1, experts // ep)
    ranks = loads[:, : count * (experts // count)].reshape(_DRAWS, -1, count)
    sums = ranks.sum(axis=2)
    which = sums.argmax(axis=1)
    own = ranks[np.arange(_DRAWS), which]
    active = float(np.minimum(1.0, own).sum(axis=1).mean())
    return float(sums.max(axis=1).mean()), max(1.0, active)
