"""What a pair of NCCL ranks moves over TCP sockets: constants of [fabric.ethernet] for Volta.

    python studies/costs/socket_pairs.py

`published_pipelines.csv`: GPipe on AWS p3.2xlarge nodes (one V100, up to 10 Gb/s, throttled with
tc), from tables of the authors of decentralized_fm_v100: two models in fp32 and one in fp16 that
are not among its rows, its five single pipelines in fp16 (0001 to 0029), and four rows of
Megatron-LM on the same nodes, whose transfers nothing hides. The sends of the prototype overlap
computation, so a forward pass takes the longer of its computation and its
transfer: where the network is fast, what remains of the step is the rate of one pair of ranks.
Every candidate predicts all rows; its error is the mean over models of the mean |log error|. Other
constants are those shipped; e_pair is the rate over 10 Gb/s. Powers of 3 and more fit equally well:
3 is taken, which assumes the least of how well chunks of host and wire overlap.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from foretrain.cost.calibration import load
from foretrain.predict import predict
from foretrain.run.load import load_run

TABLE = Path(__file__).with_name("published_pipelines.csv")
RATES_GBS, POWERS = (0.18, 0.2, 0.21, 0.22, 0.23, 0.25, 0.28, 5.0), (2.0, 3.0, 6.0)
HALF = {
    **dict.fromkeys(("compute", "weight", "grad", "grad_reduce", "grad_accumulate"), "fp16"),
    **dict.fromkeys(("master", "moments"), "fp32"),
}


def megatron(row: Mapping[str, str]) -> dict[str, Any]:
    """Returns the run file of a row of Megatron-LM: eight pipelines."""
    hidden, heads, stages = int(row["hidden"]), int(row["heads"]), int(row["stages"])
    return {
        "model": {
            "family": "gpt", "layers": int(row["layers"]), "hidden": hidden, "heads": heads,
            "max_positions": 2048,
        },
        "training": {
            "sequence": 2048, "microbatch": 1, "global_batch": 8 * int(row["microbatches"]),
            "precision": row["precision"],
        },
        "plan": {"preset": "megatron", "pp": stages, "recompute": "full"},
        "cluster": cluster(row, 8 * stages),
        "stack": "megatron",
    }  # fmt: skip


def cluster(row: Mapping[str, str], nodes: int) -> str:
    """Returns the nodes of a row, with what tc adds to their latency."""
    return f"{nodes}x1 v100-sxm-16gb, 1x{row['gbit_s']}G ethernet [latency {row['latency_ms']}ms]"


def prototype(row: Mapping[str, str]) -> dict[str, Any]:
    """Returns the run file of a row of the prototype, as validation/mapping describes it."""
    hidden, heads, stages = int(row["hidden"]), int(row["heads"]), int(row["stages"])
    return {
        "model": {
            "family": "gpt", "layers": int(row["layers"]), "hidden": hidden, "heads": heads,
            "ffn": 4 * hidden, "vocab": 28996, "max_positions": 2048, "tied": False, "dropout": 0.0,
            "attention_dropout": 0.0, "activation": "relu", "causal": False,
            "head": "classification",
        },
        "training": {
            "sequence": 2048, "microbatch": 1, "global_batch": int(row["microbatches"]),
            "optimizer": "sgd", "precision": HALF if row["precision"] == "fp16" else "fp32",
        },
        "plan": {
            "preset": "ddp", "pp": stages, "schedule": "gpipe", "recompute": "full",
            "overlap": {"p2p": True},
        },
        "cluster": cluster(row, stages),
        "stack": "pytorch-eager",
    }  # fmt: skip


def step_s(row: Mapping[str, str]) -> float:
    """Returns the predicted step of a row; its attention is three kernels."""
    run = load_run(megatron(row) if row["software"] == "megatron" else prototype(row))
    return predict(replace(run, stack=replace(run.stack, attention="unfused"))).step_time_s.value


def errors(rows: list[dict[str, str]], rate_gbs: float, power: float) -> list[float]:
    """Returns log(predicted / measured) of every row with these constants."""
    fabric = load("network")["fabric"]["ethernet"]["generation"]["volta"]
    fabric.update({"e_pair": 0.0, "pair_gbs": rate_gbs, "p_pair": power})
    return [math.log(step_s(row) / float(row["step_s"])) for row in rows]


def by_model(rows: list[dict[str, str]], logs: list[float]) -> float:
    """Returns the mean over softwares, models and precisions of their mean |log error|."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, log in zip(rows, logs, strict=True):
        found[row["software"], row["model"], row["precision"]].append(abs(log))
    return mean(mean(values) for values in found.values())


def main() -> None:
    """Prints the error of every candidate, and the errors of the best by row."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {pair: errors(rows, *pair) for pair in product(RATES_GBS, POWERS)}
    best = min(found, key=lambda pair: by_model(rows, found[pair]))
    out = sys.stdout.write
    for (rate, power), logs in found.items():
        out(f"{rate:.2f} GB/s, p {power:.0f}: {by_model(rows, logs):.3f}\n")
    out(f"best: pair_gbs {best[0]}, p_pair {best[1]}, e_pair {best[0] / 1.25:.3f}\n")
    for row, log in zip(rows, found[best], strict=True):
        what = f"{row['software']} {row['model']} {row['precision']}"
        label = f"{what} {row['gbit_s']} Gb/s {row['latency_ms']} ms"
        out(f"  {label}: {100 * (math.exp(log) - 1):+.0f} %\n")


if __name__ == "__main__":
    main()
