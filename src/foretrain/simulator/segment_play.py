"""A segment in isolation: how long it takes when it starts with idle streams.

A closed segment is a (max,+) linear system with two inputs, the time the streams are free and the
time the host gets there, and two outputs, the time all is done and the time the host leaves:

    done      = max(gpu + K, host + A)
    host_done = host + C

so equal layers are played once and chained exactly. docs/explain/simulation.md derives it. Where
the host waits for the device after every block, K = A = C: the time from an idle start to the end.
Where it waits after every launch, that is the sum of all launches and all events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.program import Item, Segment
from foretrain.simulator.reference import play
from foretrain.simulator.tasks import COMM, COMPUTE, TaskGraph

NEVER = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTimes:
    """Prices as plain lists, indexed by event; `press` and `slowed` by category.

    `crossing` holds what an event does on the link between its device and the node, where it does
    anything: seconds that the link would need for what leaves, and for what enters.
    """

    value: list[float]
    latency: list[float]
    host: list[float]
    link: tuple[str, ...]
    overlap: Mapping[str, tuple[float, float]]
    fluid: bool
    travel: Mapping[int, float] = field(default_factory=dict[int, float])  # events on a long way
    crossing: Mapping[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )
    synced: bool = False  # the host waits for the device after every segment
    blocking: bool = False  # and after every launch

    def gammas(self, category: str) -> tuple[float, float]:
        """Returns (press, slowed) of a communication category, zero in plain mode."""
        return self.overlap.get(category, (0.0, 0.0)) if self.fluid else (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Macro:
    """A chain of segments as one step of the (max,+) system; `parts` splits `gpu` by category."""

    gpu: float = 0.0  # K
    lag: float = 0.0  # A
    host: float = 0.0  # C
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    def then(self, other: Macro) -> Macro:
        """Returns this chain followed by another."""
        parts = dict(self.parts)
        for name, value in other.parts.items():
            parts[name] = parts.get(name, 0.0) + value
        return Macro(
            gpu=self.gpu + other.gpu,
            lag=max(self.lag + other.gpu, self.host + other.lag),
            host=self.host + other.host,
            parts=parts,
        )

    @property
    def lead(self) -> float:
        """Returns how long after the host's arrival the streams may start: A - K, in [0, C]."""
        return min(max(self.lag - self.gpu, 0.0), self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedItem:
    """Start and end of an item relative to the start of its segment."""

    item: Item
    start: float
    finish: float


def play_segment(segment: Segment, times: EventTimes) -> tuple[Macro, list[PlayedItem]]:
    """Returns the macro step of one segment and when its items ran with an idle host."""
    if times.blocking:
        return _one_by_one(segment.items, times)
    overlapping = times.fluid and _may_overlap(segment.items)
    played = _fluid(segment, times) if overlapping else _walk(segment.items, times, 0.0, NEVER)
    gpu = max((p.finish for p in played), default=0.0)
    held = _walk(segment.items, times, NEVER, 0.0)
    lag = max((p.finish for p in held), default=0.0)
    if times.synced:
        alone = max(lag, gpu)
        parts = _parts(played, gpu)
        parts["host"] = parts.get("host", 0.0) + alone - gpu
        return Macro(gpu=alone, lag=alone, host=alone, parts=parts), played
    macro = Macro(
        gpu=gpu,
        lag=max(lag, gpu),
        host=sum(times.host[item.event] for item in segment.items),
        parts=_parts(played, gpu),
    )
    return macro, played


def _one_by_one(items: Sequence[Item], times: EventTimes) -> tuple[Macro, list[PlayedItem]]:
    """The segment where the host launches nothing before the last event has ended."""
    clock = 0.0
    parts: dict[str, float] = {}
    played: list[PlayedItem] = []
    for item in items:
        for name, seconds in (("host", times.host), (item.category, times.value)):
            parts[name] = parts.get(name, 0.0) + seconds[item.event]
        start = clock + times.host[item.event]
        clock = start + times.value[item.event]
        played.append(PlayedItem(item=item, start=start, finish=clock))
    return Macro(gpu=clock, lag=clock, host=clock, parts=parts), played


def _may_overlap(items: Sequence[Item]) -> bool:
    """Whether some communication is not waited for by the very next computation."""
    for i, item in enumerate(items):
        if item.stream != "compute":
            following = next((o for o in items[i + 1 :] if o.stream == "compute"), None)
            if following is not None and i not in following.waits:
                return True
    return False


def _walk(items: Sequence[Item], times: EventTimes, gpu: float, host: float) -> list[PlayedItem]:
    """The (max,+) recursion: streams free at `gpu`, the host starts at `host`."""
    free: dict[str, float] = {}
    computed = gpu
    played: list[PlayedItem] = []
    for item in items:
        host += times.host[item.event]
        start = max(free.get(item.stream, gpu), host)
        if item.stream != "compute":
            start = max(start, computed)
        for wait in item.waits:
            start = max(start, played[wait].finish)
        finish = start + times.value[item.event]
        free[item.stream] = finish
        if item.stream == "compute":
            computed = finish
        played.append(PlayedItem(item=item, start=start, finish=finish))
    return played


def _fluid(segment: Segment, times: EventTimes) -> list[PlayedItem]:
    graph = TaskGraph()
    add_items(graph, segment.items, times, {}, 0)
    result = play(graph, fluid=True)
    return [
        PlayedItem(item=item, start=result.start_s[i], finish=result.finish_s[i])
        for i, item in enumerate(segment.items)
    ]


def add_items(
    graph: TaskGraph,
    items: Sequence[Item],
    times: EventTimes,
    streams: dict[str, int],
    device: int,
) -> list[int]:
    """Returns the task ids of items appended to a graph on one device, without host tasks."""
    tasks: list[int] = []
    computed: tuple[int, ...] = ()
    for item in items:
        if item.stream not in streams:
            streams[item.stream] = graph.add_stream(device)
        waits = tuple(tasks[wait] for wait in item.waits)
        compute = item.stream == "compute"
        press, slowed = (0.0, 0.0) if compute else times.gammas(item.category)
        latency = times.latency[item.event]
        task = graph.add_task(
            kind=COMPUTE if compute else COMM,
            streams=(streams[item.stream],),
            latency_s=0.0 if compute else latency,
            work_s=times.value[item.event] - (0.0 if compute else latency),
            preds=waits if compute else (*waits, *computed),
            press=press,
            slowed=slowed,
            label=item.label,
        )
        if compute:
            computed = (task,)
        tasks.append(task)
    return tasks


def _parts(played: Sequence[PlayedItem], total: float) -> dict[str, float]:
    """Splits the time of a segment: computation by category, gaps by what was waited for."""
    parts: dict[str, float] = {}
    clock = 0.0

    def book(name: str, seconds: float) -> None:
        if seconds > 0:
            parts[name] = parts.get(name, 0.0) + seconds

    for entry in played:
        if entry.item.stream != "compute":
            continue
        waits = [played[w] for w in entry.item.waits]
        blocker = max(waits, key=lambda p: p.finish, default=None)
        book(blocker.item.category if blocker else "other", entry.start - clock)
        book(entry.item.category, entry.finish - entry.start)
        clock = entry.finish
    tail = [p for p in played if p.item.stream != "compute"]
    last = max(tail, key=lambda p: p.finish, default=None)
    book(last.item.category if last else "other", total - clock)
    return parts
