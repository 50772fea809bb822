"""The event engine in plain Python: plays a TaskGraph and says when each task starts and ends.

A task starts when everything before it has ended: its predecessors and the task before it on each
of its streams. That makes the start times without contention a recursion of max and plus (the
longest path to each task), which needs no clock and no event queue: `longest_path`. Only where
tasks change each other's speed (overlap slowdown, shared links) the engine walks through time:
`foretrain.simulator.fluid`.
"""

from __future__ import annotations

from foretrain.simulator import fluid as contention
from foretrain.simulator.faults import deadlock, refuse_bad
from foretrain.simulator.fluid import Interactions, interactions
from foretrain.simulator.tasks import Played, TaskGraph


def play(graph: TaskGraph, *, fluid: bool = True) -> Played:
    """Returns start and finish of every task, in seconds from the start of the step.

    With `fluid` tasks slow each other as TaskGraph says; without it all rates are 1. Equal graphs
    give equal times, bit for bit: ties are broken by the task id, nothing else decides.

    Raises:
        InternalError: a duration, rate factor or index of the graph is bad (nothing was played),
            or tasks wait for each other in a circle (the message names them).
    """
    refuse_bad(graph)
    missing, then = dependents(graph)
    found: Interactions | None = interactions(graph) if fluid else None
    if found is None:
        start, finish, done = longest_path(graph, missing, then)
    else:
        start, finish, done = contention.walk(graph, found, missing, then)
    if done < graph.num_tasks:
        raise deadlock(graph, finish)
    return Played(start_s=start, finish_s=finish, makespan_s=max(finish, default=0.0))


def dependents(graph: TaskGraph) -> tuple[list[int], list[list[int]]]:
    """Returns per task how many tasks it waits for, and which tasks wait for it.

    Launch order within a stream counts as a dependency. A task that waits for another one twice
    is counted twice, on both sides.
    """
    missing = [len(before) for before in graph.preds]
    then: list[list[int]] = [[] for _ in missing]
    for task, before in enumerate(graph.preds):
        for other in before:
            then[other].append(task)
    for order in graph.order:
        previous = -1
        for task in order:
            if previous >= 0:
                then[previous].append(task)
                missing[task] += 1
            previous = task
    return missing, then


def longest_path(
    graph: TaskGraph, missing: list[int], then: list[list[int]]
) -> tuple[list[float], list[float], int]:
    """Returns start, finish (NaN: never) and the number of tasks that ended, all rates being 1.

    Consumes `missing`.
    """
    latency, work = graph.latency_s, graph.work_s
    start = [0.0] * len(missing)
    finish = [float("nan")] * len(missing)
    ready = [task for task, count in enumerate(missing) if not count]
    for task in ready:  # grows while it is walked
        end = start[task] + latency[task] + work[task]
        finish[task] = end
        for other in then[task]:
            if end > start[other]:
                start[other] = end
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return start, finish, len(ready)
