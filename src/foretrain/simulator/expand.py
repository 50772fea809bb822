"""From a Program to the TaskGraph that the engine plays: folded (hierarchical) or flat.

Folded: one representative per rank class; a chunk of layers is one (max,+) step where nothing
asynchronous of its class can run beside it, and single items where something can. Flat: every
rank, every item, collectives with all their members. Both see the same launch lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretrain.program import Comm, Item, Program, RankClass, Run
from foretrain.simulator.links import Links
from foretrain.simulator.segment_play import EventTimes, Macro, PlayedItem, play_segment
from foretrain.simulator.tasks import COMM, COMPUTE, HOST, TaskGraph


@dataclass(slots=True, kw_only=True)  # not frozen: there are many, and that makes them slow
class TaskInfo:
    """What a task is, for reading the result. `entry` indexes the launch list of the device."""

    device: int
    entry: int
    stream: str
    category: str
    label: str
    parts: dict[str, float] | None = None  # how a macro step splits, None: all `category`


@dataclass(slots=True, kw_only=True)
class Expanded:
    """The graph, what its tasks are, and the devices (class index, rank) it plays."""

    graph: TaskGraph
    info: list[TaskInfo]
    devices: list[tuple[int, int]]
    stream_names: list[str] = field(default_factory=list[str])
    first_task: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    last_task: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    comm_task: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    across: set[int] = field(default_factory=set[int])  # tasks that join several classes
    travels: dict[int, int] = field(default_factory=dict[int, int])  # transfer -> its way
    macros: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class SegmentTimes:
    """Macro steps of segments and of chains of segments, each played once."""

    def __init__(self, program: Program, times: EventTimes) -> None:
        self.program, self.times = program, times
        self._single: dict[int, tuple[Macro, list[PlayedItem]]] = {}
        self._chains: dict[tuple[int, ...], Macro] = {}

    def segment(self, index: int) -> tuple[Macro, list[PlayedItem]]:
        """Returns the macro step and the items of one segment."""
        if index not in self._single:
            self._single[index] = play_segment(self.program.segments[index], self.times)
        return self._single[index]

    def chain(self, segments: tuple[int, ...]) -> Macro:
        """Returns the macro step of segments one after the other."""
        if segments not in self._chains:
            macro = Macro()
            for index in segments:
                macro = macro.then(self.segment(index)[0])
            self._chains[segments] = macro
        return self._chains[segments]


def expand_folded(program: Program, times: EventTimes, segments: SegmentTimes) -> Expanded:
    """Returns the graph of one representative rank per class."""
    return _Expander(program, times, segments, flat=False).build()


def expand_flat(program: Program, times: EventTimes, segments: SegmentTimes) -> Expanded:
    """Returns the graph of every rank and every item."""
    return _Expander(program, times, segments, flat=True).build()


def quiet_runs(rank_class: RankClass) -> list[bool]:
    """Returns for each entry whether no asynchronous collective of its class can run beside it.

    A data-parallel collective may run from its launch until the first entry that waits for it.
    Transfers between stages do not count: they press on nothing.
    """
    entries = rank_class.entries
    until: dict[int, int] = {}
    for i, entry in enumerate(entries):
        for waited in entry.after:
            until.setdefault(waited, i)
    quiet: list[bool] = []
    busy = 0  # the first entry beside which no earlier collective can run
    for i, entry in enumerate(entries):
        quiet.append(i >= busy)
        if isinstance(entry, Comm) and entry.category != "pp":
            busy = max(busy, until.get(i, len(entries)))
    return quiet


class _Expander:
    """Builds the task graph device by device; collectives are joined by key."""

    def __init__(
        self, program: Program, times: EventTimes, segments: SegmentTimes, *, flat: bool
    ) -> None:
        self.program, self.times, self.segments, self.flat = program, times, segments, flat
        self.graph = TaskGraph()
        self.out = Expanded(graph=self.graph, info=[], devices=[])
        self.joined: dict[tuple[object, ...], int] = {}
        self.streams: dict[tuple[int, str], int] = {}
        self.links = Links(times)
        self.debt: dict[int, float] = {}
        self.blocked: dict[int, tuple[int, ...]] = {}  # what a blocking launch waits for

    def build(self) -> Expanded:
        """Returns the expanded program."""
        for index, rank_class in enumerate(self.program.classes):
            quiet = quiet_runs(rank_class)
            ranks = rank_class.ranks if self.flat else rank_class.ranks[:1]
            for rank in ranks:
                self.out.devices.append((index, rank))
                self._device(len(self.out.devices) - 1, rank, rank_class, quiet)
        return self.out

    # -- pieces ----------------------------------------------------------------------------

    def stream(self, device: int, name: str) -> int:
        """Returns the id of a stream of a device."""
        key = (device, name)
        known = self.streams.get(key)
        if known is None:
            known = self.streams[key] = self.graph.add_stream(device)
            self.out.stream_names.append(name)
        return known

    def task(self, info: TaskInfo, **arguments: object) -> int:
        """Returns the id of a new task described by `info`."""
        self.out.info.append(info)
        return self.graph.add_task(label=info.label, **arguments)  # pyright: ignore[reportArgumentType]

    def host(
        self, device: int, entry: int, seconds: float, preds: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Returns the host task before a launch as predecessors; nothing when it costs nothing.

        Host time that follows a launch (`debt`) is paid by the next host task, or by one of its
        own when that one has to wait for something first.
        """
        preds = (*preds, *self.blocked.pop(device, ()))
        debt = self.debt.pop(device, 0.0)
        if debt > 0.0 and preds:
            self._host_task(device, entry, debt, ())
            debt = 0.0
        if seconds + debt <= 0.0 and not preds:
            return ()
        return (self._host_task(device, entry, seconds + debt, preds),)

    def _host_task(self, device: int, entry: int, seconds: float, preds: tuple[int, ...]) -> int:
        self.out.info.append(
            TaskInfo(device=device, entry=entry, stream="host", category="host", label="launch")
        )
        return self.graph.add_task(
            kind=HOST,
            streams=(self.stream(device, "host"),),
            work_s=seconds,
            preds=preds,
            label="launch",
        )

    # -- entries ---------------------------------------------------------------------------

    def _device(self, device: int, rank: int, rank_class: RankClass, quiet: Sequence[bool]) -> None:
        done: list[int] = []  # the task whose end is the end of each entry
        computed: tuple[int, ...] = ()
        for i, entry in enumerate(rank_class.entries):
            after = tuple(done[j] for j in entry.after)
            if isinstance(entry, Comm):
                done.append(self._comm(device, rank, i, entry, after, computed, quiet[i]))
                self.out.comm_task[device, i] = done[-1]
                # sends and receives are paired: none of them may keep its host from the next
                if self.times.blocking and entry.category != "pp":
                    self.blocked[device] = (done[-1],)
                continue
            first = len(self.out.info)
            folded = not self.flat and (quiet[i] or not self.times.fluid)
            if folded:
                task = self._macro(device, i, entry, after)
            else:
                task = self._items(device, rank, i, entry, after, computed)
            self.out.first_task[device, i] = first
            self.out.last_task[device, i] = task
            computed = (task,)
            done.append(task)

    def _macro(self, device: int, i: int, run: Run, after: tuple[int, ...]) -> int:
        macro = self.segments.chain(run.segments)
        synced = after if run.host_sync else ()
        launched = self.host(device, i, macro.lead, synced)
        self.debt[device] = self.debt.get(device, 0.0) + macro.host - macro.lead
        info = TaskInfo(
            device=device,
            entry=i,
            stream="compute",
            category="compute",
            label=_run_label(run),
            parts=dict(macro.parts),
        )
        task = self.task(
            info,
            kind=COMPUTE,
            streams=(self.stream(device, "compute"),),
            work_s=macro.gpu,
            preds=(*launched, *after),
        )
        self.out.macros[task] = run.segments
        return task

    def _items(
        self,
        device: int,
        rank: int,
        i: int,
        run: Run,
        after: tuple[int, ...],
        computed: tuple[int, ...],
    ) -> int:
        waiting = after
        synced = after if run.host_sync else ()
        last = -1
        for position, index in enumerate(run.segments):
            items = self.program.segments[index].items
            tasks: list[int] = []
            if self.times.synced or self.times.blocking:
                synced = (*computed, *waiting)
            for j, item in enumerate(items):
                launched = self.host(device, i, self.times.host[item.event], synced)
                waits = tuple(tasks[w] for w in item.waits)
                if item.stream == "compute":
                    preds = (*launched, *waits, *waiting)
                    tasks.append(self._compute_item(device, i, item, preds))
                    computed = (tasks[-1],)
                    waiting = ()
                else:
                    where = (i, position, j)
                    preds = (*launched, *waits, *computed, *waiting)
                    tasks.append(self._comm_item(device, rank, where, item, preds))
                synced = (tasks[-1],) if self.times.blocking else ()
            if tasks:
                last = self._close(device, i, tasks)
                computed = (last,)
        if last < 0:  # a chunk without layers: what waits for it waits for what it waited for
            last = self._join(device, i, (*self.host(device, i, 0.0, synced), *waiting))
        return last

    def _close(self, device: int, i: int, tasks: Sequence[int]) -> int:
        """The end of a segment: its last task, or a join when communication ends it."""
        last = tasks[-1]
        if self.out.info[last].stream == "compute":
            return last
        return self._join(device, i, (last,))

    def _join(self, device: int, i: int, preds: tuple[int, ...]) -> int:
        """A task of no length on the compute stream, at the end of what it waits for."""
        info = TaskInfo(device=device, entry=i, stream="compute", category="compute", label="join")
        return self.task(
            info,
            kind=COMPUTE,
            streams=(self.stream(device, "compute"),),
            work_s=0.0,
            preds=preds,
        )

    def _compute_item(self, device: int, i: int, item: Item, preds: tuple[int, ...]) -> int:
        info = TaskInfo(
            device=device, entry=i, stream="compute", category=item.category, label=item.label
        )
        return self.task(
            info,
            kind=COMPUTE,
            streams=(self.stream(device, "compute"),),
            work_s=self.times.value[item.event],
            preds=preds,
        )

    def _comm_item(
        self,
        device: int,
        rank: int,
        where: tuple[int, int, int],
        item: Item,
        preds: tuple[int, ...],
    ) -> int:
        members = self._members(rank, item.axes)
        key = ("item", *where, members) if self.flat and len(members) > 1 else None
        return self._transfer(
            device, rank, where[0], item.label, item.stream, item.category, item.event, preds, key
        )

    def _comm(
        self,
        device: int,
        rank: int,
        i: int,
        comm: Comm,
        after: tuple[int, ...],
        computed: tuple[int, ...],
        quiet: bool,
    ) -> int:
        # its launch holds up what the host launches next, not the communication itself
        self.debt[device] = self.debt.get(device, 0.0) + self.times.host[comm.event]
        preds = (*after, *(() if comm.posted else computed))
        key: tuple[object, ...] | None = None
        if comm.key is not None:
            key = (comm.key, self._rest(rank, comm.axes))
        elif self.flat:
            members = self._members(rank, comm.axes)
            key = ("entry", i, members) if len(members) > 1 else None
        # transfers between stages share links with data-parallel collectives only
        alone = quiet and comm.category == "pp"
        task = self._transfer(
            device, rank, i, comm.label, comm.stream, comm.category, comm.event, preds, key, alone
        )
        travel = self.times.travel.get(comm.event, 0.0)
        return self._travel(task, travel) if travel > 0.0 and comm.category == "pp" else task

    def _travel(self, task: int, seconds: float) -> int:
        """The way of a message after it has left: it holds no stream, so others may follow."""
        if task not in self.out.travels:
            self.graph.latency_s[task] = max(0.0, self.graph.latency_s[task] - seconds)
            self.out.travels[task] = self.task(
                self.out.info[task], kind=COMM, streams=(), work_s=0.0, latency_s=seconds,
                preds=(task,),
            )  # fmt: skip
        return self.out.travels[task]

    def _members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        return self.program.mesh.group(rank, axes) if self.flat else (rank,)

    def _rest(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Coordinates off the axes of a group: equal for all its members (folded: one group)."""
        if not self.flat:
            return ()
        place = self.program.mesh.coordinates(rank)
        return tuple(v for axis, v in place.items() if axis not in axes)

    def _transfer(
        self,
        device: int,
        rank: int,
        i: int,
        label: str,
        stream: str,
        category: str,
        event: int,
        preds: tuple[int, ...],
        key: tuple[object, ...] | None,
        alone: bool = False,
    ) -> int:
        """A communication task; a further member of a known one joins it."""
        own = self.stream(device, stream)
        use = self.links.uses(rank, category, event) if self.times.fluid and not alone else ()
        known = self.joined.get(key) if key is not None else None
        if known is not None:
            if self.out.devices[self.out.info[known].device][0] != self.out.devices[device][0]:
                self.out.across.add(known)
            self.graph.order[own].append(known)
            self.graph.preds[known] = (*self.graph.preds[known], *preds)
            self.graph.links[known] = (*self.graph.links[known], *use)
            return known
        press, slowed = self.times.gammas(category)
        latency = self.times.latency[event]
        info = TaskInfo(device=device, entry=i, stream=stream, category=category, label=label)
        task = self.task(
            info,
            kind=COMM,
            streams=(own,),
            latency_s=latency,
            work_s=self.times.value[event] - latency,
            preds=preds,
            press=press,
            slowed=slowed,
            links=use,
        )
        if key is not None:
            self.joined[key] = task
        return task


def _run_label(run: Run) -> str:
    if run.slot == "step":
        return "optimizer step"
    where = f" {run.layer}" if run.layer else ""
    return f"{run.slot}{run.microbatch} chunk {run.chunk}{where}"
