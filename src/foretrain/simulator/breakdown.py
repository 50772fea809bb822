"""Where the time of a device went: every second of the step booked to one cause.

While something computes, the second is computation (recompute, optimizer). Between two
computations it belongs to what the next one waited for: a communication under way is exposed, also
one that holds up the next on its stream; the time in which this device was ready and the others of
the group were not is waiting for others (a pipeline bubble when it is a transfer between stages), a
launch under way is host. After the last task it is bubble or waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from foretrain.simulator.expand import Expanded, TaskInfo
from foretrain.simulator.result import TimeParts
from foretrain.simulator.tasks import COMM, HOST, Played

#: Kinds of communication; copy: between a device and its host.
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp", "copy")


class Booked(dict[str, float]):
    """Seconds by cause: compute, recompute, optimizer, tp ... dp, bubble, host, wait, other."""

    def book(self, cause: str, seconds: float) -> None:
        """Adds positive seconds to a cause."""
        if seconds > 0.0:
            self[cause] = self.get(cause, 0.0) + seconds


@dataclass(slots=True, kw_only=True)
class _Device:
    """What booking one device needs: `before` is the task before each on the same stream.

    `ways` are the parts of long messages in which they hold no link.
    """

    expanded: Expanded
    played: Played
    before: Mapping[int, int | None]
    ways: Collection[int]
    pipeline: bool
    booked: Booked

    def waits_for(self, task: int) -> list[int]:
        """Returns what a task waits for: dependencies, and for communication its stream.

        Of communication only what is on this device: it starts when the last member is ready.
        """
        graph = self.expanded.graph
        if graph.kind[task] != COMM or task not in self.before:
            return list(graph.preds[task])
        queued = self.before[task]
        own = [p for p in graph.preds[task] if p in self.before]
        return own if queued is None else [*own, queued]

    def ready_s(self, task: int) -> float:
        """Returns when this device could have begun a communication that waits for others too."""
        own = self.waits_for(task) if task in self.before else ()
        return max((self.played.finish_s[p] for p in own), default=0.0)


def book_device(expanded: Expanded, played: Played, device: int, *, pipeline: bool) -> Booked:
    """Returns the causes of one device; they sum to the makespan."""
    booked = Booked()
    here = _Device(
        expanded=expanded,
        played=played,
        before=_predecessors(expanded, device),
        ways=set(expanded.travels.values()),
        pipeline=pipeline,
        booked=booked,
    )
    clock = 0.0
    for task in _stream_tasks(expanded, device, "compute"):
        _book_gap(here, task, clock)
        _book_run(booked, expanded.info[task], played, task)
        clock = max(clock, played.finish_s[task])
    end = played.makespan_s
    for task in _tail(expanded, played, device, clock):
        info = expanded.info[task]
        start = max(clock, played.start_s[task])
        booked.book("wait", start - clock)
        booked.book(info.category, played.finish_s[task] - start)
        clock = max(clock, played.finish_s[task])
    booked.book("bubble" if pipeline else "wait", end - clock)
    return booked


def _predecessors(expanded: Expanded, device: int) -> dict[int, int | None]:
    """Returns for each task of a device the one before it on the same stream."""
    graph = expanded.graph
    before: dict[int, int | None] = {}
    for s, order in enumerate(graph.order):
        if graph.device[s] == device:
            before.update(zip(order, (None, *order), strict=False))
    return before


def _stream_tasks(expanded: Expanded, device: int, stream: str) -> list[int]:
    graph = expanded.graph
    for s, tasks in enumerate(graph.order):
        if graph.device[s] == device and expanded.stream_names[s] == stream:
            return tasks
    return []


def _tail(expanded: Expanded, played: Played, device: int, clock: float) -> list[int]:
    """Communication of a device that ends after its last computation, by end."""
    graph = expanded.graph
    tasks: set[int] = set()
    for s, order in enumerate(graph.order):
        if graph.device[s] != device:
            continue
        for task in reversed(order):
            if played.finish_s[task] <= clock:
                break
            if graph.kind[task] == COMM:
                tasks.add(task)
    return sorted(tasks, key=lambda task: played.finish_s[task])


def _book_run(booked: Booked, info: TaskInfo, played: Played, task: int) -> None:
    seconds = played.finish_s[task] - played.start_s[task]
    if info.parts is None:
        booked.book(info.category, seconds)
        return
    total = sum(info.parts.values())
    for cause, part in info.parts.items():
        booked.book(cause, seconds * part / total if total > 0 else 0.0)


def _book_gap(here: _Device, task: int, clock: float) -> None:
    """Books [clock, start of task] by walking back along what let the task go."""
    expanded, played, booked = here.expanded, here.played, here.booked
    graph = expanded.graph
    end = played.start_s[task]
    while end > clock:
        blocker = max(here.waits_for(task), key=lambda p: played.finish_s[p], default=None)
        if blocker is None or played.finish_s[blocker] <= clock:
            booked.book("wait" if graph.kind[task] == COMM else "other", end - clock)
            return
        info = expanded.info[blocker]
        begin = max(clock, min(end, played.start_s[blocker]))
        if graph.kind[blocker] == HOST:
            if not graph.preds[blocker]:  # it ran late because the host launched other work
                booked.book("host", end - clock)
                return
            booked.book("host", end - begin)
        elif graph.kind[blocker] == COMM:
            booked.book(info.category, end - begin)
            late = info.category == "pp"
            if blocker not in here.ways and (late or blocker in expanded.across):
                ready = max(clock, min(begin, here.ready_s(blocker)))
                booked.book("bubble" if here.pipeline or late else "wait", begin - ready)
                begin = ready
        else:
            booked.book("other", end - begin)
        end = begin
        task = blocker


def time_parts(booked: Booked) -> TimeParts:
    """Returns the causes as TimeParts; names outside its fields count as other."""
    known = {"compute", "recompute", "optimizer", "bubble", "host", "wait", *COMMUNICATION}
    return TimeParts(
        compute=booked.get("compute", 0.0),
        recompute=booked.get("recompute", 0.0),
        optimizer=booked.get("optimizer", 0.0),
        exposed_communication={name: booked.get(name, 0.0) for name in COMMUNICATION},
        bubble=booked.get("bubble", 0.0),
        host=booked.get("host", 0.0),
        wait=booked.get("wait", 0.0),
        other=sum(v for k, v in booked.items() if k not in known),
    )
