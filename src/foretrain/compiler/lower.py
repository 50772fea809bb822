"""Lowering: graph and strategy tree become a Program.

Order of passes: derive backward, place layouts (with recompute), infer communication, framework
passes (accumulate, bucket, prefetch, tie, fuse), schedule, lifetimes. This module does the block
classes and the stages; compiler/stage.py writes the launch list of one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from foretrain.compiler.block import LoweredBlock, lower_block, op_path, owner_axes, repeats
from foretrain.compiler.check_nodes import check_nodes
from foretrain.compiler.events import EventTable, Groups, Shaper
from foretrain.compiler.exchange import Part, cut
from foretrain.compiler.held import held_bytes
from foretrain.compiler.launches import Boundary, Instance, Piece, StageContext, Tie
from foretrain.compiler.optimizer import factored_share
from foretrain.compiler.parameters import Unit, make_unit, tied_weights
from foretrain.compiler.passes import Passes
from foretrain.compiler.placements import family
from foretrain.compiler.segments import SegmentMaker
from foretrain.compiler.splits import refine_mesh
from foretrain.compiler.stage import build_entries
from foretrain.compiler.tables import (
    TableGroup,
    bag_updates,
    position,
    table_bytes,
    table_groups,
)
from foretrain.errors import PlanError, Problem
from foretrain.graph.backward import Backward, derive_backward
from foretrain.graph.ir import Graph
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
    table_optimizer: str = "sgd"  # of tables that backward updates
    by_module: bool = False  # book live bytes by module instead of by part
    fp8_layouts: int = 1  # in how many layouts the device reads an FP8 weight


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
        self.backwards = [derive_backward(block) for block in graph.blocks]
        self.lowered: dict[tuple[int, tuple[int, ...]], LoweredBlock] = {}
        self.shapers: dict[int, Shaper] = {}  # by the id of a lowered block, as in self.cut
        self.tied: dict[int, dict[str, int]] = {}
        self.units: dict[tuple[int, frozenset[str]], Unit] = {}
        self.cut: dict[tuple[int, int, str, frozenset[str], int | None], tuple[Piece, ...]] = {}

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
        boundaries, scattered = self._boundaries(chunks), self._scattered(chunks)
        groups = table_groups([block for chunk in chunks for block in chunk], self.mesh)
        classes = [
            self._stage(stage, chunks, boundaries, group, scattered, alone=len(groups) == 1)
            for stage in range(self.tree.schedule.pp)
            for group in groups
        ]
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
        layers = self._layers()
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
            chunks.append([b for layer in layers[start : start + count] for b in layer])
            start += count
        last = len(self.graph.blocks) - 1
        chunks[0] = [*self._instances(0).values(), *chunks[0]]
        chunks[-1] = [*chunks[-1], *self._instances(last).values()]
        return chunks

    def _layers(self) -> list[list[LoweredBlock]]:
        """The layers in model order; a block that makes the side tensor joins the next layer."""
        layers: list[list[LoweredBlock]] = []
        joining: list[LoweredBlock] = []
        middle = range(1, len(self.graph.blocks) - 1)
        for _, kinds in groupby(middle, key=lambda i: self.graph.blocks[i].name):
            instances: dict[int, LoweredBlock] = {}
            makes_side = False
            for i in kinds:
                instances |= self._instances(i)
                makes_side = self.graph.blocks[i].makes_side
            ordered = [instances[number] for number in sorted(instances)]
            if makes_side:
                joining = ordered
                continue
            layers += [[*(joining if i == 0 else ()), one] for i, one in enumerate(ordered)]
            joining = []
        return layers

    def _instances(self, index: int) -> dict[int, LoweredBlock]:
        """The repeats of a block by their number; those with equal settings are one object."""
        nodes, block = self.tree.nodes, self.graph.blocks[index]
        backward: Backward = self.backwards[index]
        result: dict[int, LoweredBlock] = {}
        for layer, key in zip(
            block.layers, layer_classes(nodes, block.name, block.layers), strict=True
        ):
            known = self.lowered.get((index, key))
            if known is None:
                selective = self.job.stack.selective
                known = lower_block(block, backward, layer, nodes, self.mesh, selective)
                self.lowered[index, key] = known
            result[layer] = known
        return result

    def _stage(
        self,
        stage: int,
        chunks: Sequence[Sequence[LoweredBlock]],
        boundaries: tuple[Boundary, ...],
        group: TableGroup,
        scattered: bool,
        *,
        alone: bool,
    ) -> RankClass:
        """One class of ranks: a stage, and of it the ranks with the tables of `group`."""
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
            chunks=self._stage_instances(own, canonical, group.owner),
            ties=self._ties(chunks, stage),
            boundaries=boundaries,
            scattered=scattered,
            joint=not alone,
            tables=self._table_bytes(own, group.owner),
            by_module=self.job.by_module,
            fp8_layouts=self.job.fp8_layouts,
        )
        built = build_entries(context)
        return RankClass(
            name=f"stage {stage}" if alone else f"tables of rank {group.owner}",
            stage=stage,
            ranks=self._ranks(stage, group, alone=alone),
            entries=built.entries,
            persistent=built.persistent,
            flat_step_bytes=built.flat_step_bytes,
            host_bytes=built.host_bytes,
        )

    def _ranks(self, stage: int, group: TableGroup, *, alone: bool) -> tuple[int, ...]:
        mesh = self.mesh
        axes = owner_axes(mesh)
        places = {rank: mesh.coordinates(rank) for rank in range(mesh.world_size)}
        return tuple(
            rank
            for rank, place in places.items()
            if place.get("pp", 0) == stage
            and (alone or position(place, mesh, axes) in group.members)
        )

    def _table_bytes(
        self, own: Sequence[Sequence[LoweredBlock]], owner: int | None
    ) -> tuple[float, float]:
        blocks = [block for chunk in own for block in chunk]
        job = self.job
        return table_bytes(blocks, owner, self.mesh, job.precision, job.table_optimizer)

    def _canonical(self, stage: int) -> int:
        """The first stage whose first rank has the same place in its node: equal topology."""
        stride = self.mesh.stride("pp") if "pp" in self.mesh.axes else 0
        per_node = self.job.devices_per_node
        place = stage * stride % per_node
        return next(s for s in range(stage + 1) if s * stride % per_node == place)

    def _stage_instances(
        self, chunks: Sequence[Sequence[LoweredBlock]], canonical: int, owner: int | None
    ) -> tuple[tuple[Instance, ...], ...]:
        """The instances of a stage: of tied weights the first copy on the stage counts."""
        held: set[str] = set()
        result: list[tuple[Instance, ...]] = []
        for chunk in chunks:
            instances: list[Instance] = []
            for lowered in chunk:
                names = self._tied_weights(lowered)
                key = (canonical, frozenset(held & names.keys()), owner)
                instances.append(self._instance(lowered, key))
                held |= names.keys()
            result.append(tuple(instances))
        return tuple(result)

    def _tied_weights(self, lowered: LoweredBlock) -> dict[str, int]:
        known = self.tied.get(id(lowered))
        if known is None:
            known = self.tied[id(lowered)] = tied_weights(lowered, self.mesh)
        return known

    def _instance(
        self, lowered: LoweredBlock, key: tuple[int, frozenset[str], int | None]
    ) -> Instance:
        place = (id(lowered), key[1])
        if place not in self.units:
            self.units[place] = make_unit(lowered, self.mesh, held=key[1])
        unit = replace(self.units[place])  # one object per instance: traffic is booked by unit
        return Instance(
            lowered=lowered,
            unit=unit,
            forward=self._pieces(lowered, unit, "forward", key),
            backward=self._pieces(lowered, unit, "backward", key),
        )

    def _pieces(
        self,
        lowered: LoweredBlock,
        unit: Unit,
        which: str,
        place: tuple[int, frozenset[str], int | None],
    ) -> tuple[Piece, ...]:
        """The segments of one pass of a block, cut where embeddings are exchanged.

        `place` is the canonical stage, the tied weights that the stage holds already, and the rank
        whose tables the class of ranks holds.
        """
        canonical, held, owner = place
        key = (id(lowered), canonical, which, held, owner if lowered.flow.owners else None)
        if key not in self.cut:
            maker = SegmentMaker(
                table=self.table,
                groups=Groups(mesh=self.mesh, devices_per_node=self.job.devices_per_node),
                shaper=self._shaper(lowered),
                stage=canonical,
                overlap_tp=self.tree.runtime.overlap_tp,
                fused=self._fused(),
                owner=owner,
                overlap_tables=self.tree.runtime.overlap_tables,
                sparse_exchange=self.job.stack.sparse_exchange,
                by_module=self.job.by_module,
            )
            make = maker.forward if which == "forward" else maker.backward
            segment = self._with_passes(make(lowered), unit, which, again=repeats(lowered))
            self.cut[key] = tuple(self._piece(segment.name, part) for part in cut(segment.items))
        return self.cut[key]

    def _piece(self, name: str, part: Part) -> Piece:
        if part.is_exchange:
            return Piece(segment=None, exchange=part.items[0], waits=part.waits)
        self.segments.append(Segment(name=name, items=part.items))
        return Piece(segment=len(self.segments) - 1, exchange=None, waits=part.waits)

    def _fused(self) -> tuple[str, ...]:
        """What the stack fuses; one that joins q, k and v joins k and v of cross attention."""
        fused = self.job.stack.fused
        return (*fused, "kv") if "qkv" in fused else fused

    def _with_passes(self, segment: Segment, unit: Unit, which: str, *, again: bool) -> Segment:
        """Adds what the framework launches around the operators of a unit."""
        passes = Passes(
            table=self.table,
            mesh=self.mesh,
            precision=self.job.precision,
            stack=self.job.stack,
            accumulation=self.tree.schedule.accumulation,
        )
        around = passes.around_forward if which == "forward" else passes.around_backward
        return around(segment, unit, again=again)

    def _shaper(self, lowered: LoweredBlock) -> Shaper:
        known = self.shapers.get(id(lowered))
        if known is not None:
            return known
        stack = self.job.stack
        shaper = self.shapers[id(lowered)] = Shaper(
            mesh=self.mesh,
            tensors=lowered.tensors,
            precision=self.job.precision,
            fused_accumulation="wgrad_accumulate" in self.job.stack.fused,
            held_bytes=held_bytes(lowered, self.job.precision, stack),
            bag_update=bag_updates(lowered, self.job.table_optimizer),
            sparse_exchange=stack.sparse_exchange,
            low_gather=stack.low_gather,
        )
        return shaper

    def _boundaries(self, chunks: Sequence[Sequence[LoweredBlock]]) -> tuple[Boundary, ...]:
        """What each rank sends over the boundary after every virtual stage but the last."""
        whole = self._tp_size() if self._scattered(chunks) else 1
        main = side = 0.0
        result: list[Boundary] = []
        for chunk in chunks[:-1]:
            for lowered in chunk:
                if lowered.output is not None:
                    main = self._shaper(lowered).copy_bytes(lowered.output)
                if lowered.side is not None:
                    side = self._shaper(lowered).copy_bytes(lowered.side)
            result.append(Boundary(main=main / whole, side=side / whole, whole=whole))
        return tuple(result)

    def _tp_size(self) -> int:
        return self.mesh.size([axis for axis in self.mesh.axes if family(axis) == "tp"])

    def _scattered(self, chunks: Sequence[Sequence[LoweredBlock]]) -> bool:
        """Whether ranks that hold the same boundary tensor send 1/tp each (a stack's choice)."""
        output = next(b.output for chunk in chunks for b in chunk if b.output is not None)
        split = {family(axis) for axis in output[1].shard_axes}
        return self.job.stack.scatter_gather and self._tp_size() > 1 and "tp" not in split

    def _ties(self, chunks: Sequence[Sequence[LoweredBlock]], stage: int) -> tuple[Tie, ...]:
        """The weights that this stage shares with others, those of equal stages together."""
        pp = self.tree.schedule.pp
        stages: dict[str, set[int]] = {}
        elements: dict[str, int] = {}
        for place, chunk in enumerate(chunks):
            for lowered in chunk:
                for name, count in self._tied_weights(lowered).items():
                    stages.setdefault(name, set()).add(place % pp)
                    elements[name] = count
        shared: dict[tuple[int, ...], int] = {}
        for name, where in stages.items():
            if len(where) > 1 and stage in where:
                key = tuple(sorted(where))
                shared[key] = shared.get(key, 0) + elements[name]
        return tuple(Tie(stages=key, elements=count) for key, count in shared.items())
