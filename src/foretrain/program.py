"""The Program: what each class of equal ranks does, folded and templated.

Three layers, each with a text form:

- *events*: the distinct pieces of work (an operator with its local shape, a collective with its
  group and bytes). A step repeats few events many times; the cost model prices each one once.
- *segments*: what one layer (or the embedding, the head, the optimizer step) launches, in program
  order: items on the compute stream and blocking communication between them. A segment is closed:
  when its last item ends, nothing that it launched is still running.
- *entries*: per rank class the launch list of a whole step: segments to run, asynchronous
  communication to launch, and what each of them waits for.

The same Program is simulated hierarchically (one representative per class, segments folded) and
flat (every rank, every item).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from foretrain.mesh import Mesh

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
    "device_to_host",
    "host_to_device",
    "host_update",
]
Category = Literal[
    "compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "copy", "host", "other"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEvent:
    """One operator on one device with its local shape.

    `op` names the cost model (gemm, attention, layernorm, elementwise, ...); `shape` holds the
    names of the `validate ops` format (gemm: b m n k; attention: batch seq_q seq_kv heads kv_heads
    head_dim head_dim_v causal window; others: rows cols operands). `flops` is useful work, `bytes`
    what an ideally fused kernel reads and writes.
    """

    op: str
    direction: Literal["forward", "backward", "backward_input", "backward_weight", "optimizer"]
    dtype: str
    shape: tuple[tuple[str, float], ...]
    flops: float
    bytes: float

    def get(self, name: str, default: float = 1) -> float:
        """Returns one shape value."""
        return dict(self.shape).get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommEvent:
    """One collective of one group.

    `bytes` as nccl-tests prints it: all-reduce buffer per rank, all-gather total output,
    reduce-scatter total input, all-to-all buffer of one rank, send_recv message. `ranks` is a
    representative group. `sharers` counts the sibling groups that work on one node at the same time
    (this one included): they share its NICs, and the links between its devices where they meet.
    `count` collectives run back to back.
    """

    collective: Collective
    bytes: float
    dtype: str
    ranks: tuple[int, ...]
    sharers: int = 1
    count: int = 1


Event = ComputeEvent | CommEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One launch inside a segment.

    A compute item waits for the items in `waits` (indices of earlier communication items). A
    communication item starts no earlier than the compute item launched before it has ended, as
    NCCL does, and after its `waits`. `transient` bytes live only while the item runs; `delta`
    stays (positive) or is freed (negative) when it ends, by part.
    """

    label: str
    event: int
    stream: str = "compute"
    category: Category = "compute"
    axes: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()
    transient: Mapping[str, float] = field(default_factory=dict[str, float])
    delta: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A closed list of items, e.g. the backward of one layer."""

    name: str
    items: tuple[Item, ...]

    def delta(self) -> dict[str, float]:
        """Returns the net change of live bytes by part."""
        total: dict[str, float] = {}
        for item in self.items:
            for part, value in item.delta.items():
                total[part] = total.get(part, 0.0) + value
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Entry: run segments one after the other on the compute stream, after the entries `after`.

    One entry is a whole chunk of layers where nothing asynchronous happens in between, else one
    layer. `delta_end` bytes are freed (negative) or allocated when it ends, by part.
    """

    segments: tuple[int, ...]
    slot: str  # "F", "B" or "step"
    microbatch: int = 0
    chunk: int = 0
    layer: str = ""
    after: tuple[int, ...] = ()
    host_sync: bool = False  # the host waits for `after` before it launches
    delta_end: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """Entry: launch an asynchronous communication.

    `key` joins the entries of several rank classes into one task (a transfer between stages, a
    tied weight); None: the group lies inside the class. `posted` means that it does not wait for
    the compute launched before it (a receive posted early). `delta_start` bytes are allocated when
    it starts, `delta_end` when it ends (negative: freed), by part.
    """

    label: str
    event: int
    stream: str
    category: Category
    axes: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    key: str | None = None
    posted: bool = False
    delta_start: Mapping[str, float] = field(default_factory=dict[str, float])
    delta_end: Mapping[str, float] = field(default_factory=dict[str, float])
    microbatch: int = 0
    chunk: int = 0


Entry = Run | Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that do the same: one pipeline stage. `persistent` bytes live all step, by part.

    `flat_step_bytes` is one contiguous buffer of the optimizer step: too large for any hole that
    activations leave, it adds to what the allocator holds. `host_bytes` is what one rank keeps in
    the memory of its host, by part.
    """

    name: str
    stage: int
    ranks: tuple[int, ...]
    entries: tuple[Entry, ...]
    persistent: Mapping[str, float]
    flat_step_bytes: float = 0.0
    host_bytes: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Events, segments and the launch lists of all rank classes."""

    mesh: Mesh
    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    classes: tuple[RankClass, ...]
    samples_per_step: int
    notes: tuple[str, ...] = ()

    def event_counts(self) -> dict[int, int]:
        """Returns how often each event happens in one step of one rank of every class."""
        total: Counter[int] = Counter()
        for index in range(len(self.classes)):
            total.update(self.class_counts(index))
        return dict(total)

    def class_counts(self, index: int) -> dict[int, int]:
        """Returns how often each event happens in one step of one rank of one class."""
        counts: Counter[int] = Counter()
        chains: Counter[tuple[int, ...]] = Counter()
        for entry in self.classes[index].entries:
            if isinstance(entry, Comm):
                counts[entry.event] += 1
            else:
                chains[entry.segments] += 1
        segments: Counter[int] = Counter()
        for chain, times in chains.items():
            for segment in chain:
                segments[segment] += times
        for segment, times in segments.items():
            for item in self.segments[segment].items:
                counts[item.event] += times
        return dict(counts)
