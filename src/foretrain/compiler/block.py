"""Lowering one class of blocks: forward and backward launches with their layouts.

What backward reads is saved in the layout its producer left, so a gathered input is gathered again
(Megatron's sequence parallelism) unless the settings keep the gathered copy. Recompute duplicates
forward launches, their communication included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foretrain.compiler.flow import Copy, Flow, Launch, OpLaunch, Relayout, as_split
from foretrain.compiler.placements import Layout, layout
from foretrain.compiler.recompute import function_ops, producers, saved_names
from foretrain.compiler.splits import Split, atomic, own_split
from foretrain.graph.backward import Backward
from foretrain.graph.gradient_walk import SIDE_ZERO
from foretrain.graph.ir import Block, Op, Tensor
from foretrain.mesh import Mesh
from foretrain.strategy.tree import DimSplit, Node, Settings, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """A weight of one block instance: where it is used, how it and its gradient lie.

    `partial` are the axes on which the gradient of one micro-step is a partial sum. The three
    flat layouts are what the memory settings ask for on top of the split of the computation.
    """

    tensor: Tensor
    used: Layout
    partial: tuple[str, ...]
    stored: tuple[str, ...]  # axes of the flat shard of the weight
    accumulated: tuple[str, ...]  # ... of the gradient kept between micro-steps
    master: tuple[str, ...]  # ... of master, moments and the gradient of the optimizer
    trained: bool
    owner: int | None = None  # the rank of the data group that alone holds it
    sparse: bool = False  # updated in backward, row by row


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredBlock:
    """Launches of one repeat of a block class; `saved` copies live from forward to backward.

    `side` is the copy of the tensor that passes through (`Block.side`): it lives from the block
    that makes it to that block's backward, so it is in `saved` of that block only.
    """

    block: Block
    tensors: Mapping[str, Tensor]
    path: str
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    saved: frozenset[Copy]
    weights: tuple[WeightUse, ...]
    input: Copy | None
    output: Copy | None
    output_grad: Copy | None
    input_grad: Copy | None
    reshard: bool
    flow: Flow
    side: Copy | None = None
    side_grad_in: Copy | None = None
    side_grad: Copy | None = None


def repeats(lowered: LoweredBlock) -> bool:
    """Returns whether the whole forward runs again in backward: nothing but the input is saved."""
    again = any(isinstance(launch, OpLaunch) and launch.recomputed for launch in lowered.backward)
    return again and lowered.saved <= {lowered.input, lowered.side}


def op_path(block: Block, layer: int, op: str) -> str:
    """Returns the path of an operator: layers.3.attention.q, embedding.word, head.loss.max."""
    if block.input is not None and block.output is not None:
        return f"{block.name}.{layer}.{op}"
    return op if op.startswith(f"{block.name}.") else f"{block.name}.{op}"


def block_path(block: Block, layer: int) -> str:
    """Returns the path of one repeat of a block."""
    inner = block.input is not None and block.output is not None
    return f"{block.name}.{layer}" if inner else block.name


def owner_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of the group in which one rank may own a table: all data axes."""
    return tuple(a for a in ("dp_replicate", "dp_shard") if mesh.size(a) > 1) or ("dp_shard",)


def lower_block(
    block: Block,
    backward: Backward,
    layer: int,
    nodes: Sequence[Node],
    mesh: Mesh,
    selective: str = "core",
) -> LoweredBlock:
    """Returns the launches of repeat `layer` of `block` under the settings of `nodes`.

    `selective` is what the stack understands by selective recompute (compiler/recompute.py).
    """
    tensors = {**block.by_name(), **{t.name: t for t in backward.tensors}}
    path = block_path(block, layer)
    flow = Flow(tensors=tensors, mesh=mesh, path=path, owner_axes=owner_axes(mesh))
    outer = resolve(nodes, path)
    residual = _residual(outer, mesh)
    if block.input is not None:
        flow.arrive(block.input, _fit(residual, tensors[block.input]))
    if block.side is not None and not block.makes_side:
        flow.arrive(block.side, _fit(residual, tensors[block.side]))
    settings = {op.name: resolve(nodes, op_path(block, layer, op.name)) for op in block.ops}
    forward = _forward(block, flow, settings, mesh)
    output = _leave(flow, block.output, residual, forward)
    side = _leave(flow, block.side, residual, forward)
    input_copy = None if block.input is None else (block.input, flow.produced[block.input])
    scattered = {
        launch.tensor.name
        for launch in forward
        if isinstance(launch, Relayout)
        and any(step.collective == "reduce_scatter" for step in launch.steps)
    }
    names = saved_names(block, backward, outer.recompute, selective, scattered)
    saved = _saved(block, names, flow, settings, outer)
    if side is not None:
        saved |= {side}
    launches, input_grad = _backward(block, backward, flow, settings, outer, residual, saved)
    side_grad = _leave(flow, backward.side_grad, residual, launches)
    return LoweredBlock(
        block=block,
        tensors=tensors,
        path=path,
        forward=tuple(forward),
        backward=tuple(launches),
        saved=saved if side is None or block.makes_side else saved - {side},
        weights=_weights(block, backward, flow, nodes, layer),
        input=input_copy,
        output=output,
        output_grad=None
        if backward.output_grad is None
        else (backward.output_grad, flow.produced[backward.output_grad]),
        input_grad=input_grad,
        reshard=outer.reshard,
        flow=flow,
        side=side,
        side_grad_in=None
        if backward.side_grad_in is None
        else (backward.side_grad_in, flow.produced[backward.side_grad_in]),
        side_grad=side_grad,
    )


def _residual(settings: Settings, mesh: Mesh) -> Layout:
    split = settings.memory.get("residual", {})
    return layout({dim: atomic(axes, mesh) for dim, axes in split.items()})


def _fit(placed: Layout, tensor: Tensor) -> Layout:
    return layout({dim: axes for dim, axes in placed.shards if dim in tensor.dims})


def _splits_for(op: Op, settings: Settings, mesh: Mesh) -> tuple[Split, Split]:
    inherited: DimSplit = settings.inherited
    return (
        own_split(op, settings.own, mesh),
        {dim: tuple(atomic(axes, mesh)) for dim, axes in inherited.items()},
    )


def _forward(
    block: Block, flow: Flow, settings: Mapping[str, Settings], mesh: Mesh
) -> list[Launch]:
    launches: list[Launch] = []
    for op in block.ops:
        owner = settings[op.name].owner
        if owner is not None:
            launches += flow.run_owned(op, owner)
            continue
        own, inherited = _splits_for(op, settings[op.name], mesh)
        launches += flow.run(op, own, inherited)
    return launches


def _leave(flow: Flow, output: str | None, residual: Layout, launches: list[Launch]) -> Copy | None:
    """Appends the re-layout of the block's output to the residual layout."""
    if output is None:
        return None
    want = _fit(residual, flow.tensors[output])
    launches += flow.convert(output, want, "output")
    return flow.root((output, want))


def _saved(
    block: Block,
    names: set[str],
    flow: Flow,
    settings: Mapping[str, Settings],
    outer: Settings,
) -> frozenset[Copy]:
    """The forward copies that live until backward."""
    made = producers(block)
    copies: set[Copy] = set()
    for name in names:
        # the input of the block has no producer here: the settings of the block decide
        keep = (settings[made[name].name] if name in made else outer).keep_gathered
        copies.add(flow.root(_saved_copy(flow, name, keep_gathered=keep)))
    return frozenset(copies)


def _saved_copy(flow: Flow, name: str, *, keep_gathered: bool) -> Copy:
    """The copy of a tensor that is saved: as produced, or as first used when asked to.

    A partial sum cannot be saved: its first resolved copy is.
    """
    produced = flow.produced[name]
    others = [placed for tensor, placed in flow.copies if tensor == name and placed != produced]
    resolved = [placed for placed in others if not placed.partial]
    if (produced.partial or keep_gathered) and resolved:
        return (name, resolved[0])
    return (name, produced)


def _backward(
    block: Block,
    backward: Backward,
    flow: Flow,
    settings: Mapping[str, Settings],
    outer: Settings,
    residual: Layout,
    saved: frozenset[Copy],
) -> tuple[list[Launch], Copy | None]:
    forward_splits = dict(flow.splits)
    for name in [n for n, _ in flow.copies]:
        kept = [copy for copy in saved if copy[0] == name]
        if kept:
            flow.produced[name] = kept[0][1]
    flow.copies = {copy: copy for copy in saved}
    launches: list[Launch] = []
    core = function_ops(block, outer.recompute)
    again = _Repeat(block, flow, forward_splits, launches, core)
    if backward.output_grad is not None and block.output is not None:
        placed = _fit(residual, flow.tensors[backward.output_grad])
        flow.arrive(backward.output_grad, placed)
    if backward.side_grad_in is not None:
        placed = _fit(residual, flow.tensors[backward.side_grad_in])
        flow.arrive(backward.side_grad_in, placed)
    if outer.recompute == "full" and block.recompute:
        for op in block.ops:
            again.op(op)
        _drop_gathered(flow)
    for op in backward.ops:
        again.needed(operand.tensor for operand in op.inputs)
        if op.source in flow.owners:
            launches += flow.run_owned(op, flow.owners[op.source])
            continue
        own = as_split(forward_splits.get(op.source or "", {}), op)
        if op.name == SIDE_ZERO:
            own = dict(_fit(residual, flow.tensors[op.outputs[0].tensor]).shards)
        inherited: Split = {}
        launches += flow.run(op, own, inherited)
    target = backward.input_grad
    if target is None or block.input is None:
        return launches, None
    want = _fit(residual, flow.tensors[target])
    launches += flow.convert(target, want, "output")
    return launches, flow.root((target, want))


def _drop_gathered(flow: Flow) -> None:
    """Forgets re-laid copies: a repeated forward saves what its producers leave, as the first."""
    flow.copies = {
        copy: root
        for copy, root in flow.copies.items()
        if copy[1] == flow.produced[copy[0]] or flow.produced[copy[0]].partial
    }


@dataclass(slots=True)
class _Repeat:
    """Runs forward operators again when backward asks for what was not saved."""

    block: Block
    flow: Flow
    splits: Mapping[str, Split]
    launches: list[Launch]
    core: tuple[str, ...] = ()

    def needed(self, names: Iterable[str]) -> None:
        """Repeats the producers of forward tensors that are not there, inputs first."""
        made = producers(self.block)
        for name in names:
            if name not in made or any(tensor == name for tensor, _ in self.flow.copies):
                continue
            if self.core and made[name].name in self.core:
                self.whole_core(made[name])
            else:
                self.op(made[name])

    def whole_core(self, wanted: Op) -> None:
        """Repeats a part that is checkpointed as a function, last operator included."""
        part = wanted.name.split(".")[0]
        names = [name for name in self.core if name.split(".")[0] == part]
        self.core = tuple(name for name in self.core if name not in names)
        for op in self.block.ops:
            if op.name in names:
                self.op(op)

    def op(self, op: Op) -> None:
        """Repeats one forward operator (and what it needs) with its communication."""
        self.needed(operand.tensor for operand in op.inputs)
        own = dict(self.splits[op.name])
        self.launches += self.flow.run(op, own, {}, recomputed=True)


def _held(used: Layout) -> Layout:
    """Returns how a rank holds a weight: a table of positions whole, whatever part it reads.

    Megatron adds positions before it scatters a sequence; nobody splits such a table over ranks.
    """
    if not used.axes("position"):
        return used
    return layout({dim: axes for dim, axes in used.shards if dim != "position"}, used.partial)


def _weights(
    block: Block, backward: Backward, flow: Flow, nodes: Sequence[Node], layer: int
) -> tuple[WeightUse, ...]:
    owner = {o.tensor: op for op in block.ops for o in op.inputs}
    uses: list[WeightUse] = []
    for weight in block.weights:
        settings = resolve(nodes, op_path(block, layer, owner[weight.name].name))
        grad = backward.weight_grads.get(weight.name)

        def flat(role: str, settings: Settings = settings) -> tuple[str, ...]:
            axes = settings.memory.get(role, {}).get("*", ())
            return tuple(a for a in atomic(axes, flow.mesh) if flow.mesh.size(a) > 1)

        uses.append(
            WeightUse(
                tensor=weight,
                used=_held(flow.weights.get(weight.name, Layout())),
                partial=flow.produced[grad].partial if grad else (),
                stored=flat("weight"),
                accumulated=flat("grad_accumulator"),
                master=flat("master"),
                trained=grad is not None,
                owner=settings.owner,
                sparse=settings.sparse,
            )
        )
    return tuple(uses)
