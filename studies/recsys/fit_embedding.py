"""Fits constants of embedding bags to measured kernels.

    python studies/recsys/fit_embedding.py kernel_rows_00_batch_size_num_embeddings.csv

Forward: the penalties of narrow rows (up to 32 and up to 64 columns of fp32) that give the smallest
mean squared log error over the forward rows. Penalties below 1 (rows that stayed in L2 between
runs) are read as 1. Backward: the median share of the DRAM bandwidth. The
printed values, rounded, stand in src/foretrain/catalog/calibration/embedding.toml.
"""

from __future__ import annotations

import csv
import sys
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from statistics import median

from foretrain.cost.calibration import load
from foretrain.cost.compute.embedding_bag import price_under
from foretrain.cost.compute.memory_bound import constants_for
from foretrain.cost.machine import Machine
from foretrain.hardware import find_device
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack

PENALTIES = [1.0 + 0.05 * i for i in range(15)]


def events(path: Path) -> list[tuple[ComputeEvent, float]]:
    """Returns every row as an event with its measured microseconds."""
    found: list[tuple[ComputeEvent, float]] = []
    for row in csv.DictReader(path.read_text().splitlines()):
        columns = {"batch": "batch_size", "tables": "num_tables", "rows": "num_embeddings",
                   "dim": "embedding_dim", "pooling": "bag_size"}  # fmt: skip
        shape = tuple((name, float(row[column])) for name, column in columns.items())
        direction = "forward" if "forward" in row["kernel_name"] else "backward"
        event = ComputeEvent(op="embedding_bag", direction=direction, dtype="fp32", shape=shape,
                             flops=0.0, bytes=0.0)  # fmt: skip
        found.append((event, float(row["kernel_runtime"])))
    return found


def main(path: str) -> None:
    """Prints the constants and the errors with them."""
    machine = Machine(
        device=find_device("v100-sxm-16gb"), stack=load_stack("pytorch-dlrm"), warm=False
    )
    rules = {k: v for k, v in load("embedding")["rules"].items() if isinstance(v, float)}
    rows = events(Path(path))
    forward = [row for row in rows if row[0].direction == "forward"]
    backward = [row for row in rows if row[0].direction != "forward"]

    memory = constants_for(machine)

    def errors(some: list[tuple[ComputeEvent, float]], changes: dict[str, float]) -> list[float]:
        answers = price_under([event for event, _ in some], machine, rules | changes, memory)
        return [
            log(answer.value_s * 1e6 / measured)
            for answer, (_, measured) in zip(answers, some, strict=True)
        ]

    choices = [
        {"narrow_penalty": narrow, "medium_penalty": medium}
        for narrow, medium in product(PENALTIES, PENALTIES)
    ]
    best = min(choices, key=lambda change: sum(e * e for e in errors(forward, change)))
    share = rules["backward_share"] * exp(median(errors(backward, best)))
    best["backward_share"] = share
    out = sys.stdout.write
    for name, value in best.items():
        out(f"{name} = {value:.2f}\n")
    for name, some in (("forward", forward), ("backward", backward)):
        found = errors(some, best)
        rms = exp(sqrt(sum(e * e for e in found) / len(found))) - 1.0
        out(f"{name}: {len(found)} rows, root mean square error {rms:.1%}\n")


if __name__ == "__main__":
    main(sys.argv[1])
