"""Context parallelism: the tokens of one sample split over the ranks of the axis `cp`.

It is a layout of the dim `seq`, nothing else: every operator works on its share of the tokens, the
loss and the gradients of weights are sums over `cp` too. Only attention reads the whole sequence,
so keys and values are gathered before it and their gradients scattered after it. Rings that
send the same blocks from rank to rank move the same bytes and may hide them behind attention. Under
a causal mask each rank holds one early and one late chunk of the sequence, as frameworks do, so
that the visible share is the same on every rank.
"""

from __future__ import annotations

from foretrain.errors import Problem
from foretrain.frontends.spec import Model, ModelSpec
from foretrain.strategy.plan import Plan


def check_context(spec: Model, plan: Plan, sequence: int | None) -> list[Problem]:
    """Returns what is wrong with `cp`: a model without such a split, or a length it divides not."""
    if plan.cp == 1:
        return []
    if not isinstance(spec, ModelSpec) or spec.decoder_layers or spec.image is not None:
        what = f"context parallelism of {spec.name} is not modelled"
        return [Problem(what=what, where="plan.cp", value=plan.cp, allowed="1")]
    chunks = 2 if spec.causal else 1
    tensor = plan.tp if plan.sequence_parallel else 1
    unit = chunks * plan.cp * tensor
    if sequence is None or sequence % unit == 0:
        return []
    terms = [
        *(["2"] if chunks == 2 else []),
        f"cp {plan.cp}",
        *([f"tp {tensor}"] if tensor > 1 else []),
    ]
    return [
        Problem(
            what=f"sequence {sequence} is not a multiple of {' x '.join(terms)} = {unit}",
            where="training.sequence",
            value=sequence,
            allowed=f"multiples of {unit}",
            way_out=f"nearest: {max(sequence // unit, 1) * unit}",
        )
    ]
