"""Lowering: graph and strategy tree become a Program.

Order of passes: derive backward, place layouts (with recompute), infer communication, framework
passes (accumulate, bucket, prefetch, tie, fuse), schedule, lifetimes. This module does the block
classes and the stages; compiler/stage.py writes the launch list of one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foretrain.compiler.block import LoweredBlock, lower_block, op_path
from foretrain.compiler.check_nodes import check_nodes
from foretrain.compiler.events import EventTable, Groups, Shaper
from foretrain.compiler.held import held_bytes
from foretrain.compiler.launches import Instance, StageContext
from foretrain.compiler.optimizer import factored_share
from foretrain.compiler.parameters import Unit, make_unit
from foretrain.compiler.passes import Passes
from foretrain.compiler.placements import family
from foretrain.compiler.segments import SegmentMaker
from foretrain.compiler.splits import refine_mesh
from foretrain.compiler.stage import build_entries
from foretrain.errors import PlanError, Problem
from foretrain.graph.backward import Backward, derive_backward
from foretrain.graph.ir import Block, Graph
from foretrain.graph.precision import Precision
from foretrain.mesh import Mesh
from foretrain.program import Program, RankClass, Segment
from foretrain.stack import Stack
from foretrain.strategy.tree import StrategyTree, layer_classes, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the compiler needs beside graph and tree."""

    precision: Precision
    optimizer: str
    stack: Stack
    devices_per_node: int
    samples_per_step: int
    by_module: bool = False  # book live bytes by module instead of by part


def _changed(segment: Segment, change: Mapping[str, float]) -> Segment:
    """Returns a segment whose last item also changes live bytes by `change`."""
    if not change or not segment.items:
        return segment
    *first, last = segment.items
    return replace(segment, items=(*first, replace(last, delta={**last.delta, **change})))


def compile_program(graph: Graph, tree: StrategyTree, job: Job) -> Program:
    """Returns the Program of one training step. Raises PlanError with every bad split."""
    return _Compiler(graph, tree, job).program()


class _Compiler:
    """Holds what the stages share: lowered block classes, segments and events."""

    def __init__(self, graph: Graph, tree: StrategyTree, job: Job) -> None:
        self.graph, self.tree, self.job = graph, tree, job
        problems = check_nodes(graph, tree.nodes, tree.mesh)
        if problems:
            raise PlanError(problems)
        self.mesh = self._refined_mesh()
        self.table = EventTable()
        self.segments: list[Segment] = []
        self.backwards = {block.name: derive_backward(block) for block in graph.blocks}
        self.lowered: dict[tuple[str, tuple[int, ...]], LoweredBlock] = {}
        self.cut: dict[tuple[int, int, str], int] = {}

    def _refined_mesh(self) -> Mesh:
        nodes = self.tree.nodes
        pairs = [
            (op, resolve(nodes, op_path(block, 0, op.name)))
            for block in self.graph.blocks
            for op in block.ops
        ]
        return refine_mesh(self.tree.mesh, pairs)

    def program(self) -> Program:
        """Returns the Program; all stages are lowered from the same classes."""
        chunks = self._virtual_stages()
        self._raise_problems()
        classes = [self._stage(stage, chunks) for stage in range(self.tree.schedule.pp)]
        return Program(
            mesh=self.mesh,
            events=tuple(self.table.events),
            segments=tuple(self.segments),
            classes=tuple(classes),
            samples_per_step=self.job.samples_per_step,
        )

    def _raise_problems(self) -> None:
        problems = list(
            dict.fromkeys(p for lowered in self.lowered.values() for p in lowered.flow.problems)
        )
        if problems:
            raise PlanError(problems)

    def _virtual_stages(self) -> list[list[LoweredBlock]]:
        """The block instances of every virtual stage, in model order."""
        first, *middle, last = self.graph.blocks
        layers = [instance for block in middle for instance in self._instances(block)]
        counts = self.tree.schedule.stages
        if sum(counts) != len(layers):
            raise PlanError(
                Problem(
                    what="the layers of the stages do not add up to the layers of the model",
                    where="plan.stages",
                    value=list(counts),
                    allowed=f"{len(counts)} numbers that sum to {len(layers)}",
                )
            )
        chunks: list[list[LoweredBlock]] = []
        start = 0
        for count in counts:
            chunks.append(layers[start : start + count])
            start += count
        chunks[0] = [*self._instances(first), *chunks[0]]
        chunks[-1] = [*chunks[-1], *self._instances(last)]
        return chunks

    def _instances(self, block: Block) -> list[LoweredBlock]:
        nodes = self.tree.nodes
        keys = layer_classes(nodes, block.name, block.repeat)
        backward: Backward = self.backwards[block.name]
        result: list[LoweredBlock] = []
        for layer, key in enumerate(keys):
            known = self.lowered.get((block.name, key))
            if known is None:
                selective = self.job.stack.selective
                known = lower_block(block, backward, layer, nodes, self.mesh, selective)
                self.lowered[block.name, key] = known
            result.append(known)
        return result

    def _stage(self, stage: int, chunks: Sequence[Sequence[LoweredBlock]]) -> RankClass:
        schedule, mesh = self.tree.schedule, self.mesh
        groups = Groups(mesh=mesh, devices_per_node=self.job.devices_per_node)
        canonical = self._canonical(stage)
        own = [chunks[c * schedule.pp + stage] for c in range(schedule.interleave)]
        context = StageContext(
            stage=stage,
            canonical=canonical,
            tree=self.tree,
            mesh=mesh,
            groups=groups,
            table=self.table,
            segments=self.segments,
            precision=self.job.precision,
            optimizer=self.job.optimizer,
            factored=factored_share(w for block in self.graph.blocks for w in block.weights),
            stack=self.job.stack,
            chunks=tuple(tuple(self._instance(b, canonical) for b in chunk) for chunk in own),
            tied=self._tied_elements(chunks, stage),
            boundary=self._boundary(chunks),
            scattered=self._scattered(chunks),
            by_module=self.job.by_module,
        )
        built = build_entries(context)
        ranks = tuple(
            rank
            for rank in range(mesh.world_size)
            if "pp" not in mesh.axes or mesh.coordinates(rank)["pp"] == stage
        )
        return RankClass(
            name=f"stage {stage}",
            stage=stage,
            ranks=ranks,
            entries=built.entries,
            persistent=built.persistent,
            flat_step_bytes=built.flat_step_bytes,
            host_bytes=built.host_bytes,
        )

    def _canonical(self, stage: int) -> int:
        """The first stage whose first rank has the same place in its node: equal topology."""
        stride = self.mesh.stride("pp") if "pp" in self.mesh.axes else 0
        per_node = self.job.devices_per_node
        place = stage * stride % per_node
        return next(s for s in range(stage + 1) if s * stride % per_node == place)

    def _instance(self, lowered: LoweredBlock, canonical: int) -> Instance:
        pp = self.tree.schedule.pp
        return Instance(
            lowered=lowered,
            unit=self._unit(lowered, pp),
            forward=self._segment(lowered, canonical, "forward"),
            backward=self._segment(lowered, canonical, "backward"),
        )

    def _unit(self, lowered: LoweredBlock, pp: int) -> Unit:
        return make_unit(lowered, self.mesh, second_copy=pp > 1)

    def _segment(self, lowered: LoweredBlock, canonical: int, which: str) -> int:
        key = (id(lowered), canonical, which)
        if key not in self.cut:
            maker = SegmentMaker(
                table=self.table,
                groups=Groups(mesh=self.mesh, devices_per_node=self.job.devices_per_node),
                shaper=self._shaper(lowered),
                stage=canonical,
                overlap_tp=self.tree.runtime.overlap_tp,
                fused=self.job.stack.fused,
                by_module=self.job.by_module,
            )
            make = maker.forward if which == "forward" else maker.backward
            self.segments.append(self._with_passes(make(lowered), lowered, which))
            self.cut[key] = len(self.segments) - 1
        return self.cut[key]

    def _with_passes(self, segment: Segment, lowered: LoweredBlock, which: str) -> Segment:
        """Adds what the framework launches around the operators of a unit."""
        passes = Passes(
            table=self.table,
            mesh=self.mesh,
            precision=self.job.precision,
            stack=self.job.stack,
            accumulation=self.tree.schedule.accumulation,
        )
        unit = self._unit(lowered, self.tree.schedule.pp)
        if which == "forward":
            before, after = passes.before_forward(unit), []
        else:
            before, after = passes.before_backward(unit), passes.after_backward(unit)
            segment = _changed(segment, passes.change_of_backward(unit))
        shift = len(before)
        moved = [
            replace(item, waits=tuple(wait + shift for wait in item.waits))
            for item in segment.items
        ]
        return replace(segment, items=(*before, *moved, *after))

    def _shaper(self, lowered: LoweredBlock) -> Shaper:
        stack = self.job.stack
        return Shaper(
            mesh=self.mesh,
            tensors=lowered.tensors,
            precision=self.job.precision,
            fused_accumulation="wgrad_accumulate" in self.job.stack.fused,
            held_bytes=held_bytes(lowered, self.job.precision, stack),
        )

    def _boundary(self, chunks: Sequence[Sequence[LoweredBlock]]) -> float:
        """Bytes that each rank sends over a stage boundary."""
        for lowered in (block for chunk in chunks for block in chunk):
            if lowered.output is not None:
                whole = self._shaper(lowered).copy_bytes(lowered.output)
                tp = self._tp_size() if self._scattered(chunks) else 1
                return whole / tp
        return 0.0

    def _tp_size(self) -> int:
        return self.mesh.size([axis for axis in self.mesh.axes if family(axis) == "tp"])

    def _scattered(self, chunks: Sequence[Sequence[LoweredBlock]]) -> bool:
        """Whether ranks that hold the same boundary tensor send 1/tp each (a stack's choice)."""
        output = next(b.output for chunk in chunks for b in chunk if b.output is not None)
        split = {family(axis) for axis in output[1].shard_axes}
        return self.job.stack.scatter_gather and self._tp_size() > 1 and "tp" not in split

    def _tied_elements(self, chunks: Sequence[Sequence[LoweredBlock]], stage: int) -> int:
        """Elements of a weight that this stage shares with another stage, on one rank."""
        pp = self.tree.schedule.pp
        if pp == 1 or stage not in (0, pp - 1):
            return 0
        return sum(self._unit(block, pp).tied for block in chunks[-1])
