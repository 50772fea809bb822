"""The timeline of a simulation as slices, for traces: macro steps are opened into their items."""

from __future__ import annotations

from foretrain.program import Comm, Program
from foretrain.simulator.result import Slice
from foretrain.simulator.simulate import Simulated
from foretrain.simulator.tasks import HOST


def build_timeline(program: Program, simulated: Simulated) -> tuple[Slice, ...]:
    """Returns all slices in order of start, one device after the other."""
    expanded = simulated.expanded
    slices: list[Slice] = []
    keys = _keys(program, simulated)
    for device, (index, _) in enumerate(expanded.devices):
        seen: set[int] = set()
        for stream, order in enumerate(expanded.graph.order):
            if expanded.graph.device[stream] != device:
                continue
            for task in order:
                if task not in seen:
                    seen.add(task)
                    slices += _slices(simulated, index, stream, task, keys)
    slices.sort(key=lambda s: (s.rank_class, s.start_s))
    return tuple(slices)


def _keys(program: Program, simulated: Simulated) -> dict[int, str]:
    """Task -> the key that joins a transfer over classes."""
    keys: dict[int, str] = {}
    for (device, entry), task in simulated.expanded.comm_task.items():
        comm = program.classes[simulated.expanded.devices[device][0]].entries[entry]
        if isinstance(comm, Comm) and comm.key is not None:
            keys[task] = comm.key
    return keys


def _slices(
    simulated: Simulated, index: int, stream: int, task: int, keys: dict[int, str]
) -> list[Slice]:
    expanded, played = simulated.expanded, simulated.played
    info = expanded.info[task]
    start, finish = played.start_s[task], played.finish_s[task]
    if finish <= start or (expanded.graph.kind[task] == HOST and finish - start < 1e-7):
        return []
    if task in expanded.macros:
        return _open(simulated, index, task, start, finish)
    return [
        Slice(
            rank_class=index,
            stream=expanded.stream_names[stream],
            label=info.label,
            category=info.category,
            start_s=start,
            finish_s=finish,
            key=keys.get(task),
        )
    ]


def _open(simulated: Simulated, index: int, task: int, start: float, finish: float) -> list[Slice]:
    """The items of a macro step, stretched to the time it really took."""
    segments = simulated.expanded.macros[task]
    total = simulated.segments.chain(segments).gpu
    stretch = (finish - start) / total if total > 0 else 1.0
    slices: list[Slice] = []
    offset = 0.0
    for segment in segments:
        macro, items = simulated.segments.segment(segment)
        name = simulated.segments.program.segments[segment].name
        for played in items:
            if played.finish <= played.start:
                continue
            slices.append(
                Slice(
                    rank_class=index,
                    stream=played.item.stream,
                    label=played.item.label,
                    category=played.item.category,
                    start_s=start + (offset + played.start) * stretch,
                    finish_s=start + (offset + played.finish) * stretch,
                    detail={"segment": name},
                )
            )
        offset += macro.gpu
    return slices
