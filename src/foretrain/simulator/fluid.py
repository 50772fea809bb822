"""Tasks that change each other's speed: the walk through time of the event engine.

Work is an amount, not a duration. A running task has a rate; when the tasks around it change, its
remaining work is brought up to date and its finish time moves. A task counts as running from its
start, latency included: a collective that waits for its first byte holds its processors and slows
computation, but it uses no link yet.

All that happens at one moment is one batch: tasks that end, then tasks that start (zero-length
tasks pass through at once), then the rates. So back-to-back kernels do not make the communication
next to them change its rate twice at every boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from foretrain.simulator.fairness import LinkShares, Uses
from foretrain.simulator.tasks import COMPUTE, TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactions:
    """Which tasks can change each other's speed at all.

    `devices[t]`: the devices on which task t slows others or is slowed; `links[t]`: its links that
    another task may use at the same time. Both empty: the task always runs at rate 1.
    """

    devices: list[tuple[int, ...]]
    links: list[Uses]
    num_devices: int


def interactions(graph: TaskGraph) -> Interactions | None:
    """Returns what can interact in this graph, None where nothing can."""
    devices = _shared_devices(graph)
    links = _shared_links(graph)
    if not any(devices) and not any(links):
        return None
    return Interactions(devices=devices, links=links, num_devices=max(graph.device, default=-1) + 1)


def walk(
    graph: TaskGraph, found: Interactions, missing: list[int], then: list[list[int]]
) -> tuple[list[float], list[float], int]:
    """Returns start, finish (NaN: never) and the number of tasks that ended.

    Consumes `missing`. The heap holds (time, task); an entry counts only while it is the task's
    due time, so moving a finish time is one push.
    """
    latency, work = graph.latency_s, graph.work_s
    start = [0.0] * len(missing)
    finish = [float("nan")] * len(missing)
    alone = [
        not devices and not links for devices, links in zip(found.devices, found.links, strict=True)
    ]
    rates = Rates(graph, found)
    due, heap = rates.due, rates.heap
    ready = [task for task, count in enumerate(missing) if not count]
    ended: list[int] = []
    now, done = 0.0, 0
    while True:
        for task in ready:  # grows while it is walked
            start[task] = now
            end = now + latency[task] + work[task]
            if not latency[task] and not work[task]:
                finish[task] = now
                done += 1
                _release(then[task], missing, ready)
            elif alone[task]:
                due[task] = end
                heappush(heap, (end, task))
            else:
                rates.begin(task, now)
        rates.settle(now)
        ready.clear()
        now = rates.next_batch(now, ended)
        if not ended:
            return start, finish, done
        for task in ended:
            due[task] = -1.0
            if not alone[task] and not rates.end(task):
                continue  # only its latency has ended
            finish[task] = now
            done += 1
            _release(then[task], missing, ready)


def _release(others: list[int], missing: list[int], ready: list[int]) -> None:
    """Returns nothing; `others` wait for one task less."""
    for other in others:
        missing[other] -= 1
        if not missing[other]:
            ready.append(other)


class Rates:
    """The running tasks that can change each other's speed, and the queue of finish times."""

    __slots__ = (
        "_compute", "_computing", "_devices", "_fresh", "_latency", "_left", "_links", "_mark",
        "_moved", "_press", "_pressure", "_rate", "_shares", "_slowed", "_talking", "_waiting",
        "_was_computing", "_work", "due", "heap",
    )  # fmt: skip

    def __init__(self, graph: TaskGraph, found: Interactions) -> None:
        num_tasks, num_devices = graph.num_tasks, found.num_devices
        self._compute = [kind == COMPUTE for kind in graph.kind]
        self._press, self._slowed = graph.press, graph.slowed
        self._latency, self._work = graph.latency_s, graph.work_s
        self._devices, self._links = found.devices, found.links
        self._shares = LinkShares(found.links)
        # per device: who runs, and what the others there were told about it
        self._computing: list[dict[int, None]] = [{} for _ in range(num_devices)]
        self._talking: list[dict[int, None]] = [{} for _ in range(num_devices)]
        self._was_computing = [False] * num_devices
        self._pressure = [0.0] * num_devices
        # per task: work left at the moment `mark`, and the rate since then (0: not set yet)
        self._left = [0.0] * num_tasks
        self._mark = [0.0] * num_tasks
        self._rate = [0.0] * num_tasks
        self._waiting = [False] * num_tasks  # in its latency, will join its links after it
        self._fresh: list[int] = []
        self._moved: dict[int, bool] = {}  # device -> did communication begin or end there
        self.due = [-1.0] * num_tasks
        self.heap: list[tuple[float, int]] = []

    def next_batch(self, now: float, batch: list[int]) -> float:
        """Returns the next moment when tasks are due and fills `batch` with them, by id."""
        heap, due = self.heap, self.due
        batch.clear()
        while heap:
            time, task = heap[0]
            if due[task] != time:
                heappop(heap)  # moved or done
            elif batch and time != now:
                break
            else:
                heappop(heap)
                if not batch or batch[-1] != task:  # a task may be queued twice for one moment
                    batch.append(task)
                now = time
        return now

    def begin(self, task: int, now: float) -> None:
        """Returns nothing; `task` starts. `settle` gives it its rate."""
        self._left[task] = self._work[task]
        self._mark[task] = now + self._latency[task]
        self._rate[task] = 0.0
        if self._compute[task]:
            for device in self._devices[task]:
                self._computing[device][task] = None
                self._moved.setdefault(device, False)
            self._fresh.append(task)
            return
        for device in self._devices[task]:
            self._talking[device][task] = None
            self._moved[device] = True
        if self._links[task] and self._latency[task] and self._work[task]:
            self._waiting[task] = True
            self.due[task] = self._mark[task]
            heappush(self.heap, (self._mark[task], task))
            return
        if self._links[task] and self._work[task]:
            self._shares.join(task)
        self._fresh.append(task)

    def end(self, task: int) -> bool:
        """Returns whether a due task is done; False: only its latency has passed."""
        if self._waiting[task]:
            self._waiting[task] = False
            self._shares.join(task)
            self._fresh.append(task)
            return False
        if self._compute[task]:
            for device in self._devices[task]:
                del self._computing[device][task]
                self._moved.setdefault(device, False)
            return True
        for device in self._devices[task]:
            del self._talking[device][task]
            self._moved[device] = True
        if self._links[task] and self._work[task]:
            self._shares.leave(task)
        return True

    def settle(self, now: float) -> None:
        """Returns nothing; new rates for all tasks around those that began or ended."""
        touched = self._fresh
        if self._moved:
            for device, talked in self._moved.items():
                computes = bool(self._computing[device])
                if computes != self._was_computing[device]:
                    self._was_computing[device] = computes
                    touched.extend(task for task in self._talking[device] if self._slowed[task])
                if talked:
                    touched.extend(self._pressed(device))
            self._moved.clear()
        if self._shares.changed:
            touched.extend(self._shares.settle())
        if touched:
            self._fresh = []
            for task in touched:
                if not self._waiting[task]:
                    rate = self._rate_now(task)
                    if rate != self._rate[task]:
                        self._move(task, rate, now)

    def _pressed(self, device: int) -> Iterable[int]:
        """Returns the computations whose pressure is not what it was, and notes the new one."""
        pressure = max([self._press[task] for task in self._talking[device]], default=0.0)
        if pressure == self._pressure[device]:
            return ()
        self._pressure[device] = pressure
        return self._computing[device]

    def _rate_now(self, task: int) -> float:
        devices = self._devices[task]
        if self._compute[task]:
            if len(devices) == 1:
                return 1.0 / (1.0 + self._pressure[devices[0]])
            return 1.0 / (1.0 + max(self._pressure[device] for device in devices))
        share = self._shares.share[task]
        if self._slowed[task] and any(self._was_computing[device] for device in devices):
            return share / (1.0 + self._slowed[task])
        return share

    def _move(self, task: int, rate: float, now: float) -> None:
        """Returns nothing; `task` runs at `rate` from now (or from the end of its latency) on."""
        since = now - self._mark[task]
        if since > 0.0:
            self._left[task] = max(0.0, self._left[task] - since * self._rate[task])
            self._mark[task] = now
        self._rate[task] = rate
        self.due[task] = self._mark[task] + self._left[task] / rate
        heappush(self.heap, (self.due[task], task))


def _shared_devices(graph: TaskGraph) -> list[tuple[int, ...]]:
    """Returns per task the devices where it slows others or can be slowed."""
    streams = [(s, device) for s, device in enumerate(graph.device) if device >= 0]
    active = [press or slowed for press, slowed in zip(graph.press, graph.slowed, strict=True)]
    shared: list[tuple[int, ...]] = [()] * graph.num_tasks
    if not any(active):
        return shared
    computes: set[int] = set()
    talks: set[int] = set()
    for stream, device in streams:
        for task in graph.order[stream]:
            if graph.kind[task] == COMPUTE:
                computes.add(device)
            elif active[task]:
                talks.add(device)
    both = computes & talks
    for stream, device in streams:
        if device not in both:
            continue
        for task in graph.order[stream]:
            if (active[task] or graph.kind[task] == COMPUTE) and device not in shared[task]:
                shared[task] = (*shared[task], device)
    return shared


def _shared_links(graph: TaskGraph) -> list[Uses]:
    """Returns per task its links that two tasks may use at the same time, with fractions.

    Tasks that all stand in one stream run one after the other: their links are never shared.
    """
    if not any(graph.links):
        return [()] * graph.num_tasks
    streams: dict[int, set[int]] = {task: set() for task, uses in enumerate(graph.links) if uses}
    for stream, order in enumerate(graph.order):
        for task in order:
            if task in streams:
                streams[task].add(stream)
    common: dict[int, set[int]] = {}
    users: dict[int, int] = {}
    for task, on in streams.items():
        for link, _ in graph.links[task]:
            users[link] = users.get(link, 0) + 1
            common[link] = common[link] & on if link in common else on
    shared = {link for link, count in users.items() if count > 1 and not common[link]}
    return [
        tuple((link, fraction) for link, fraction in uses if link in shared and fraction)
        for uses in graph.links
    ]
