"""Speed of foretrain against its budgets; exit code 1 when one is exceeded.

Two figures, each also as a ratio to a fixed workload of the same run, so that a slow or busy
machine can be told from slow code:

- a warm prediction of Llama-3-70B on 64 GPUs through the public API (load_run + predict), median,
  against a loop of plain Python (`reference_workload`);
- `foretrain --help`, best of several, against `python -c pass`.
"""

from __future__ import annotations

import heapq
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import foretrain

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "examples" / "llama3-70b-64xh100.yaml"

PREDICT_BUDGET_S = 0.150
HELP_BUDGET_S = 0.300
PREDICT_REPEATS = 15
HELP_REPEATS = 10


def reference_workload() -> int:
    """Returns a checksum of 60,000 heap operations: what the engine mostly does, in plain Python.

    It is fixed for ever, so that ratios of different versions can be compared.
    """
    heap: list[tuple[float, int]] = []
    state, done = 1, 0
    for i in range(30_000):
        state = (1103515245 * state + 12345) % 2**31
        heapq.heappush(heap, (state / 2**31, i))
    while heap:
        done = (31 * done + heapq.heappop(heap)[1]) % 1_000_003
    return done


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Returns the wall time of each of `repeats` calls, after one call that does not count."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def command(*words: str) -> Callable[[], object]:
    """Returns a call that runs a command to its end and fails when it fails."""
    return lambda: subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def main() -> int:
    """Returns 0 when both figures are within their budgets, else 1."""
    predict = statistics.median(
        seconds(lambda: foretrain.predict(foretrain.load_run(RUN)), PREDICT_REPEATS)
    )
    reference = statistics.median(seconds(reference_workload, PREDICT_REPEATS))
    executable = str(Path(sys.executable).with_name("foretrain"))
    shown = min(seconds(command(executable, "--help"), HELP_REPEATS))
    bare = min(seconds(command(sys.executable, "-c", "pass"), HELP_REPEATS))

    rows = [
        ("warm prediction, Llama-3-70B on 64 GPUs (median)", predict, PREDICT_BUDGET_S, reference),
        ("foretrain --help (best)", shown, HELP_BUDGET_S, bare),
    ]
    print(f"{'':50}{'time':>10}{'budget':>10}{'reference':>11}{'ratio':>8}")
    for name, value, budget, base in rows:
        over = "" if value <= budget else "  over budget"
        print(
            f"{name:50}{1e3 * value:>7.1f} ms{1e3 * budget:>7.0f} ms"
            f"{1e3 * base:>8.1f} ms{value / base:>8.2f}{over}"
        )
    return int(any(value > budget for _, value, budget, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
