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


def attentions(rng: np.random.Generator) -> Operators:
    """Returns attention of different sizes, masks and head dims."""
    shape = {
        "batch": rng.integers(1, 65, COUNT), "seq_q": 64 * rng.integers(2, 500, COUNT),
        "heads": 8 * rng.integers(1, 17, COUNT), "kv_heads": 8.0,
        "head_dim": rng.choice([64, 80, 96, 128, 192, 256], COUNT),
        "causal": rng.integers(0, 2, COUNT), "window": 1024 * rng.integers(0, 2, COUNT),
    }  # fmt: skip
    return Operators(op="attention", dtype="bf16", shape=shape)


def norms(rng: np.random.Generator) -> Operators:
    """Returns norms of different sizes."""
    rows, cols = np.round(2.0 ** rng.uniform(7.0, 16.0, COUNT)), 64 * rng.integers(4, 200, COUNT)
    shape = {"rows": rows, "cols": cols}
    return Operators(op="layernorm", dtype="bf16", shape=shape, bytes=4.0 * rows * cols)


def convolutions(rng: np.random.Generator) -> Operators:
    """Returns convolutions of different sizes."""
    taps, side = rng.choice([1, 3, 5, 7], COUNT), rng.integers(7, 225, COUNT)
    shape = {
        "n": rng.integers(1, 257, COUNT), "c": 8 * rng.integers(1, 129, COUNT), "h": side,
        "w": side, "k": 8 * rng.integers(1, 129, COUNT), "r": taps, "s": taps,
        "stride": rng.integers(1, 3, COUNT), "padding": taps // 2,
    }  # fmt: skip
    return Operators(op="conv2d", dtype="fp16", shape=shape)


def weight_gradients(rng: np.random.Generator) -> Operators:
    """Returns weight gradients of convolutions, some with channels that fill no tensor core."""
    shape = dict(convolutions(rng).shape)
    shape["c"] = rng.integers(1, 1025, COUNT)
    return Operators(op="conv2d", dtype="bf16", shape=shape, direction="backward_weight")


def elementwise(rng: np.random.Generator) -> Operators:
    """Returns activation functions of different sizes."""
    return Operators(op="gelu", dtype="bf16", shape={}, bytes=2.0 ** rng.uniform(10.0, 32.0, COUNT))


def updates(rng: np.random.Generator) -> Operators:
    """Returns optimizer steps over different numbers of parameters."""
    params = np.round(2.0 ** rng.uniform(10.0, 32.0, COUNT))
    return Operators(
        op="adamw", dtype="fp32", shape={"params": params}, direction="optimizer", bytes=30 * params
    )


def bags(rng: np.random.Generator) -> Operators:
    """Returns embedding bags of different sizes."""
    shape = {
        "rows": np.round(2.0 ** rng.uniform(10.0, 28.0, COUNT)),
        "dim": 16 * rng.integers(1, 17, COUNT), "batch": 2.0 ** rng.integers(6, 16, COUNT),
        "pooling": rng.integers(1, 101, COUNT),
    }  # fmt: skip
    return Operators(op="embedding_bag", dtype="fp32", shape=shape)


def popular_bags(rng: np.random.Generator) -> Operators:
    """Returns embedding bags of a few hundred kinds, read by Zipf popularity."""
    plain = bags(rng)
    some = rng.integers(0, 300, COUNT)
    shape = {name: np.asarray(column)[some] for name, column in plain.shape.items()}
    return Operators(op="embedding_bag", dtype="fp32", shape={**shape, "zipf": 1.05})


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
    makers = (
        gemms, experts, attentions, norms, elementwise, updates, convolutions, weight_gradients,
        bags, popular_bags,
    )  # fmt: skip
    for make in makers:
        ops = make(rng)
        for name in ("a100-sxm-80gb", "h100-sxm", "b200-sxm"):
            device = find_device(name)
            taken = best(lambda ops=ops, device=device: time(ops, device, stack))
            over = taken > BUDGET_S
            status |= over
            print(
                f"{COUNT:,} different {make.__name__} on {name}: {1e3 * taken:.1f} ms (budget "
                f"{1e3 * BUDGET_S:.0f} ms), {taken / yardstick:.1f} yardsticks"
                f"{': TOO SLOW' if over else ''}"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
