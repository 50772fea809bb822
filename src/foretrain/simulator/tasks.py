"""TaskGraph: what the engine plays. Streams, tasks, members, predecessors; no names of operators.

Every list is indexed by task id unless said otherwise. Task ids are sequence numbers: ties in time
are broken by the smaller id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

COMPUTE, COMM, HOST = 0, 1, 2


@dataclass(slots=True, kw_only=True)
class TaskGraph:
    """Tasks on in-order streams.

    `order[s]` lists the tasks of stream s in launch order; a task that stands in several streams
    is a rendezvous: it starts when it is at the head of all of them and all its predecessors are
    done, and holds all of them until it ends. A task in no stream starts when its predecessors
    are done. `device[s]` is the device that stream s belongs to (-1: none).

    A task lasts `latency_s` (never stretched) and then `work_s` (seconds at full rate):

    - a compute task runs at rate 1 / (1 + g), g the largest `press` of the communication tasks
      that run on its device at the same time;
    - a communication task runs at rate share / (1 + `slowed`) while one of its devices computes,
      else at rate share. `links` names the links it uses, each with the fraction of the link's
      capacity it fills at full rate; share is its max-min fair share of them, at most 1.
    """

    order: list[list[int]] = field(default_factory=list[list[int]])
    device: list[int] = field(default_factory=list[int])
    kind: list[int] = field(default_factory=list[int])
    latency_s: list[float] = field(default_factory=list[float])
    work_s: list[float] = field(default_factory=list[float])
    preds: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    press: list[float] = field(default_factory=list[float])
    slowed: list[float] = field(default_factory=list[float])
    links: list[tuple[tuple[int, float], ...]] = field(
        default_factory=list[tuple[tuple[int, float], ...]]
    )
    label: list[str] = field(default_factory=list[str])

    @property
    def num_tasks(self) -> int:
        """Returns the number of tasks."""
        return len(self.kind)

    def add_stream(self, device: int = -1) -> int:
        """Returns the id of a new stream on `device`."""
        self.order.append([])
        self.device.append(device)
        return len(self.order) - 1

    def add_task(
        self,
        *,
        kind: int,
        streams: tuple[int, ...],
        work_s: float,
        latency_s: float = 0.0,
        preds: tuple[int, ...] = (),
        press: float = 0.0,
        slowed: float = 0.0,
        links: tuple[tuple[int, float], ...] = (),
        label: str = "",
    ) -> int:
        """Returns the id of a new task, appended to each of its streams."""
        task = len(self.kind)
        self.kind.append(kind)
        self.latency_s.append(latency_s)
        self.work_s.append(work_s)
        self.preds.append(preds)
        self.press.append(press)
        self.slowed.append(slowed)
        self.links.append(links)
        self.label.append(label)
        for stream in streams:
            self.order[stream].append(task)
        return task


@dataclass(slots=True, kw_only=True)
class Played:
    """When each task started and ended."""

    start_s: list[float]
    finish_s: list[float]
    makespan_s: float
