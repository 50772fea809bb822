"""Layers per pipeline stage where software divides them by their cost, as nanotron does."""

from __future__ import annotations

from foretrain.frontends.spec import ModelSpec


def stages_by_cost(spec: ModelSpec, pp: int) -> tuple[int, ...]:
    """Returns the layers of each stage; the head, which costs as much as some layers, is last.

    Cost: the weights that multiply. A stage takes blocks until its share of the total is exceeded.
    Where that leaves a stage before the last empty, it takes a layer of its neighbours before it.
    """
    attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
    layer = attention + spec.hidden * spec.ffn * (3 if spec.gated else 2)
    head = spec.hidden * spec.vocab
    total = layer * spec.layers + head
    stages = [0] * pp
    stage, done = 0, 0
    for _ in range(spec.layers):
        stages[stage] += 1
        done += layer
        if done * pp > total * (stage + 1):
            stage = min(stage + 1, pp - 1)
    for i in range(pp - 1):
        if not stages[i]:
            donor = next(j for j in range(i - 1, -1, -1) if stages[j] > 1)
            stages[donor] -= 1
            stages[i] += 1
    return tuple(stages)
