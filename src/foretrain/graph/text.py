"""The text form of a Graph: one item per line, in program order, so that two graphs diff well.

    block layers x 80: x_in -> x_out
      weight attention.q.weight [kv_head 8, group 8, head_dim 128, hidden 8192] weight
      op attention.q: contraction gemm [batch 1, seq 8192, ... | in 8192]
        reads  attention.norm.out(batch, seq, in), attention.q.weight(kv_head, ..., in)
        writes attention.q.out(batch, seq, kv_head, group, head_dim)
        1.1e+12 FLOP = 2 x points; grad contraction; saved ...; fuse qkv

Reduction dims stand behind the bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from foretrain.graph.ir import Block, Graph, Op, Operand, Tensor


def graph_text(graph: Graph) -> str:
    """Returns the graph as readable text: blocks, tensors, operators with dims and operands."""
    return "\n".join(_graph_lines(graph)) + "\n"


def _graph_lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.name}"
    yield f"batch {graph.batch}"
    if graph.sequence is not None:
        yield f"sequence {graph.sequence}"
    yield f"parameters {graph.num_parameters:,}"
    yield f"forward {graph.forward_flops():.6g} FLOP"
    for key, value in sorted(graph.facts.items()):
        yield f"fact {key} {_value(value)}"
    for block in graph.blocks:
        yield ""
        yield from _block_lines(block)


def _block_lines(block: Block) -> Iterator[str]:
    times = f" x {block.repeat}" if block.repeat != 1 else ""
    ends = f"{block.input or '(start)'} -> {block.output or '(end)'}"
    kept = "" if block.recompute else ", never recomputed"
    yield f"block {block.name}{times}: {ends}{kept}"
    for tensor in block.tensors:
        yield f"  {_tensor(tensor)}"
    for op in block.ops:
        yield from (f"  {line}" for line in _op_lines(op))


def _tensor(tensor: Tensor) -> str:
    sizes = zip(tensor.dims, tensor.shape, strict=True)
    text = f"{tensor.role} {tensor.name} [{_join(f'{dim} {size}' for dim, size in sizes)}]"
    tied = f" tied to {tensor.tied_to}" if tensor.tied_to else ""
    return f"{text} {tensor.dtype}{tied}"


def _op_lines(op: Op) -> Iterator[str]:
    kept = _join(f"{dim.name} {dim.size}" for dim in op.dims if not dim.reduction)
    summed = _join(f"{dim.name} {dim.size}" for dim in op.dims if dim.reduction)
    dims = f"{kept} | {summed}" if summed else kept
    phase = "" if op.phase == "forward" else f" ({op.phase} of {op.source})"
    yield f"op {op.name}: {op.kind} {op.cost} [{dims}]{phase}"
    if op.inputs:
        yield f"  reads  {_join(map(_operand, op.inputs))}"
    if op.outputs:
        yield f"  writes {_join(map(_operand, op.outputs))}"
    yield f"  {'; '.join(_properties(op))}"


def _properties(op: Op) -> Iterator[str]:
    if op.flops:
        density = "" if op.density == 1 else f" x {op.density:g}"
        yield f"{op.total_flops:.6g} FLOP = {op.flops:g}{density} x points"
    if op.combiner != "sum":
        yield f"combiner {op.combiner}"
    yield f"grad {op.grad}"
    if op.saved:
        yield f"saved {_join(op.saved)}"
    if op.linear:
        yield f"linear in {_join(op.inputs[i].tensor for i in op.linear)}"
    if op.fuse:
        yield f"fuse {op.fuse}"
    for name, dims in sorted(op.groups.items()):
        yield f"group {name} = {' x '.join(dims)}"
    for key, value in sorted(op.attributes.items()):
        yield f"{key} {_value(value)}"


def _operand(operand: Operand) -> str:
    return f"{operand.tensor}({_join(operand.dims)})"


def _value(value: float | str | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:.12g}"


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)
