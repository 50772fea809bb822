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
from foretrain.program import Category, Comm, CommEvent, Entry, Segment
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
    factored: float  # statistics per parameter of a factored moment
    stack: Stack
    chunks: tuple[tuple[Instance, ...], ...]
    tied: int
    boundary: float
    scattered: bool
    by_module: bool = False

    def whole_boundary(self) -> float:
        """Returns the bytes of the boundary tensor that a rank holds before and after transfer."""
        tp = self.mesh.size([axis for axis in self.mesh.axes if family(axis) == "tp"])
        return self.boundary * tp if self.scattered else self.boundary

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
                delta_start=delta_start or {},
                delta_end=delta_end or {},
                microbatch=microbatch,
                chunk=chunk,
            )
        )
