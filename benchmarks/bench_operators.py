"""Speed of the cost model: 10,000 different operators, priced as columns, against a budget.

    PYTHONPATH=src python benchmarks/bench_operators.py

Processor time, best of several, so that other work on the machine does not count. The ratio
divides by the time of a fixed numpy workload of the same run. Exit status 1 above the budget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time

import numpy as np

from foretrain.cost.operators import Operators, time
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack

COUNT = 10_000
BUDGET_S = 0.020
REPEATS = 15


def gemms(rng: np.random.Generator) -> Operators:
    """Returns GEMMs of different shapes, from one row to vocabulary projections."""
    m, n, k = (np.round(2.0 ** rng.uniform(0.0, 16.0, COUNT)) for _ in range(3))
    return Operators(op="gemm", dtype="bf16", shape={"m": m, "n": 64 * np.ceil(n / 64), "k": k})


def experts(rng: np.random.Generator) -> Operators:
    """Returns grouped GEMMs of different sizes."""
    tokens = np.round(2.0 ** rng.uniform(7.0, 16.0, COUNT))
    hidden, ffn = (256.0 * rng.integers(4, 60, COUNT) for _ in range(2))
    shape = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": 64.0, "topk": 6.0}
    return Operators(op="moe_gemm", dtype="bf16", shape=shape)


def numpy_workload() -> float:
    """Returns a checksum; the yardstick."""
    grid = np.arange(1.0, 1_000_001.0)
    return float(np.sqrt(grid * 1.5 + np.ceil(grid / 7.0)).sum())


def best(work: Callable[[], object]) -> float:
    """Returns the least processor time of a call."""
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        started = process_time()
        work()
        times.append(process_time() - started)
    return min(times)


def main() -> int:
    """Returns the exit status; prints one line per kind and device."""
    rng = np.random.default_rng(1)
    stack = load_stack("megatron-te")
    yardstick = best(numpy_workload)
    status = 0
    for ops in (gemms(rng), experts(rng)):
        for name in ("a100-sxm-80gb", "h100-sxm", "b200-sxm"):
            device = find_device(name)
            taken = best(lambda ops=ops, device=device: time(ops, device, stack))
            over = taken > BUDGET_S
            status |= over
            limit = f"budget {1e3 * BUDGET_S:.0f} ms"
            print(
                f"{COUNT:,} different {ops.op} on {name}: {1e3 * taken:.1f} ms ({limit}), "
                f"{taken / yardstick:.1f} yardsticks{': TOO SLOW' if over else ''}"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
