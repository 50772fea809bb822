"""From launches to a segment: order of communication, fused launches, lifetimes of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

from foretrain.compiler.bags import BAG, INTERACTION
from foretrain.compiler.block import LoweredBlock
from foretrain.compiler.events import EventTable, Groups, Shaper
from foretrain.compiler.exchange import EXCHANGE, Exchange, bag_kind, collect_exchanges
from foretrain.compiler.flow import Copy, Launch, OpLaunch, Relayout
from foretrain.compiler.placements import family
from foretrain.compiler.wire import wire_dtype
from foretrain.program import Category, Item, Segment
from foretrain.units import dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMaker:
    """What is needed to turn launches of one stage into segments."""

    table: EventTable
    groups: Groups
    shaper: Shaper
    stage: int
    overlap_tp: bool
    fused: tuple[str, ...]
    owner: int | None = None  # the rank of the data group whose tables it launches
    overlap_tables: bool = True
    sparse_exchange: bool = False
    by_module: bool = False  # book live bytes under the module instead of the part

    def forward(self, lowered: LoweredBlock) -> Segment:
        """Returns the forward segment; what backward reads stays alive when it ends."""
        keep = set(lowered.saved)
        if lowered.output is not None:
            keep.add(lowered.output)
        if lowered.side is not None:
            keep.add(lowered.side)
        owned = set[Copy]() if lowered.input is None else {lowered.input}
        return self._segment(f"{lowered.path} forward", lowered, lowered.forward, owned, keep)

    def backward(self, lowered: LoweredBlock) -> Segment:
        """Returns the backward segment (with recompute); it frees what forward saved."""
        launches = lowered.backward
        if self.overlap_tp:
            launches = _early(launches)
        # a saved output is the next block's input, which frees it
        owned = {copy for copy in lowered.saved if copy != lowered.output}
        if lowered.output_grad is not None:
            owned.add(lowered.output_grad)
        if lowered.side_grad_in is not None:
            owned.add(lowered.side_grad_in)
        keep = {copy for copy in (lowered.input_grad, lowered.side_grad) if copy is not None}
        return self._segment(f"{lowered.path} backward", lowered, launches, owned, keep)

    def _segment(
        self,
        name: str,
        lowered: LoweredBlock,
        launches: Sequence[Launch],
        owned: set[Copy],
        keep: set[Copy],
    ) -> Segment:
        mine = collect_exchanges(
            launches, self.owner, early=self.overlap_tables, sparse=self.sparse_exchange,
            mesh=self.shaper.mesh,
        )  # fmt: skip
        batches = _fuse(mine, self.fused)
        return Segment(name=name, items=_Emitter(self, lowered, batches, owned, keep).items())


def changed(segment: Segment, change: Mapping[str, float]) -> Segment:
    """Returns a segment whose last item also changes live bytes by `change`."""
    if not change or not segment.items:
        return segment
    *first, last = segment.items
    return replace(segment, items=(*first, replace(last, delta={**last.delta, **change})))


#: What flows from block to block, and over the boundaries of stages.
BOUNDARY = "between blocks"


def module_of(block: str, tensor: str) -> str:
    """Returns the module that makes a tensor or its gradient: layers.attention, head.loss, ..."""
    words = tensor.removeprefix("d.").split(".")
    if words[0] == block:
        words = words[1:]
    inner = len(words) > 1 and words[0] not in ("x", "x_in", "x_out")
    return f"{block}.{words[0]}" if inner else BOUNDARY


def _early(launches: Sequence[Launch]) -> list[Launch]:
    """Returns the launches with re-layouts where an overlapping framework starts them.

    Those of a gradient come right after its producer, so that weight gradients hide them; those of
    a saved (or repeated) forward tensor come before the first operator of the group that wants it.
    """
    result: list[Launch] = [launch for launch in launches if not isinstance(launch, Relayout)]
    for relayout in (launch for launch in launches if isinstance(launch, Relayout)):
        place = _producer(result, relayout.source)
        forward = place is None or result[place].recomputed
        if forward and not relayout.recomputed:
            place = _first_of_group(result, relayout.group)
        else:
            place = 0 if place is None else place + 1
        while place < len(result) and isinstance(result[place], Relayout):
            place += 1  # in the order in which they were found
        result.insert(place, relayout)
    return result


def _producer(launches: Sequence[Launch], copy: Copy) -> int | None:
    found = None
    for i, launch in enumerate(launches):
        if isinstance(launch, Relayout):
            if launch.target == copy:
                found = i
        elif copy[0] in [name for name, _ in launch.writes]:
            found = i
    return found


def _first_of_group(launches: Sequence[Launch], wanted_by: str) -> int:
    ops = [(i, launch.op) for i, launch in enumerate(launches) if isinstance(launch, OpLaunch)]
    wanting = next((op for _, op in ops if op.name == wanted_by), None)
    if wanting is None:
        return 0
    stem = (wanting.fuse or "").split(".")[0]
    for i, op in ops:
        if op.source is None:
            continue
        if op.source == wanting.source or (stem and (op.fuse or "").split(".")[0] == stem):
            return i
    return 0


def _fuse(
    launches: Sequence[Launch | Exchange], fused: tuple[str, ...]
) -> list[list[Launch | Exchange]]:
    """Groups neighbouring launches that the stack runs as one kernel; re-layouts stay alone."""
    batches: list[list[Launch | Exchange]] = []
    current: tuple[str, list[Launch | Exchange]] | None = None
    for launch in launches:
        tag = _tag(launch) if isinstance(launch, OpLaunch) else None
        if tag is not None and tag.split(".")[0] in fused:
            if current is not None and current[0] == tag:
                current[1].append(launch)
                continue
            current = (tag, [launch])
            batches.append(current[1])
            continue
        if (
            isinstance(launch, Relayout)
            and current is not None
            and _feeds(launch, launches, current[0])
        ):
            batches.insert(len(batches) - 1, [launch])  # before the kernel that it feeds
            continue
        current = None
        batches.append([launch])
    return batches


def _tag(launch: OpLaunch) -> str | None:
    """What runs as one kernel has one tag; tables that lie differently do not."""
    fuse = launch.op.fuse
    return f"{fuse}.{bag_kind(launch)}" if fuse and launch.op.cost == BAG else fuse


def _feeds(relayout: Relayout, launches: Sequence[Launch | Exchange], tag: str) -> bool:
    """Whether a re-layout between two members of a fused kernel is read by that kernel."""
    return any(
        isinstance(launch, OpLaunch) and _tag(launch) == tag and launch.op.name == relayout.group
        for launch in launches
    )


def _label(names: Sequence[str]) -> str:
    """The names of the operators of a kernel; of many, the first and how many more."""
    if len(names) > 4:
        return f"{names[0]}+{len(names) - 1} more"
    return "+".join(names)


@lru_cache(maxsize=16384)
def _order(copy: Copy) -> str:
    """What copies are sorted by, so that sums do not depend on the order of a set."""
    return str(copy)


@dataclass(slots=True)
class _Emitter:
    """Emits items in order, with births and deaths of copies."""

    maker: SegmentMaker
    lowered: LoweredBlock
    batches: Sequence[list[Launch | Exchange]]
    owned: set[Copy]
    keep: set[Copy]
    stored: set[Copy] = field(default_factory=set[Copy])
    done: dict[Copy, int] = field(default_factory=dict[Copy, int])
    aliases: dict[Copy, Copy] = field(default_factory=dict[Copy, Copy])

    def __post_init__(self) -> None:
        self.stored |= self.owned
        if self.lowered.side is not None:
            self.stored.add(self.lowered.side)
        for launch in (launch for batch in self.batches for launch in batch):
            self.stored |= {launch.target} if isinstance(launch, Relayout) else set(launch.writes)

    def items(self) -> tuple[Item, ...]:
        """Returns the items; a copy dies with its last reader unless it is kept."""
        last = self._last_uses()
        live = set(self.owned)
        items: list[Item] = []
        for i, batch in enumerate(self.batches):
            born = {c for c in self._written(batch, last, i) if c not in live}
            live |= born
            dead = {
                copy
                for copy in live
                if copy not in self.keep and last.get(copy, -1) <= i and (copy in last or i == 0)
            }
            dead |= {c for c in born if c not in last and c not in self.keep}
            live -= dead
            delta = self._sizes(born, 1.0)
            transient = self._sizes(dead, 1.0)
            for part, size in transient.items():
                delta[part] = delta.get(part, 0.0) - size
            if isinstance(batch[0], Exchange):
                born_sizes, dead_sizes = self._sizes(born, 1.0), self._sizes(dead, -1.0)
                items.append(self._exchange_item(batch[0], len(items), born_sizes, dead_sizes))
                continue
            items += self._batch_items(batch, len(items), delta, transient)
        return tuple(items)

    def _reads(self, batch: Sequence[Launch | Exchange]) -> set[Copy]:
        reads: set[Copy] = set()
        for launch in batch:
            copies = (launch.source,) if isinstance(launch, Relayout) else launch.reads
            reads |= {self._alias(copy) for copy in copies}
        return reads

    def _alias(self, copy: Copy) -> Copy:
        """The storage a copy lives in: itself if something wrote it, else what it views."""
        if copy not in self.aliases:
            same = [other for other in self.stored if other[0] == copy[0]]
            known = copy in self.stored or not same
            self.aliases[copy] = copy if known else min(same, key=_order)
        return self.aliases[copy]

    def _written(
        self, batch: Sequence[Launch | Exchange], last: Mapping[Copy, int], i: int
    ) -> set[Copy]:
        writes: set[Copy] = set()
        for launch in batch:
            writes |= {launch.target} if isinstance(launch, Relayout) else set(launch.writes)
        if len(batch) > 1:  # partial results of a fused kernel never reach memory
            inner = {c for launch in batch if isinstance(launch, OpLaunch) for c in launch.reads}
            writes = {c for c in writes if c not in inner or last.get(c, i) > i or c in self.keep}
        return writes

    def _last_uses(self) -> dict[Copy, int]:
        last: dict[Copy, int] = {}
        for i, batch in enumerate(self.batches):
            for copy in self._reads(batch):
                last[copy] = i
        return last

    def _sizes(self, copies: set[Copy], sign: float) -> dict[str, float]:
        sizes: dict[str, float] = {}
        for copy in sorted(copies, key=_order):
            if copy[0] not in self.lowered.tensors or self._is_weight_grad(copy[0]):
                continue
            part = self._part(copy)
            sizes[part] = sizes.get(part, 0.0) + sign * self.maker.shaper.copy_bytes(copy)
        return sizes

    def _is_weight_grad(self, name: str) -> bool:
        """Gradients of weights live in the persistent gradient buffers."""
        return self.lowered.tensors[name].dtype == "grad"

    def _part(self, copy: Copy) -> str:
        if self.maker.by_module:
            return module_of(self.lowered.block.name, copy[0])
        if "vocab" in self.lowered.tensors[copy[0]].dims:
            return "logits"
        if copy in self.lowered.saved or copy in (self.lowered.output, self.lowered.input):
            return "activations"
        return "temporary"

    def _batch_items(
        self,
        batch: Sequence[Launch | Exchange],
        index: int,
        delta: Mapping[str, float],
        transient: Mapping[str, float],
    ) -> list[Item]:
        first = batch[0]
        if isinstance(first, Relayout):
            return self._relayout_items(first, index, delta, transient)
        launches = [cast(OpLaunch, launch) for launch in batch]
        waits = sorted({self.done[copy] for copy in self._reads(batch) if copy in self.done})
        for launch in launches:
            for copy in launch.writes:
                self.done.pop(copy, None)
        one = launches[0].op.fuse or ""
        merged = ("gemm", BAG)
        whole = len(launches) == 1 or one.split(".")[0] == INTERACTION
        real = [launch for launch in launches if whole or launch.op.cost in merged]
        event = self.maker.shaper.event(real)
        category: Category = "recompute" if first.recomputed else "compute"
        return [
            Item(
                label=_label([launch.op.name for launch in real]),
                event=self.maker.table.intern(event),
                category=category,
                waits=tuple(waits),
                transient=dict(transient),
                delta=dict(delta),
            )
        ]

    def _exchange_item(
        self, exchange: Exchange, index: int, born: Mapping[str, float], dead: Mapping[str, float]
    ) -> Item:
        """An exchange: `transient` is allocated when it starts, `delta` freed when it ends."""
        precision = self.maker.shaper.precision
        event = self.maker.groups.event(
            exchange.collective,
            exchange.axes,
            exchange.elements * precision.bytes(exchange.dtype),
            precision.dtype(exchange.dtype),
            self.maker.stage,
        )
        reads = (self._alias(copy) for copy in exchange.reads)
        waits = sorted({self.done[copy] for copy in reads if copy in self.done})
        for copy in exchange.writes:
            self.done[copy] = index
        return Item(
            label=f"embeddings {exchange.collective.replace('_', '-')}",
            event=self.maker.table.intern(event),
            stream=EXCHANGE,
            category="ep",
            axes=exchange.axes,
            waits=tuple(waits),
            transient=born,
            delta=dead,
        )

    def _relayout_items(
        self,
        relayout: Relayout,
        index: int,
        delta: Mapping[str, float],
        transient: Mapping[str, float],
    ) -> list[Item]:
        items: list[Item] = []
        shaper = self.maker.shaper
        launches = (launch for batch in self.batches for launch in batch)
        dtype = wire_dtype(relayout, launches, shaper.precision, low_gather=shaper.low_gather)
        size = dtype_bytes(dtype)
        for i, step in enumerate(relayout.steps):
            name = family(step.axes[0])
            category = cast(
                Category, "cp" if step.axes == ("cp",) else "dp" if name == "data" else name
            )
            event = self.maker.groups.event(
                step.collective, step.axes, step.elements * size, dtype, self.maker.stage
            )
            source = self._alias(relayout.source)
            known = self.done.get(source)
            previous = (index + i - 1,) if i else (() if known is None else (known,))
            ends = i == len(relayout.steps) - 1
            items.append(
                Item(
                    label=f"{relayout.tensor.name} {step.collective.replace('_', '-')}",
                    event=self.maker.table.intern(event),
                    stream="feature" if category == "dp" else category,
                    category=category,
                    axes=step.axes,
                    waits=previous,
                    transient=dict(transient) if ends else {},
                    delta=dict(delta) if ends else {},
                )
            )
        self.done[relayout.target] = index + len(relayout.steps) - 1
        return items
