"""Unique events, lower and upper baselines, and bottleneck shares of a prediction.

A step repeats few distinct events many times (R46): their counts times their prices are the work
of the step. What the engine adds is when they overlap and who waits; the two baselines bound it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from foretrain.program import Comm, ComputeEvent, Event, Program, RankClass
from foretrain.simulator.result import EventCost, Result

#: Operators bound by arithmetic when large; all others move bytes.
MATRIX_OPS = frozenset({"gemm", "attention", "conv2d", "moe_gemm", "bmm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EventShare:
    """A unique event, its summed time over one rank of every class, and its share of all events."""

    cost: EventCost
    total_s: float
    share: float

    @property
    def kind(self) -> str:
        """Returns 'compute' or 'communication'."""
        return "compute" if isinstance(self.cost.event, ComputeEvent) else "communication"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What adding up event times would say, in seconds, for the busiest rank class.

    `perfect_overlap_s`: the longest stream, as if everything else hid behind it. `no_overlap_s`:
    all streams one after the other. Neither counts waiting, bubbles or the host.
    """

    perfect_overlap_s: float
    no_overlap_s: float


def event_shares(result: Result) -> tuple[EventShare, ...]:
    """Returns all unique events, the largest summed time first; shares sum to 1."""
    totals = [cost.count * cost.value_s for cost in result.events]
    whole = sum(totals)
    rows = [
        EventShare(cost=cost, total_s=total, share=total / whole if whole else 0.0)
        for cost, total in zip(result.events, totals, strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: -row.total_s))


def stream_times(result: Result, rank_class: RankClass) -> dict[str, float]:
    """Returns the summed event time of every stream of one rank class, in seconds."""
    price = {cost.event: cost.value_s for cost in result.events}
    times: dict[str, float] = {}
    for (stream, event), count in class_events(result.program, rank_class).items():
        seconds = count * price.get(result.program.events[event], 0.0)
        times[stream] = times.get(stream, 0.0) + seconds
    return times


def class_events(program: Program, rank_class: RankClass) -> Counter[tuple[str, int]]:
    """Returns how often a rank of the class launches each event on each stream in one step."""
    counts: Counter[tuple[str, int]] = Counter()
    segments: Counter[int] = Counter()
    for entry in rank_class.entries:
        if isinstance(entry, Comm):
            counts[entry.stream, entry.event] += 1
        else:
            segments.update(entry.segments)
    for segment, count in segments.items():
        for item in program.segments[segment].items:
            counts[item.stream, item.event] += count
    return counts


def naive_baseline(result: Result) -> Baseline:
    """Returns what summed event times alone would predict (R62): the busiest class decides."""
    per_class = [stream_times(result, rank_class) for rank_class in result.program.classes]
    return Baseline(
        perfect_overlap_s=max((max(t.values(), default=0.0) for t in per_class), default=0.0),
        no_overlap_s=max((sum(t.values()) for t in per_class), default=0.0),
    )


def bottleneck_shares(result: Result) -> dict[str, float]:
    """Returns what bounds the step, as fractions that sum to 1 (R63).

    The time parts of the last-finishing class; its computation is split into matrix products
    (arithmetic) and memory-bound kernels in the ratio of its event times. An offloaded update is
    work of the CPU, not of either.
    """
    parts, step = result.time_parts, result.time_parts.total
    on_host = min(parts.optimizer, _host_update_s(result))
    busy = parts.compute + parts.recompute + parts.optimizer - on_host
    matrix = busy * _matrix_share(result)
    seconds: Mapping[str, float] = {
        "matrix products": matrix,
        "memory-bound kernels": busy - matrix,
        "exposed communication": sum(parts.exposed_communication.values()),
        "pipeline bubble and waiting": parts.bubble + parts.wait,
        "host": parts.host,
        "optimizer on the CPU": on_host,
        "other": parts.other,
    }
    return {name: value / step if step else 0.0 for name, value in seconds.items()}


def _host_update_s(result: Result) -> float:
    """Returns the time of optimizer updates on the host in the last-finishing class."""
    last = result.program.classes[result.last_class]
    return stream_times(result, last).get("cpu", 0.0)


def _matrix_share(result: Result) -> float:
    """Returns the share of matrix products in the compute time of the last-finishing class."""
    program = result.program
    price: dict[Event, float] = {cost.event: cost.value_s for cost in result.events}
    matrix = total = 0.0
    for (_, index), count in class_events(program, program.classes[result.last_class]).items():
        event = program.events[index]
        if isinstance(event, ComputeEvent):
            seconds = count * price.get(event, 0.0)
            total += seconds
            matrix += seconds if event.op in MATRIX_OPS else 0.0
    return matrix / total if total else 1.0
