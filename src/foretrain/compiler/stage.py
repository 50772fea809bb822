"""The launch list of one pipeline stage: schedule slots, transfers, gathers, reductions, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from foretrain.compiler.block import LoweredBlock
from foretrain.compiler.events import EventTable, Groups
from foretrain.compiler.optimizer import norm_segment, state_bytes, update_segment
from foretrain.compiler.parameters import Unit, WeightGroup, merge
from foretrain.compiler.placements import Redistribution, family
from foretrain.compiler.schedule import SCHEDULES, Slot
from foretrain.graph.precision import Precision
from foretrain.mesh import Mesh
from foretrain.program import Category, Comm, CommEvent, Entry, Run, Segment
from foretrain.stack import Stack
from foretrain.strategy.tree import StrategyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One block instance of a chunk: its weights and its two segments."""

    lowered: LoweredBlock
    unit: Unit
    forward: int
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """All that the launch list of a stage depends on."""

    stage: int
    canonical: int
    tree: StrategyTree
    mesh: Mesh
    groups: Groups
    table: EventTable
    segments: list[Segment]
    precision: Precision
    optimizer: str
    stack: Stack
    chunks: tuple[tuple[Instance, ...], ...]
    tied: int
    boundary: float
    scattered: bool

    def units(self) -> list[Unit]:
        """Returns the units of all chunks."""
        return [instance.unit for chunk in self.chunks for instance in chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """The entries of a stage and what it holds all step, by part."""

    entries: tuple[Entry, ...]
    persistent: Mapping[str, float]


def build_entries(context: StageContext) -> BuiltStage:
    """Returns the launch list of a stage for one optimizer step."""
    writer = _Writer(context)
    writer.publish_before()
    schedule = context.tree.schedule
    slots = SCHEDULES[schedule.kind](
        context.stage, schedule.pp, schedule.accumulation, schedule.interleave, schedule.in_flight
    )
    last_of_chunk = {
        chunk: max(i for i, s in enumerate(slots) if s.phase == "B" and s.chunk == chunk)
        for chunk in range(schedule.interleave)
    }
    finals = {slots[i] for i in last_of_chunk.values()}
    for group in exchange_groups(slots, together=schedule.interleave > 1):
        writer.exchange(group, finals)
    writer.step()
    return BuiltStage(entries=tuple(writer.entries), persistent=persistent_bytes(context))


def exchange_groups(slots: Sequence[Slot], *, together: bool) -> list[list[Slot]]:
    """Returns the slots between two exchanges with the neighbouring stages.

    1F1B exchanges after every slot. Interleaved schedules compute a forward and a backward in the
    steady state and then send both and receive both for the next pair at once.
    """
    if not together:
        return [[slot] for slot in slots]
    phases = [slot.phase for slot in slots]
    warmup = phases.index("B") - 1 if "F" in phases[phases.index("B") :] else phases.index("B")
    groups: list[list[Slot]] = [[slot] for slot in slots[:warmup]]
    for slot in slots[warmup:]:
        paired = groups and slot.phase == "B" and [s.phase for s in groups[-1]] == ["F"]
        if paired and len(groups) > warmup:
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return groups


def persistent_bytes(context: StageContext) -> dict[str, float]:
    """Returns the bytes of weights, gradients and optimizer states of one rank of the stage."""
    precision, mesh = context.precision, context.mesh
    groups = merge(group for unit in context.units() for group in unit.groups)
    states = state_bytes(context.optimizer, precision)
    trains = context.optimizer != "none"
    return {
        "weights": sum(g.share(g.signature.stored, mesh) for g in groups)
        * precision.bytes("weight"),
        "gradients": sum(g.share(g.signature.accumulated, mesh) for g in groups)
        * precision.bytes("grad_accumulate"),
        "optimizer": sum(g.share(g.signature.master, mesh) for g in groups) * states
        if trains
        else 0.0,
    }


@dataclass(slots=True)
class _Writer:
    """Appends entries; indices of entries serve as handles to wait for."""

    context: StageContext
    entries: list[Entry] = field(default_factory=list[Entry])
    pending: list[tuple[WeightGroup, ...]] = field(default_factory=list[tuple[WeightGroup, ...]])
    reductions: list[int] = field(default_factory=list[int])
    blocking_sends: list[int] = field(default_factory=list[int])
    ready: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    gathered: dict[tuple[int, int], list[int]] = field(
        default_factory=dict[tuple[int, int], list[int]]
    )
    first_bucket_done: bool = False

    # -- small helpers ---------------------------------------------------------------------

    def add(self, entry: Entry) -> int:
        """Returns the index of a new entry."""
        self.entries.append(entry)
        return len(self.entries) - 1

    def event(self, event: CommEvent) -> int:
        """Returns the id of a communication event."""
        return self.context.table.intern(event)

    def collective(
        self,
        step: Redistribution,
        dtype: str,
        size: float,
        *,
        label: str,
        stream: str,
        after: Sequence[int] = (),
        count: int = 1,
        delta_start: Mapping[str, float] | None = None,
        delta_end: Mapping[str, float] | None = None,
        microbatch: int = 0,
        chunk: int = 0,
    ) -> int:
        """Appends one inferred collective as an asynchronous entry."""
        c = self.context
        name = family(step.axes[0])
        category: Category = "tp" if name == "tp" else "dp"
        event = c.groups.event(
            step.collective, step.axes, step.elements * size / count, dtype, c.canonical, count
        )
        return self.add(
            Comm(
                label=f"{label} {step.collective.replace('_', '-')}",
                event=self.event(event),
                stream=stream if category == "dp" else "tp",
                category=category,
                axes=step.axes,
                after=tuple(after),
                delta_start=delta_start or {},
                delta_end=delta_end or {},
                microbatch=microbatch,
                chunk=chunk,
            )
        )

    # -- schedule --------------------------------------------------------------------------

    def exchange(self, group: Sequence[Slot], finals: set[Slot]) -> None:
        """Writes the receives of a group of slots, its computation, and its sends."""
        c = self.context
        overlapping = c.tree.runtime.overlap_p2p
        received = [self._receive(slot) for slot in group]
        runs: list[int] = []
        for slot, handles in zip(group, received, strict=True):
            waits = [*self.blocking_sends, *handles]
            self.blocking_sends = []
            synced = bool(waits) and c.stack.p2p_sync and not overlapping
            write = self._forward if slot.phase == "F" else self._backward
            runs.append(write(slot, waits, synced, slot in finals))
        for slot, run in zip(group, runs, strict=True):
            edge = self._edge(slot, leaving=True)
            if edge is not None:
                send = self._transfer(slot, edge, receive=False, after=run)
                if not overlapping:
                    self.blocking_sends.append(send)

    def _edge(self, slot: Slot, *, leaving: bool) -> int | None:
        """The boundary (between virtual stages edge and edge + 1) a slot's tensor passes."""
        schedule = self.context.tree.schedule
        virtual = slot.chunk * schedule.pp + self.context.stage
        last = schedule.pp * schedule.interleave - 1
        downwards = (slot.phase == "F") == leaving
        edge = virtual if downwards else virtual - 1
        return edge if 0 <= edge < last else None

    def _receive(self, slot: Slot) -> list[int]:
        edge = self._edge(slot, leaving=False)
        if edge is None:
            return []
        handles = [self._transfer(slot, edge, receive=True)]
        if self.context.scattered:
            handles.append(self._whole_boundary(slot, handles[0]))
        return handles

    def _transfer(self, slot: Slot, edge: int, *, receive: bool, after: int | None = None) -> int:
        """Writes one side of a transfer between stages."""
        c = self.context
        pp = c.tree.schedule.pp
        forward = slot.phase == "F"
        source, target = (edge % pp, (edge + 1) % pp) if forward else ((edge + 1) % pp, edge % pp)
        stride = c.mesh.stride("pp")
        ranks = (source * stride, target * stride)
        per_node = c.groups.devices_per_node
        crossing = ranks[0] // per_node != ranks[1] // per_node
        same_stage = min(stride, per_node) if c.mesh.axes[0] == "pp" else 1
        event = CommEvent(
            collective="send_recv",
            bytes=c.boundary,
            dtype=c.precision.compute,
            ranks=ranks,
            sharers=same_stage if crossing else 1,
        )
        part = "activations" if forward else "temporary"
        word = "recv" if receive else "send"
        return self.add(
            Comm(
                label=f"{word} {'activation' if forward else 'gradient'}",
                event=self.event(event),
                stream=f"pp {word} {'forward' if forward else 'backward'}",
                category="pp",
                axes=("pp",),
                after=() if after is None else (after,),
                key=f"{slot.phase}{edge}.{slot.microbatch}",
                posted=receive and c.tree.runtime.overlap_p2p,
                delta_start={part: c.boundary} if receive else {},
                delta_end={} if receive else {part: -c.boundary},
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
        )

    def _whole_boundary(self, slot: Slot, received: int) -> int:
        """Gathers the boundary tensor over tp where each rank received only its part."""
        c = self.context
        axes = tuple(axis for axis in c.mesh.axes if family(axis) == "tp")
        event = c.groups.event(
            "all_gather", axes, c.boundary * c.mesh.size(axes), c.precision.compute, c.canonical
        )
        return self.add(
            Comm(
                label="boundary all-gather",
                event=self.event(event),
                stream="tp",
                category="tp",
                axes=axes,
                after=(received,),
                posted=True,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
        )

    def _forward(self, slot: Slot, waits: list[int], synced: bool, final: bool) -> int:
        del final
        chunk = self.context.chunks[slot.chunk]
        first = slot.microbatch == 0 and any(
            self.ready.get(id(instance.unit)) for instance in chunk
        )
        if not first and not any(instance.unit.gathered for instance in chunk):
            return self._whole(slot, [instance.forward for instance in chunk], waits, synced)
        order = list(range(len(chunk)))
        return self._per_unit(slot, order, waits, synced)

    def _backward(self, slot: Slot, waits: list[int], synced: bool, final: bool) -> int:
        c = self.context
        chunk = c.chunks[slot.chunk]
        micro = any(self._microstep(instance.unit) for instance in chunk)
        bucketed = final and c.tree.runtime.overlap_grad
        if not micro and not bucketed and not any(i.unit.gathered for i in chunk):
            segments = [instance.backward for instance in reversed(chunk)]
            run = self._whole(slot, segments, waits, synced)
            if final:
                self.pending += [instance.unit.groups for instance in reversed(chunk)]
            return run
        order = list(reversed(range(len(chunk))))
        return self._per_unit(slot, order, waits, synced, final=final)

    def _whole(self, slot: Slot, segments: list[int], waits: list[int], synced: bool) -> int:
        return self.add(
            Run(
                segments=tuple(segments),
                slot=slot.phase,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
                after=tuple(waits),
                host_sync=synced,
            )
        )

    def _per_unit(
        self, slot: Slot, order: list[int], waits: list[int], synced: bool, final: bool = False
    ) -> int:
        """One entry per unit: gathers `prefetch` units ahead, reductions behind."""
        chunk = self.context.chunks[slot.chunk]
        ahead = max(0, self.context.tree.runtime.prefetch)
        ahead = ahead if self.context.tree.runtime.overlap_param else 0
        run = -1
        issued = 0
        for position, i in enumerate(order):
            while issued < len(order) and issued <= position + ahead:
                self._gather(slot, order[issued])
                issued += 1
            unit = chunk[i].unit
            handles = [*self.gathered.get((slot.chunk, i), []), *self.ready.get(id(unit), [])]
            if slot.phase == "F":
                self.ready.pop(id(unit), None)
            run = self._unit_run(slot, i, [*waits, *handles], synced)
            waits, synced = [], False
            if slot.phase == "B":
                self._reduce_unit(unit, slot, final=final)
        return run

    def _unit_run(self, slot: Slot, i: int, waits: list[int], synced: bool) -> int:
        instance = self.context.chunks[slot.chunk][i]
        forward = slot.phase == "F"
        delta: dict[str, float] = {}
        key = (slot.chunk, i)
        if key in self.gathered and (not forward or instance.unit.reshard):
            del self.gathered[key]
            delta["gathered weights"] = -self._gathered_bytes(instance.unit)
        if not forward and self._microstep(instance.unit):
            delta["gradients"] = self._whole_grad_bytes(instance.unit)
        return self.add(
            Run(
                segments=(instance.forward if forward else instance.backward,),
                slot=slot.phase,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
                layer=instance.unit.path,
                after=tuple(waits),
                host_sync=synced,
                delta_end=delta,
            )
        )

    # -- weights and gradients -------------------------------------------------------------

    def _gathered_bytes(self, unit: Unit) -> float:
        gathered = sum(g.elements for g in unit.groups if g.signature.stored)
        return gathered * self._gather_size()

    def _gather_dtype(self) -> str:
        compute = self.context.precision.compute
        return "bf16" if compute in ("fp8", "mxfp8", "nvfp4") else compute

    def _gather_size(self) -> float:
        return self.context.precision.bytes(self._gather_dtype())

    def _gather(self, slot: Slot, i: int) -> None:
        unit = self.context.chunks[slot.chunk][i].unit
        if not unit.gathered or (slot.chunk, i) in self.gathered:
            return
        size = self._gather_size()
        self.gathered[slot.chunk, i] = [
            self.collective(
                step,
                self._gather_dtype(),
                size,
                label=f"{unit.path} weights",
                stream="gather",
                delta_start={"gathered weights": step.elements * size},
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
            for group in unit.groups
            for step in group.gather(self.context.mesh)
        ]

    def _microstep(self, unit: Unit) -> bool:
        return any(group.reduce_microstep(self.context.mesh) for group in unit.groups)

    def _whole_grad_bytes(self, unit: Unit) -> float:
        mesh = self.context.mesh
        elements = sum(g.elements for g in unit.groups if g.reduce_microstep(mesh))
        return elements * self.context.precision.bytes("grad")

    def _reduce_unit(self, unit: Unit, slot: Slot, *, final: bool) -> None:
        """Reduces what may not stay partial; buckets the rest when this is the last micro-step."""
        c = self.context
        freed = self._whole_grad_bytes(unit)
        for group in unit.groups:
            steps = group.reduce_microstep(c.mesh)
            for step in steps:
                share = group.elements * c.precision.bytes("grad")
                self.reductions.append(
                    self.collective(
                        step,
                        c.precision.grad_reduce,
                        c.precision.bytes("grad_reduce"),
                        label=f"{unit.path} gradients",
                        stream="reduce",
                        delta_end={"gradients": -min(share, freed)} if step == steps[-1] else None,
                        microbatch=slot.microbatch,
                        chunk=slot.chunk,
                    )
                )
        if not final:
            return
        self.pending.append(unit.groups)
        if c.tree.runtime.overlap_grad:
            self._flush(everything=False)

    def _flush(self, *, everything: bool) -> None:
        """Launches the step's reduction of pending gradients in buckets."""
        c = self.context
        runtime = c.tree.runtime
        groups = merge(group for unit in self.pending for group in unit)
        size = c.precision.bytes("grad_reduce")
        data = sum(g.elements * size for g in groups if self._reduces_data(g))
        limit = runtime.bucket_bytes or 0.0
        if runtime.first_bucket_bytes is not None and not self.first_bucket_done:
            limit = runtime.first_bucket_bytes
        if not everything and (data < limit or not data):
            return
        self.first_bucket_done = True
        self.pending = []
        for group in groups:
            for step in group.reduce_step(c.mesh):
                whole = group.elements * size
                many = family(step.axes[0]) == "data" and runtime.bucket_bytes
                count = max(1, ceil(whole / runtime.bucket_bytes - 1e-9)) if many else 1
                self.reductions.append(
                    self.collective(
                        step,
                        c.precision.grad_reduce,
                        size,
                        label="gradients",
                        stream="reduce",
                        count=count if runtime.bucket_bytes else 1,
                    )
                )

    def _reduces_data(self, group: WeightGroup) -> bool:
        return any(family(s.axes[0]) == "data" for s in group.reduce_step(self.context.mesh))

    # -- optimizer step --------------------------------------------------------------------

    def publish_before(self) -> None:
        """With overlapped parameter gathering: last step's updated weights arrive per unit."""
        c = self.context
        if not c.tree.runtime.overlap_param or c.optimizer == "none":
            return
        for unit in c.units():
            handles = [
                self._publish(group, step, unit.path)
                for group in unit.groups
                for step in group.publish(c.mesh)
            ]
            if handles:
                self.ready[id(unit)] = handles

    def _publish(self, group: WeightGroup, step: Redistribution, path: str) -> int:
        del group
        precision = self.context.precision
        return self.collective(
            step,
            precision.weight,
            precision.bytes("weight"),
            label=f"{path} updated weights",
            stream="gather",
        )

    def step(self) -> None:
        """Writes the rest of the reductions, the tied weights, norm, update, parameter gather."""
        c = self.context
        self._flush(everything=True)
        if c.tied:
            self.reductions.append(self._tied())
        if c.optimizer == "none":
            return
        groups = merge(group for unit in c.units() for group in unit.groups)
        elements = sum(g.share(g.signature.master, c.mesh) for g in groups)
        kept = sum(g.share(g.signature.accumulated, c.mesh) for g in groups)
        after = self.reductions
        if c.stack.grad_norm:
            norm = self._run_segment(norm_segment(c.table, elements, c.precision), after)
            after = [self._norm_all_reduce(norm)]
        update = update_segment(c.table, c.optimizer, elements, kept, c.precision)
        run = self._run_segment(update, after, sync=c.stack.grad_norm)
        if c.tree.runtime.overlap_param:
            return
        for group in groups:
            for step in group.publish(c.mesh):
                self.collective(
                    step,
                    c.precision.weight,
                    c.precision.bytes("weight"),
                    label="updated weights",
                    stream="gather",
                    after=(run,),
                )

    def _run_segment(self, segment: Segment, after: Sequence[int], *, sync: bool = False) -> int:
        segments = self.context.segments
        known = next((i for i, other in enumerate(segments) if other == segment), None)
        if known is None:
            segments.append(segment)
            known = len(segments) - 1
        return self.add(Run(segments=(known,), slot="step", after=tuple(after), host_sync=sync))

    def _norm_all_reduce(self, norm: int) -> int:
        """The squared norm is summed over all ranks: every stage waits for the slowest here."""
        c = self.context
        event = CommEvent(
            collective="all_reduce",
            bytes=4.0,
            dtype="fp32",
            ranks=tuple(range(c.mesh.world_size)),
        )
        return self.add(
            Comm(
                label="gradient norm all-reduce",
                event=self.event(event),
                stream="reduce",
                category="dp",
                axes=c.mesh.axes,
                after=(norm,),
                key="gradient norm",
            )
        )

    def _tied(self) -> int:
        """The gradient of a weight that stands on the first and the last stage."""
        c = self.context
        pp, stride = c.tree.schedule.pp, c.mesh.stride("pp")
        ranks = (0, (pp - 1) * stride)
        precision = c.precision
        event = CommEvent(
            collective="all_reduce",
            bytes=c.tied * precision.bytes("grad_accumulate"),
            dtype=precision.grad_accumulate,
            ranks=ranks,
            sharers=min(stride, c.groups.devices_per_node),
        )
        return self.add(
            Comm(
                label="tied embedding gradient all-reduce",
                event=self.event(event),
                stream="tied",
                category="pp",
                axes=("pp",),
                after=tuple(self.reductions),
                key="tied embedding",
            )
        )
