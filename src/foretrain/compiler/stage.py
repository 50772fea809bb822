"""The launch list of one pipeline stage: schedule slots, transfers, gathers, reductions, update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.compiler.activation_offload import ActivationTraffic
from foretrain.compiler.launches import LaunchList, Piece, StageContext
from foretrain.compiler.offload import host_bytes, moved_off
from foretrain.compiler.parameters import Unit
from foretrain.compiler.passes import fresh_gradients
from foretrain.compiler.placements import family
from foretrain.compiler.schedule import SCHEDULES, Slot
from foretrain.compiler.segments import BOUNDARY
from foretrain.compiler.states import persistent_bytes, updated_elements
from foretrain.compiler.step import last_run, write_step
from foretrain.compiler.weights import WeightTraffic
from foretrain.compiler.wire import activation_dtype
from foretrain.errors import InternalError
from foretrain.program import Comm, CommEvent, Entry, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """The entries of a stage and what it holds all step, by part."""

    entries: tuple[Entry, ...]
    persistent: Mapping[str, float]
    flat_step_bytes: float
    host_bytes: Mapping[str, float]


def build_entries(context: StageContext) -> BuiltStage:
    """Returns the launch list of a stage for one optimizer step."""
    launches = LaunchList(context)
    weights = WeightTraffic(launches)
    weights.publish_before()
    writer = _Writer(launches, weights)
    schedule = context.tree.schedule
    slots = SCHEDULES[schedule.kind](
        context.stage, schedule.pp, schedule.accumulation, schedule.interleave, schedule.in_flight
    )
    last_of_chunk = {
        chunk: max(i for i, s in enumerate(slots) if s.phase == "B" and s.chunk == chunk)
        for chunk in range(schedule.interleave)
    }
    finals = {slots[i] for i in last_of_chunk.values()}
    for group in exchange_groups(slots, together=schedule.kind == "interleaved"):
        writer.exchange(group, finals)
    write_step(launches, weights)
    here = context.tree.runtime.offload == "none"
    flat = updated_elements(context) * 4.0 if context.stack.flat_step and here else 0.0
    return BuiltStage(
        entries=tuple(launches.entries),
        persistent=moved_off(context, persistent_bytes(context)),
        flat_step_bytes=max(flat, weights.flat_gather_bytes()),
        host_bytes=host_bytes(context, sum(c.host_bytes() for c in writer.copies)),
    )


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


def _boundary_part(slot: Slot, context: StageContext) -> str:
    """Activations and their gradients are booked apart."""
    if context.by_module:
        return BOUNDARY
    return "activations" if slot.phase == "F" else "temporary"


def _segments(passes: Iterable[Sequence[Piece]]) -> list[int]:
    return [p.segment for pieces in passes for p in pieces if p.segment is not None]


@dataclass(slots=True)
class _Writer:
    """Writes slots and transfers of one stage."""

    launches: LaunchList
    weights: WeightTraffic
    blocking_sends: list[int] = field(default_factory=list[int])
    routes: dict[tuple[int, int, float], int] = field(
        default_factory=dict[tuple[int, int, float], int]
    )
    passes: dict[tuple[str, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int], tuple[int, ...]]
    )
    fresh: dict[int, float] = field(default_factory=dict[int, float])
    gathers: dict[float, int] = field(default_factory=dict[float, int])
    copies: list[ActivationTraffic] = field(default_factory=list[ActivationTraffic])

    def __post_init__(self) -> None:
        chunks = self.context.chunks
        self.copies = [ActivationTraffic(self.launches, chunk) for chunk in chunks]

    @property
    def context(self) -> StageContext:
        """Returns what the stage is made of."""
        return self.launches.context

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
            handles.append(self._whole_boundary(slot, edge, handles[0]))
        return handles

    def _route_event(self, source: int, target: int, size: float) -> CommEvent:
        """The transfer from one stage to another; all ranks of a node send at the same time."""
        c = self.context
        stride = c.mesh.stride("pp")
        ranks = (source * stride, target * stride)
        per_node = c.groups.devices_per_node
        crossing = ranks[0] // per_node != ranks[1] // per_node
        same_stage = min(stride, per_node) if c.mesh.axes[0] == "pp" else 1
        return CommEvent(
            collective="send_recv",
            bytes=size,
            dtype=activation_dtype(c.precision),
            ranks=ranks,
            sharers=same_stage if crossing else 1,
        )

    def _transfer(self, slot: Slot, edge: int, *, receive: bool, after: int | None = None) -> int:
        """Writes one side of a transfer between stages."""
        c = self.context
        pp = c.tree.schedule.pp
        forward = slot.phase == "F"
        ends = (edge % pp, (edge + 1) % pp)
        boundary = c.boundaries[edge]
        source, sink = ends if forward else (ends[1], ends[0])
        route = (source, sink, boundary.bytes)
        if route not in self.routes:
            self.routes[route] = self.launches.event(self._route_event(*route))
        part = _boundary_part(slot, c)
        word = "recv" if receive else "send"
        freed = {part: -boundary.main * boundary.whole}
        if not forward:  # the side tensor that came with the activations was read to the end
            freed = {part: -boundary.bytes * boundary.whole}
            side = BOUNDARY if c.by_module else "activations"
            freed[side] = freed.get(side, 0.0) - boundary.side * boundary.whole
        return self.launches.add(
            Comm(
                label=f"{word} {'activation' if forward else 'gradient'}",
                event=self.routes[route],
                stream=f"pp {word} {'forward' if forward else 'backward'}",
                category="pp",
                axes=("pp",),
                after=() if after is None else (after,),
                key=f"{slot.phase}{edge}.{slot.microbatch}",
                posted=receive and c.tree.runtime.overlap_p2p,
                delta_start={part: boundary.bytes} if receive else {},
                delta_end={} if receive else freed,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
        )

    def _whole_boundary(self, slot: Slot, edge: int, received: int) -> int:
        """Gathers the boundary tensor over tp where each rank received only its part."""
        c = self.context
        axes = tuple(axis for axis in c.mesh.axes if family(axis) == "tp")
        boundary, part = c.boundaries[edge], _boundary_part(slot, c)
        whole = boundary.bytes * boundary.whole
        if whole not in self.gathers:
            event = c.groups.event("all_gather", axes, whole, c.precision.compute, c.canonical)
            self.gathers[whole] = self.launches.event(event)
        return self.launches.add(
            Comm(
                label="boundary all-gather",
                event=self.gathers[whole],
                stream="tp boundary",
                category="tp",
                axes=axes,
                after=(received,),
                delta_start={part: whole},
                delta_end={part: -boundary.bytes},
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
        )

    def _forward(self, slot: Slot, waits: list[int], synced: bool, final: bool) -> int:
        del final
        chunk = self.context.chunks[slot.chunk]
        first = slot.microbatch == 0 and any(
            self.weights.ready.get(id(instance.unit)) for instance in chunk
        )
        per_unit = self._apart(slot)
        if not first and not per_unit:
            return self._whole(slot, waits, synced)
        order = list(range(len(chunk)))
        return self._per_unit(slot, order, waits, synced)

    def _backward(self, slot: Slot, waits: list[int], synced: bool, final: bool) -> int:
        c = self.context
        chunk = c.chunks[slot.chunk]
        micro = any(instance.unit.microstep for instance in chunk)
        bucketed = final and c.tree.runtime.overlap_grad
        per_unit = self._apart(slot)
        if not micro and not bucketed and not per_unit:
            run = self._whole(slot, waits, synced)
            if final:
                self.weights.pending += [instance.unit.groups for instance in reversed(chunk)]
            return run
        order = list(reversed(range(len(chunk))))
        return self._per_unit(slot, order, waits, synced, final=final)

    def _apart(self, slot: Slot) -> bool:
        """Whether something asynchronous happens between the units of a pass."""
        chunk = self.context.chunks[slot.chunk]
        between = any(i.unit.gathered or i.exchanges for i in chunk)
        return between or bool(self.copies[slot.chunk].moved)

    def _whole(self, slot: Slot, waits: list[int], synced: bool) -> int:
        return self.launches.add(
            Run(
                segments=self._pass(slot),
                slot=slot.phase,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
                after=tuple(waits),
                host_sync=synced,
                delta_end=self._accumulated(slot),
            )
        )

    def _pass(self, slot: Slot) -> tuple[int, ...]:
        """The segments of a whole pass of a chunk: equal for all micro-batches."""
        place = (slot.phase, slot.chunk)
        if place not in self.passes:
            chunk = self.context.chunks[slot.chunk]
            forward = slot.phase == "F"
            passes = [i.forward for i in chunk] if forward else [i.backward for i in chunk[::-1]]
            self.passes[place] = tuple(_segments(passes))
        return self.passes[place]

    def _accumulated(self, slot: Slot) -> dict[str, float]:
        """The gradients of a backward die where they are accumulated after it."""
        if slot.phase != "B":
            return {}
        c = self.context
        if slot.chunk not in self.fresh:
            units = [instance.unit for instance in c.chunks[slot.chunk]]
            self.fresh[slot.chunk] = sum(fresh_gradients(u, c.precision, c.stack) for u in units)
        fresh = self.fresh[slot.chunk]
        return {"new gradients": -fresh} if fresh else {}

    def _per_unit(
        self, slot: Slot, order: list[int], waits: list[int], synced: bool, final: bool = False
    ) -> int:
        """One entry per unit: gathers `prefetch` units ahead, reductions behind."""
        chunk = self.context.chunks[slot.chunk]
        ahead = max(0, self.context.tree.runtime.prefetch)
        ahead = ahead if self.context.tree.runtime.overlap_param else 0
        run = -1
        issued = 0
        copies = self.copies[slot.chunk]
        for position, i in enumerate(order):
            while issued < len(order) and issued <= position + ahead:
                self.weights.gather(slot, order[issued])
                issued += 1
            unit = chunk[i].unit
            handles = [
                *self.weights.gathered.get((slot.chunk, i), []),
                *self.weights.ready.get(id(unit), []),
            ]
            if slot.phase == "F":
                self.weights.ready.pop(id(unit), None)
            if slot.phase == "B":
                handles += copies.before_backward(i, [run] if position else last_run(self.launches))
            last = self._accumulated(slot) if position == len(order) - 1 else {}
            run = self._unit_run(slot, i, [*waits, *handles], synced, last)
            waits, synced = copies.after_forward(i, run) if slot.phase == "F" else [], False
            if slot.phase == "B":
                waits = self._reduced(unit, slot, final=final)
        self.blocking_sends += waits
        return run

    def _reduced(self, unit: Unit, slot: Slot, *, final: bool) -> list[int]:
        """The reductions after the backward of a unit that computation does not run beside."""
        known = len(self.weights.reductions)
        self.weights.reduce_unit(unit, slot, final=final)
        overlapping = self.context.tree.runtime.overlap_grad or final
        return [] if overlapping else self.weights.reductions[known:]

    def _unit_run(
        self, slot: Slot, i: int, waits: list[int], synced: bool, last: Mapping[str, float]
    ) -> int:
        instance = self.context.chunks[slot.chunk][i]
        forward = slot.phase == "F"
        delta = dict(last)
        key = (slot.chunk, i)
        if key in self.weights.gathered and (not forward or instance.unit.reshard):
            del self.weights.gathered[key]
            delta["gathered weights"] = -self.weights.gathered_bytes(instance.unit)
        if not forward and instance.unit.microstep:
            delta["gradients"] = self.weights.whole_grad_bytes(instance.unit)
        pieces = instance.forward if forward else instance.backward
        final = max(k for k, piece in enumerate(pieces) if piece.segment is not None)
        entries: list[int] = []
        run = -1
        for k, piece in enumerate(pieces):
            after = [*waits, *(entries[w] for w in piece.waits)]
            if piece.segment is None:
                entries.append(self._exchange(slot, piece, after))
                continue
            entry = Run(
                segments=(piece.segment,),
                slot=slot.phase,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
                layer=instance.unit.path,
                after=tuple(after),
                host_sync=synced,
                delta_end=delta if k == final else {},
            )
            run = self.launches.add(entry)
            entries.append(run)
            waits, synced = [], False
        return run

    def _exchange(self, slot: Slot, piece: Piece, after: Sequence[int]) -> int:
        """All ranks that exchange embeddings end together, also those of other classes."""
        item = piece.exchange
        if item is None:
            raise InternalError("a piece without segment and without exchange")
        return self.launches.add(
            Comm(
                label=item.label,
                event=item.event,
                stream=item.stream,
                category=item.category,
                axes=item.axes,
                after=tuple(after),
                key=self.launches.joint_key(item.label),
                delta_start=item.transient,
                delta_end=item.delta,
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
        )
