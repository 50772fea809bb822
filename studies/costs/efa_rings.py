"""Latency of rings over EFA per rank: tau_ring_us of [fabric.efa] in network.toml.

    python studies/costs/efa_rings.py measured_runs.csv.gz

No table of gathers over EFA is published. The Ultra-Scale Playbook ran tensor parallelism over two
and four H100 nodes of AWS, where a layer waits for ten gathers and scatters per micro-batch
(studies/costs/nanotron_host.py):

    step / (micro-batches x layers) = work + 10 (S (N - 1) / N / B + alpha + tau_ring N)

alpha: that of small messages (alpha_us and alpha_doubling_us of [fabric.efa]), S: the bytes of the
activations, B: e_ring x 8 x 50 GB/s, work: the FLOP of the layer at WORK of the peak. Rows without
a pipeline, of up to 128 devices (of those with 512 some were checked, checked_collectives.py) with
micro-batches of 1 and 2 samples. The constant is the median of the rows of 1B and 3B; those of 8B
and 80B are not in the fit.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from math import log2
from pathlib import Path
from statistics import median

FITTED = ("Llama-like 1B", "Llama-like 3B")
COLLECTIVES, BANDWIDTH = 10, 0.78 * 400e9
PEAK, WORK = 989e12, 0.5
ALPHA_US, DOUBLING_US = 57.2, 49.0


def taus(row: dict[str, str]) -> float:
    """Returns tau in microseconds of one row."""
    ranks, layers = float(row["tp"]), float(row["n_layers"])
    tokens = float(row["mbs"]) * float(row["seq_len"])
    hidden, ffn = float(row["hidden"]), float(row["ffn"])
    flops = 6.0 * tokens * (4.0 * hidden**2 + 3.0 * hidden * ffn) / ranks
    layer_s = float(row["iter_time_s"]) / float(row["ga_steps"]) / layers - flops / PEAK / WORK
    moved = 2.0 * tokens * hidden * (ranks - 1.0) / ranks / BANDWIDTH
    alpha_us = ALPHA_US + DOUBLING_US * log2(ranks / 16.0)
    return (1e6 * (layer_s / COLLECTIVES - moved) - alpha_us) / ranks


def main(path: str) -> None:
    """Prints the constant of each model and number of ranks, and that of the fitted model."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with gzip.open(Path(path), "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["family"] != "ultrascale_playbook" or not row["iter_time_s"]:
                continue
            small = float(row["mbs"]) <= 2.0 and float(row["n_gpus"]) <= 128.0
            if small and float(row["pp"]) == 1.0 and float(row["tp"]) > 8.0:
                found[row["model"]][int(float(row["tp"]))].append(taus(row))
    out = sys.stdout.write
    for model, by in sorted(found.items()):
        text = ", ".join(f"{n} ranks {median(v):.0f} us ({len(v)})" for n, v in sorted(by.items()))
        out(f"{model}{'' if model in FITTED else ' (not fitted)'}: {text}\n")
    fitted = [value for model in FITTED for values in found[model].values() for value in values]
    out(f"tau_ring_us {median(fitted):.0f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
