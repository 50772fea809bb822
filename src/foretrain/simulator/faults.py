"""What the engine says when a TaskGraph cannot be played: bad numbers, bad indices, a circle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from foretrain.errors import InternalError, Problem
from foretrain.simulator.tasks import COMM, COMPUTE, HOST, TaskGraph

#: A message that lists more lines than this helps nobody.
MAX_LINES = 8

#: Rounding allowed above a link fraction of 1.
FRACTION_SLACK = 1e-9


def refuse_bad(graph: TaskGraph) -> None:
    """Returns nothing; raises InternalError that names every bad value and index."""
    problems = list(_lengths(graph))
    if not problems:  # all later checks index the lists by task and stream
        problems = [*_numbers(graph), *_indices(graph), *_links(graph)]
    if problems:
        more = len(problems) - MAX_LINES
        rest = [Problem(what=f"and {more} more")] if more > 0 else []
        raise InternalError([*problems[:MAX_LINES], *rest])


def deadlock(graph: TaskGraph, finish: list[float]) -> InternalError:
    """Returns the error for tasks that never started (`finish` is NaN): heads, waits, a cycle."""
    stuck = {task for task, end in enumerate(finish) if math.isnan(end)}
    waits = _waits(graph, stuck)
    in_stream = {task for order in graph.order for task in order}
    heads = {next((task for task in order if task in stuck), -1) for order in graph.order}
    heads = sorted((heads - {-1}) | (stuck - in_stream))
    lines = [
        f"{name(graph, head)} waits for {', '.join(name(graph, other) for other in waits[head])}"
        for head in heads[:MAX_LINES]
    ]
    if len(heads) > MAX_LINES:
        lines.append(f"and {len(heads) - MAX_LINES} more")
    cycle = " -> ".join(name(graph, task) for task in _cycle(waits))
    return InternalError(
        Problem(
            what=f"deadlock: {len(stuck)} of {len(finish)} tasks can never start; "
            f"at the head of their streams: {'; '.join(lines)}; each waits for the next: {cycle}"
        )
    )


def name(graph: TaskGraph, task: int) -> str:
    """Returns label and id of a task, as messages show it."""
    return f"{graph.label[task]!r} (task {task})" if graph.label[task] else f"task {task}"


def _waits(graph: TaskGraph, stuck: set[int]) -> dict[int, list[int]]:
    """Returns the stuck tasks that each stuck task waits for; never empty in a deadlock."""
    waits: dict[int, list[int]] = {task: [] for task in sorted(stuck)}
    for task, others in waits.items():
        others.extend(other for other in graph.preds[task] if other in stuck)
    for order in graph.order:
        stuck_here = [task for task in order if task in stuck]
        for before, task in pairwise(stuck_here):
            waits[task].append(before)
    return {task: list(dict.fromkeys(others)) for task, others in waits.items()}


def _cycle(waits: dict[int, list[int]]) -> list[int]:
    """Returns tasks that wait for each other in a circle, the first one repeated at the end."""
    path: list[int] = []
    place: dict[int, int] = {}
    task = min(waits)
    while task not in place:
        place[task] = len(path)
        path.append(task)
        task = waits[task][0]
    return [*path[place[task] :], task]


def _lengths(graph: TaskGraph) -> Iterator[Problem]:
    fields = ("latency_s", "work_s", "preds", "press", "slowed", "links", "label")
    for field in fields:
        if len(getattr(graph, field)) != graph.num_tasks:
            yield Problem(
                what="as many entries as tasks are needed",
                where=field,
                value=len(getattr(graph, field)),
                allowed=str(graph.num_tasks),
            )
    if len(graph.device) != len(graph.order):
        yield Problem(
            what="as many entries as streams are needed",
            where="device",
            value=len(graph.device),
            allowed=str(len(graph.order)),
        )


def _numbers(graph: TaskGraph) -> Iterator[Problem]:
    for field in ("latency_s", "work_s", "press", "slowed"):
        values: list[float] = getattr(graph, field)
        # sum and min run in C: the usual good case costs nothing; one NaN or infinity stays in sum
        if not values or (math.isfinite(sum(values)) and min(values) >= 0.0):
            continue
        for task, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0.0):
                yield Problem(
                    what=f"bad value for {name(graph, task)}",
                    where=field,
                    value=value,
                    allowed="finite and not negative",
                )


def _indices(graph: TaskGraph) -> Iterator[Problem]:
    tasks = range(graph.num_tasks)
    top = len(tasks)
    lists = [before for before in graph.preds if before]
    if lists and (min(map(min, lists)) < 0 or max(map(max, lists)) >= top):
        for task, before in enumerate(graph.preds):
            for other in before:
                if other not in tasks:
                    yield _unknown(f"preds of {name(graph, task)}", other, top)
    for stream, order in enumerate(graph.order):
        if order and (min(order) < 0 or max(order) >= top):
            for task in order:
                if task not in tasks:
                    yield _unknown(f"stream {stream}", task, top)
    kinds = set(graph.kind) - {COMPUTE, COMM, HOST}
    if kinds:
        yield Problem(
            what="unknown kind of task", where="kind", value=min(kinds), allowed="0, 1, 2"
        )


def _unknown(where: str, task: int, num_tasks: int) -> Problem:
    return Problem(what="no such task", where=where, value=task, allowed=f"0 to {num_tasks - 1}")


def _links(graph: TaskGraph) -> Iterator[Problem]:
    for task, links in enumerate(graph.links):
        for link, fraction in links:
            # the negated form also catches NaN
            if not 0.0 <= fraction <= 1.0 + FRACTION_SLACK:
                yield Problem(
                    what=f"bad fraction of link {link} for {name(graph, task)}",
                    where="links",
                    value=fraction,
                    allowed="0 to 1",
                )
        if len(links) > 1 and len(dict(links)) < len(links):
            yield Problem(what=f"a link stands twice in {name(graph, task)}", where="links")
    for task, kind in enumerate(graph.kind):
        if kind != COMM and (graph.links[task] or graph.press[task] or graph.slowed[task]):
            yield Problem(
                what=f"{name(graph, task)} is no communication, but has press, slowed or links",
                where="kind",
                value=kind,
                allowed=str(COMM),
            )
