"""Backward operators, derived from the forward operators of a block by rule.

Every forward operator names its rule (`Op.grad`). Derived operators keep the iteration dims of
their source, so they inherit its splits: a dim that the forward operator kept and a gradient does
not index becomes a reduction, and its split leaves partial sums. See docs/explain/placements.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from foretrain.errors import InternalError
from foretrain.graph.gradient_rules import (
    LOSSES,
    RULES,
    contraction_biases,
    contraction_inputs,
    contraction_weights,
)
from foretrain.graph.gradient_walk import Walk, grad_name
from foretrain.graph.ir import Block, Op, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The derived operators of a block in launch order, and the names they use.

    `weight_grads` maps a weight to its gradient; `input_grad` is the gradient that leaves to the
    previous block, `output_grad` the one that arrives from the next; `side_grad_in` and `side_grad`
    are the same of the tensor that goes along (`Block.side`): the sum of what later layers gave.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    weight_grads: Mapping[str, str]
    input_grad: str | None
    output_grad: str | None
    side_grad_in: str | None = None
    side_grad: str | None = None


def derive_backward(block: Block) -> Backward:
    """Returns the backward operators of `block` in the order autograd launches them."""
    walk = Walk(block)
    if block.output is not None:
        walk.grads[block.output] = grad_name(block.output)
        walk.declare(grad_name(block.output), block.tensor(block.output))
    if block.side is not None and block.output is not None:
        walk.grads[block.side] = grad_name(block.side)
        walk.declare(grad_name(block.side), block.tensor(block.side))
    for _, group in groupby(reversed(block.ops), key=lambda op: op.fuse or op.name):
        _derive(walk, list(group))
    if block.side is not None and block.output is None:
        walk.start_side(block.side)
    side = block.side or ""
    return Backward(
        ops=tuple(walk.ops),
        tensors=tuple(walk.tensors.values()),
        weight_grads={w.name: walk.grads[w.name] for w in block.weights if w.name in walk.grads},
        input_grad=walk.grads.get(block.input) if block.input else None,
        output_grad=grad_name(block.output) if block.output else None,
        side_grad_in=grad_name(side) if side and block.output is not None else None,
        side_grad=None if block.makes_side else walk.grads.get(side),
    )


def _derive(walk: Walk, group: Sequence[Op]) -> None:
    """Derives operators that read the same input together: all data gradients first.

    Their contributions to that input are summed before they join what is there already (the
    skip of a post-norm layer): partial sums are then reduced once.
    """
    known: dict[str, str] = {}
    if group[0].grad == "contraction":
        shared = {op.inputs[0].tensor: op for op in group}
        known = {name: walk.grads.pop(name) for name in shared if name in walk.grads}
    for op in group:
        if op.grad not in RULES:
            raise InternalError(f"operator {op.name} has no gradient rule {op.grad!r}")
        if op.grad == "contraction" and walk.has_grad(op):
            contraction_inputs(walk, op)
        elif op.grad != "none" and (op.grad in LOSSES or walk.has_grad(op)):
            RULES[op.grad](walk, op)
    for op in group:
        if op.grad == "contraction" and walk.has_grad(op):
            contraction_weights(walk, op)
    for op in group:
        if op.grad == "contraction" and walk.has_grad(op):
            contraction_biases(walk, op)
    for name, grad in known.items():
        walk.contribute(name, grad)
