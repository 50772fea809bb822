"""Speed of the event engine, in tasks per second and relative to this machine's plain Python.

    PYTHONPATH=src python benchmarks/bench_engine.py [TASKS]

The ratio divides the engine's time per task by the time of one turn of a fixed loop over lists, so
that it says the same on a slow, a fast and a busy machine. Exit status 1 above the budgets.
"""

from __future__ import annotations

import sys
from time import perf_counter

from foretrain.simulator.reference import play
from foretrain.simulator.tasks import COMM, COMPUTE, TaskGraph

STAGES, OPERATORS = 8, 24
LOOP_TURNS = 1_000_000

#: Largest allowed ratio: time per task over time of a loop turn, about twice what was measured.
BUDGETS = {"plain": 40.0, "fluid": 150.0}


def pipeline(tasks: int) -> TaskGraph:
    """Returns a forward pipeline: operators, a blocking collective, a gradient bucket, a send.

    The buckets overlap with the next operators (slowdown) and share a link with the sends.
    """
    graph = TaskGraph()
    lanes = [[graph.add_stream(stage) for _ in range(4)] for stage in range(STAGES)]
    arrived: dict[int, int] = {}
    while graph.num_tasks < tasks:
        for stage, (compute, tensor, bucket, send) in enumerate(lanes):
            preds = (arrived[stage],) if stage in arrived else ()
            for operator in range(OPERATORS):
                last = graph.add_task(
                    kind=COMPUTE,
                    streams=(compute,),
                    work_s=1e-4 * (1 + operator % 3),
                    preds=preds,
                )
                preds = ()
            meet = graph.add_task(
                kind=COMM, streams=(compute, tensor), latency_s=1e-5, work_s=5e-5, preds=(last,)
            )
            graph.add_task(
                kind=COMM,
                streams=(bucket,),
                latency_s=2e-5,
                work_s=2e-3,
                preds=(meet,),
                press=0.1,
                slowed=0.05,
                links=((stage, 1.0),),
            )
            if stage + 1 < STAGES:
                arrived[stage + 1] = graph.add_task(
                    kind=COMM,
                    streams=(send,),
                    latency_s=1e-5,
                    work_s=1e-4,
                    preds=(meet,),
                    press=0.02,
                    links=((stage, 0.5), (stage + 1, 0.5)),
                )
    return graph


def loop_turn_s() -> float:
    """Returns the time of one turn of the yardstick: read two lists, add, compare, store."""
    left, right = [0.5] * 1000, [0.25] * 1000
    total = [0.0] * 1000
    started = perf_counter()
    for turn in range(LOOP_TURNS):
        index = turn % 1000
        end = left[index] + right[index]
        if end > total[index]:
            total[index] = end
    return (perf_counter() - started) / LOOP_TURNS


def main() -> int:
    """Returns the exit status; prints one line per mode."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    graph = pipeline(tasks)
    status = 0
    for mode, budget in BUDGETS.items():
        best_s, turn_s = float("inf"), float("inf")
        for _ in range(3):  # the yardstick runs in turn with the engine: both meet the same noise
            turn_s = min(turn_s, loop_turn_s())
            started = perf_counter()
            play(graph, fluid=mode == "fluid")
            best_s = min(best_s, perf_counter() - started)
        ratio = best_s / graph.num_tasks / turn_s
        verdict = "ok" if ratio <= budget else "TOO SLOW"
        status |= ratio > budget
        print(
            f"{mode}: {graph.num_tasks} tasks in {best_s:.3f} s, {graph.num_tasks / best_s:,.0f} "
            f"tasks/s, {ratio:.1f} loop turns per task (budget {budget:.0f}): {verdict}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
