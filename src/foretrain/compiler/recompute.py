"""Recompute: which tensors of a block survive until backward, and which operators run again.

- *none*: everything that backward reads is saved.
- *full*: only the input of the block; all its forward operators run again, with communication.
- *selective*, as the stack defines it:
  - core (Megatron): the attention core is one checkpointed function. Its inputs and its output
    are saved; it runs again as a whole. A fused kernel leaves nothing to run again.
  - modules (Megatron's `recompute_modules`): the core as above; `mlp`, checkpointed as a function
    too; `layernorm`, whose outputs are dropped and made again where they are read.
  - operators (torchtitan): outputs of attention, of every second matrix product and of
    reduce-scatters are saved; everything else that backward needs is computed again from them.
"""

from __future__ import annotations

from collections.abc import Iterable

from foretrain.graph.backward import Backward
from foretrain.graph.ir import Block, Op
from foretrain.strategy.plan import recompute_modules

NORMS = ("layernorm", "rmsnorm")


def read_by_backward(block: Block, backward: Backward, *, without: Iterable[str] = ()) -> set[str]:
    """Returns the forward activations that backward operators read.

    `without` names forward operators whose own backward is left out.
    """
    left_out = set(without)
    made = producers(block)
    return {
        operand.tensor
        for op in backward.ops
        if op.source not in left_out
        for operand in op.inputs
        if operand.tensor in made or operand.tensor in block.arrivals
    }


def producers(block: Block) -> dict[str, Op]:
    """Returns the operator that makes each forward tensor."""
    return {output.tensor: op for op in block.ops for output in op.outputs}


def core_ops(block: Block) -> tuple[str, ...]:
    """Returns the operators of an unfused attention core."""
    return tuple(
        op.name for op in block.ops if op.attributes.get("selective") and op.cost != "attention"
    )


def function_ops(block: Block, mode: str) -> tuple[str, ...]:
    """Returns the operators of a block that are checkpointed as functions, by their part."""
    modules = recompute_modules(mode)
    names = core_ops(block) if mode == "selective" or "core_attn" in modules else ()
    if "mlp" not in modules:
        return names
    inside = (op for op in block.ops if op.name.startswith("mlp.") and op.cost not in NORMS)
    # what adds the result to the residual stands behind the checkpoint
    return (*names, *(op.name for op in inside if op.cost not in ("residual", "bias_dropout_add")))


def _norm_ops(block: Block, mode: str) -> set[str]:
    """The operators whose output is dropped and made again where it is read."""
    if "layernorm" not in recompute_modules(mode):
        return set()
    return {op.name for op in block.ops if op.cost in NORMS}


def saved_names(
    block: Block, backward: Backward, mode: str, policy: str, scattered: set[str]
) -> set[str]:
    """Returns the tensors of one block instance that live from forward to backward.

    `scattered` are the tensors that forward left as partial sums and reduce-scattered.
    """
    if mode == "full" and block.recompute:
        return set(block.arrivals)
    modules = recompute_modules(mode)
    if not block.recompute or (mode != "selective" and not modules):
        return read_by_backward(block, backward)
    if policy == "operators" and not modules:
        dropped = _dropped_by_operators(block, scattered)
        # the policy caches what such an operator returns, whether or not backward reads it
        cached = {o.tensor for op in block.ops if op.name not in dropped for o in op.outputs}
        return cached | _closure(block, read_by_backward(block, backward), dropped)
    functions, norms = function_ops(block, mode), _norm_ops(block, mode)
    made = producers(block)
    read = read_by_backward(block, backward, without=functions)
    read = {name for name in read if name not in made or made[name].name not in norms}
    return read | _closure(block, read_by_backward(block, backward), {*functions, *norms})


def _dropped_by_operators(block: Block, scattered: set[str]) -> set[str]:
    """All operators but attention, the first, third, ... matrix product, and reduce-scatters."""
    dropped: set[str] = set()
    products = 0
    for op in block.ops:
        if op.cost == "attention":
            continue
        if op.cost == "gemm":
            products += 1
            if products % 2:
                continue
        if any(output.tensor in scattered for output in op.outputs):
            continue
        dropped.add(op.name)
    return dropped


def _closure(block: Block, wanted: set[str], dropped: set[str]) -> set[str]:
    """Returns what has to be saved so that `wanted` can be had by running `dropped` again."""
    made = producers(block)
    saved: set[str] = set()
    todo, seen = list(wanted), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in made and made[name].name in dropped:
            todo += [
                o.tensor
                for o in made[name].inputs
                if o.tensor in made or o.tensor in block.arrivals
            ]
        else:
            saved.add(name)
    return saved
