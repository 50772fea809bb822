"""How a router spreads tokens over experts, and what the busiest rank gets.

Balanced: every rank gets tokens topk / ep rows, every expert an equal share. Skewed: the loads of
the experts follow a power law, density ~ x**-alpha on [1, 0.8 tokens], scaled to tokens topk rows
in total (the convention of the published tables of fused experts; [0.01, 2] where there are fewer
rows than experts). A token goes to an expert once at most, so no load exceeds the tokens; what is
above goes to the others. Experts lie on ranks in random order, and the step waits for the busiest
rank. Its rows and its experts with work are means over seeded draws, at powers of sqrt(2) of the
tokens; between them they are interpolated.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_DRAWS = 24
_SEED = 7
_STEPS = 2.0  # nodes per doubling of the tokens
_CAPPING = 4  # rounds: what a full expert hands on may fill the next one


def busiest_ranks(
    experts: Array, ep: Array, tokens: Array, topk: Array, alpha: Array
) -> tuple[Array, Array]:
    """Returns the rows, and the experts with work, of the busiest rank of each layer.

    Args:
        experts: of the whole layer.
        ep: ranks that share them.
        tokens: of all ranks together.
        topk: experts of a token.
        alpha: exponent of the power law; 0 is balanced.
    """
    rows = tokens * topk / ep
    active = np.maximum(1.0, np.minimum(np.maximum(1.0, experts / ep), rows))
    skewed = np.flatnonzero((alpha > 0.0) & (experts > 1.0))
    if not len(skewed):
        return rows, active
    layers = np.stack([x[skewed] for x in (experts, ep, topk, alpha)], axis=1)
    kinds, which = np.unique(layers, axis=0, return_inverse=True)
    which = which.reshape(-1)
    for i, (count, ranks, choices, exponent) in enumerate(kinds):
        index = skewed[which == i]
        at = _STEPS * np.log2(np.maximum(tokens[index], 1.0))
        first, last = int(np.floor(at.min())), int(np.ceil(at.max()))
        nodes = [
            _busiest(int(count), int(ranks), node, float(choices), float(exponent))
            for node in range(first, last + 1)
        ]
        share, working = np.array(nodes).T
        where = np.arange(first, last + 1)
        rows[index] = np.interp(at, where, share) * tokens[index] * topk[index]
        active[index] = np.interp(at, where, working)
    return rows, active


@lru_cache(maxsize=65536)
def _busiest(experts: int, ep: int, node: int, topk: float, alpha: float) -> tuple[float, float]:
    """Returns (share of all rows, experts with work) of the busiest rank at a node of tokens."""
    tokens = 2.0 ** (node / _STEPS)
    total = tokens * topk
    low, high = (1.0, max(1.01, 0.8 * tokens)) if total > experts else (0.01, 2.0)
    uniform = np.random.default_rng(_SEED).random((_DRAWS, experts))
    power = 1.0 - alpha
    if abs(power) < 1e-6:
        loads = low * (high / low) ** uniform
    else:
        loads = ((high**power - low**power) * uniform + low**power) ** (1.0 / power)
    loads *= total / loads.sum(axis=1, keepdims=True)
    for _ in range(_CAPPING if topk < experts else 0):
        loads = np.minimum(loads, tokens)
        free = np.where(loads < tokens, loads, 0.0)
        left = total - loads.sum(axis=1, keepdims=True)
        loads = loads + left * free / np.maximum(free.sum(axis=1, keepdims=True), 1e-9)
    count = max(1, experts // ep)
    ranks = loads[:, : count * (experts // count)].reshape(_DRAWS, -1, count)
    sums = ranks.sum(axis=2)
    own = ranks[np.arange(_DRAWS), sums.argmax(axis=1)]
    active = float(np.minimum(1.0, own).sum(axis=1).mean())
    return float(sums.max(axis=1).mean()) / total, max(1.0, active)
