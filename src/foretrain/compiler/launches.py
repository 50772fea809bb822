"""The launch list of a stage while it is written, and what the stage is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.compiler.block import LoweredBlock
from foretrain.compiler.events import EventTable, Groups
from foretrain.compiler.parameters import Unit
from foretrain.compiler.placements import Redistribution, family
from foretrain.graph.precision import Precision
from foretrain.mesh import Mesh
from foretrain.program import Category, Comm, CommEvent, Entry, Item, Segment
from foretrain.stack import Stack
from foretrain.strategy.tree import StrategyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One block instance of a chunk: its weights and the parts of its two passes.

    A pass is one segment unless embeddings are exchanged in it (compiler/exchange.py).
    """

    lowered: LoweredBlock
    unit: Unit
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]

    @property
    def exchanges(self) -> bool:
        """Returns whether embeddings are exchanged in the block."""
        return len(self.forward) > 1 or len(self.backward) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A segment, or an exchange (the item of its communication) after the exchanges `waits`."""

    segment: int | None
    exchange: Item | None
    waits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What each rank sends over the boundary between two virtual stages.

    `side` are the bytes of the tensor that all later stages read too (an encoder's output); `whole`
    is how many times as much a rank holds before and after the transfer.
    """

    main: float
    side: float
    whole: int

    @property
    def bytes(self) -> float:
        """Returns the bytes of both tensors on the way."""
        return self.main + self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Weights with a copy on each of some stages, whose gradients are summed over the copies."""

    stages: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """All that the launch list of a stage depends on; `ties` are those that it takes part in."""

    stage: int
    canonical: int
    tree: StrategyTree
    mesh: Mesh
    groups: Groups
    table: EventTable
    segments: list[Segment]
    precision: Precision
    optimizer: str
    factored: float  # statistics per parameter of a factored moment
    stack: Stack
    chunks: tuple[tuple[Instance, ...], ...]
    ties: tuple[Tie, ...]
    boundaries: tuple[Boundary, ...]
    scattered: bool
    joint: bool = False  # the stage has several rank classes, which wait for each other
    tables: tuple[float, float] = (0.0, 0.0)  # bytes of tables that backward updates, and states
    by_module: bool = False
    fp8_layouts: int = 1  # in how many layouts products read an FP8 weight

    def units(self) -> list[Unit]:
        """Returns the units of all chunks."""
        return [instance.unit for chunk in self.chunks for instance in chunk]


@dataclass(slots=True)
class LaunchList:
    """Entries in launch order; an index into it is a handle to wait for."""

    context: StageContext
    entries: list[Entry] = field(default_factory=list[Entry])

    def add(self, entry: Entry) -> int:
        """Returns the index of a new entry."""
        self.entries.append(entry)
        return len(self.entries) - 1

    def event(self, event: CommEvent) -> int:
        """Returns the id of a communication event."""
        return self.context.table.intern(event)

    def joint_key(self, label: str) -> str | None:
        """Returns what joins a collective over rank classes: all have equally many of them."""
        if not self.context.joint:
            return None
        count = sum(isinstance(entry, Comm) for entry in self.entries)
        return f"stage {self.context.stage}, {count}: {label}"

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
                # a segment has the stream tp to itself while it runs
                stream=stream if category == "dp" else f"tp {stream}",
                category=category,
                axes=step.axes,
                after=tuple(after),
                key=self.joint_key(label),
                delta_start=delta_start or {},
                delta_end=delta_end or {},
                microbatch=microbatch,
                chunk=chunk,
            )
        )
