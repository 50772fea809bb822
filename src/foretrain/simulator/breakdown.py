"""Where the time of a device went: every second of the step booked to one cause.

While something computes, the second is computation (recompute, optimizer). Between two
computations it belongs to what the next one waited for: a communication under way is exposed, the
time before it started is waiting for others (a pipeline bubble when it is a transfer between
stages), a launch under way is host. After the last task it is bubble or waiting.
"""

from __future__ import annotations

from foretrain.simulator.expand import Expanded, TaskInfo
from foretrain.simulator.result import TimeParts
from foretrain.simulator.tasks import COMM, HOST, Played

COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")


class Booked(dict[str, float]):
    """Seconds by cause: compute, recompute, optimizer, tp ... dp, bubble, host, wait, other."""

    def book(self, cause: str, seconds: float) -> None:
        """Adds positive seconds to a cause."""
        if seconds > 0.0:
            self[cause] = self.get(cause, 0.0) + seconds


def book_device(expanded: Expanded, played: Played, device: int, *, pipeline: bool) -> Booked:
    """Returns the causes of one device; they sum to the makespan."""
    booked = Booked()
    clock = 0.0
    tasks = _stream_tasks(expanded, device, "compute")
    for task in tasks:
        _book_gap(booked, expanded, played, task, clock, pipeline=pipeline)
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


def _stream_tasks(expanded: Expanded, device: int, stream: str) -> list[int]:
    graph = expanded.graph
    for s, tasks in enumerate(graph.order):
        if graph.device[s] == device and expanded.stream_names[s] == stream:
            return tasks
    return []


def _tail(expanded: Expanded, played: Played, device: int, clock: float) -> list[int]:
    """Communication of a device that ends after its last computation, by end."""
    graph = expanded.graph
    tasks = {
        task
        for s, order in enumerate(graph.order)
        if graph.device[s] == device
        for task in order[-4:]
        if graph.kind[task] == COMM and played.finish_s[task] > clock
    }
    return sorted(tasks, key=lambda task: played.finish_s[task])


def _book_run(booked: Booked, info: TaskInfo, played: Played, task: int) -> None:
    seconds = played.finish_s[task] - played.start_s[task]
    if info.parts is None:
        booked.book(info.category, seconds)
        return
    total = sum(info.parts.values())
    for cause, part in info.parts.items():
        booked.book(cause, seconds * part / total if total > 0 else 0.0)


def _book_gap(
    booked: Booked, expanded: Expanded, played: Played, task: int, clock: float, *, pipeline: bool
) -> None:
    """Books [clock, start of task] by walking back along what let the task go."""
    end = played.start_s[task]
    graph = expanded.graph
    ways = set(expanded.travels.values())
    while end > clock:
        preds = graph.preds[task]
        blocker = max(preds, key=lambda p: played.finish_s[p], default=None)
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
            way = blocker in ways
            if not way and (info.category == "pp" or blocker in expanded.across):
                late_stage = pipeline or info.category == "pp"
                booked.book("bubble" if late_stage else "wait", begin - clock)
                return
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
