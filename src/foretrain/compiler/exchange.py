"""The exchange of embeddings: re-layouts of all tables run as one collective of each kind.

What tables leave lies with their owner (or is a partial sum, or split in its columns); the dense
part wants it split along the batch. The scatters of all owners are one all-to-all; so are, in
backward, the gathers of the gradients. It ends when the fullest rank has sent its part, so its
bytes are those of the largest send buffer. See docs/explain/recommenders.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from foretrain.compiler.bags import BAG, held_share
from foretrain.compiler.flow import Copy, Launch, OpLaunch, Relayout
from foretrain.mesh import Mesh
from foretrain.program import Item

#: Stream of the exchange. Its items are cut out of the segments, so that ranks with different
#: tables can wait for each other in it.
EXCHANGE = "exchange"
_MOVES = ("scatter", "gather", "all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective for many tables, as one rank sees it; `elements` are those of the fullest."""

    collective: Literal["all_to_all", "reduce_scatter", "all_gather"]
    axes: tuple[str, ...]
    elements: int
    dtype: str  # a role of Precision
    reads: tuple[Copy, ...]
    writes: tuple[Copy, ...]
    recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a block's launches between exchanges: a segment, or the item of an exchange.

    `waits` are the indices of exchanges among the parts before it.
    """

    items: tuple[Item, ...]
    waits: tuple[int, ...]

    @property
    def is_exchange(self) -> bool:
        """Returns whether the part is an exchange."""
        return len(self.items) == 1 and self.items[0].stream == EXCHANGE


def collect_exchanges(
    launches: Sequence[Launch], owner: int | None, *, early: bool, sparse: bool, mesh: Mesh
) -> list[Launch | Exchange]:
    """Returns the launches of the rank `owner`: without other ranks' tables, exchanges merged.

    `early`: right after what they send is there, so that they run beside what follows; else right
    before what they bring is read. `sparse`: ranks with a part of the rows send only the sums
    that they have a row for (an all-to-all), not all of them (a reduce-scatter).
    """
    ops = [launch for launch in launches if isinstance(launch, OpLaunch)]
    bags = {
        name: float(op.op.attributes["pooling"])
        for op in ops
        if op.op.cost == BAG
        for name, _ in (*op.reads, *op.writes)
    }
    moved: list[Relayout] = []
    kept: list[Launch | Exchange] = []
    for launch in launches:
        if isinstance(launch, Relayout) and launch.tensor.name in bags and len(launch.steps) == 1:
            pooling = bags[launch.tensor.name]
            moved.append(_sparse(launch, pooling, mesh) if sparse else launch)
        elif not (isinstance(launch, OpLaunch) and launch.owner not in (None, owner)):
            kept.append(launch)
    _by_kind(kept)
    kinds: dict[str, list[Relayout]] = {}
    for relayout in moved:
        name = relayout.steps[0].collective
        kinds.setdefault("all_to_all" if name in _MOVES else name, []).append(relayout)
    for name, relayouts in kinds.items():
        place = (_after if early else _before)(kept, relayouts)
        kept.insert(place, _merge(name, relayouts, owner))
    return kept


def bag_kind(launch: OpLaunch) -> str:
    """Returns how a table lies: tables of one kind run as one kernel."""
    if launch.owner is not None:
        return "owned"
    split = {dim for dim, axes in launch.split.items() if axes}
    return next((dim for dim in ("row", "dim") if dim in split), "replicated")


def _by_kind(kept: list[Launch | Exchange]) -> None:
    """Sorts neighbouring lookups by kind: exchanged tables first in forward, last in backward."""
    places = [i for i, op in enumerate(kept) if isinstance(op, OpLaunch) and op.op.cost == BAG]
    ops = [kept[i] for i in places]
    if not ops or places != list(range(places[0], places[0] + len(places))):
        return
    first = ops[0]
    backward = isinstance(first, OpLaunch) and first.op.phase != "forward"

    def key(op: Launch | Exchange) -> tuple[bool, str]:
        kind = bag_kind(op) if isinstance(op, OpLaunch) else ""
        return (kind == "replicated") != backward, kind

    for place, op in zip(places, sorted(ops, key=key), strict=True):
        kept[place] = op


def _sparse(relayout: Relayout, pooling: float, mesh: Mesh) -> Relayout:
    """A row-wise table sends one vector for every sample and rank that holds one of its rows."""
    step = relayout.steps[0]
    if step.collective not in ("reduce_scatter", "all_gather"):
        return relayout
    elements = ceil(step.elements * held_share(1.0 / mesh.size(step.axes), pooling))
    return replace(relayout, steps=(replace(step, collective="all_to_all", elements=elements),))


def _merge(name: str, relayouts: Sequence[Relayout], owner: int | None) -> Exchange:
    """Sums what each rank sends; a rank reads and writes what it owns and its part of the rest."""
    common = 0
    by_owner: dict[int, int] = {}
    reads: list[Copy] = []
    writes: list[Copy] = []
    for relayout in relayouts:
        step = relayout.steps[0]
        mine = relayout.owner in (None, owner)
        if relayout.owner is None:
            common += step.elements
        else:
            by_owner[relayout.owner] = by_owner.get(relayout.owner, 0) + step.elements
        if mine or step.collective == "gather":
            reads.append(relayout.source)
        if mine or step.collective == "scatter":
            writes.append(relayout.target)
    first = relayouts[0]
    return Exchange(
        collective=name,  # pyright: ignore[reportArgumentType]
        axes=first.steps[0].axes,
        elements=common + max(by_owner.values(), default=0),
        dtype=first.tensor.dtype,
        reads=tuple(reads),
        writes=tuple(writes),
        recomputed=first.recomputed,
    )


def _after(kept: Sequence[Launch | Exchange], relayouts: Sequence[Relayout]) -> int:
    """The place after the last operator that leaves a source; the start if all are other ranks'."""
    names = {relayout.source[0] for relayout in relayouts}
    makers = [
        i
        for i, launch in enumerate(kept)
        if isinstance(launch, OpLaunch) and names & {name for name, _ in launch.writes}
    ]
    place = makers[-1] + 1 if makers else 0
    while place < len(kept) and isinstance(kept[place], Exchange):
        place += 1  # in the order in which they were found
    return place


def _before(kept: Sequence[Launch | Exchange], relayouts: Sequence[Relayout]) -> int:
    """The place of the first operator that reads a target; the end if only other ranks do."""
    targets = {relayout.target for relayout in relayouts}
    return next(
        (
            i
            for i, launch in enumerate(kept)
            if isinstance(launch, OpLaunch) and targets & set(launch.reads)
        ),
        len(kept),
    )


def cut(items: Sequence[Item]) -> tuple[Part, ...]:
    """Returns the parts of a block's items; one part where there is no exchange.

    A part ends at an exchange, and before an item that has to wait for one that the part has not
    waited for. Waits inside a part count from its start.
    """
    parts: list[Part] = []
    home: dict[int, tuple[int, int]] = {}  # item -> part, place in it
    current: list[Item] = []
    waits: set[int] = set()

    def close() -> None:
        if current:
            parts.append(Part(items=tuple(current), waits=tuple(sorted(waits))))
        current.clear()
        waits.clear()

    for i, item in enumerate(items):
        needed = {home[w][0] for w in item.waits if items[w].stream == EXCHANGE}
        if item.stream == EXCHANGE:
            close()
            home[i] = (len(parts), 0)
            place = Part(items=(_plain(item, ()),), waits=tuple(sorted(needed)))
            parts.append(place)
            continue
        if needed - waits:
            close()
        waits |= needed
        home[i] = (len(parts), len(current))
        inner = [home[w] for w in item.waits if items[w].stream != EXCHANGE]
        same = tuple(place for part, place in inner if part == len(parts))
        current.append(_plain(item, same))
    close()
    return tuple(parts)


def _plain(item: Item, waits: tuple[int, ...]) -> Item:
    return Item(
        label=item.label, event=item.event, stream=item.stream, category=item.category,
        axes=item.axes, waits=waits, transient=item.transient, delta=item.delta,
    )  # fmt: skip
