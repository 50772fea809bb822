"""Prints the signed error of the network model by system and message size.

Usage: python studies/costs/collectives.py FILE, a CSV with the columns of `validate network`:
id, cluster (the cluster grammar), gpus, collective, bytes, dtype, time_us.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.program import CommEvent
from foretrain.run.stacks import load_stack

BINS = ((65536, "< 64 KiB"), (2**20, "< 1 MiB"), (2**25, "< 32 MiB"), (2**60, ">= 32 MiB"))


def main(path: Path) -> None:
    """Prints one line per cluster, group size and collective."""
    errors: dict[tuple[str, int, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    stack = load_stack("megatron-te")
    models = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            text, gpus = row["cluster"], int(row["gpus"])
            if text not in models:
                models[text] = build_cost_model(parse_cluster(text), stack)
            model = models[text]
            step = max(1, model.cluster.world_size // gpus)
            event = CommEvent(
                collective=row["collective"],
                bytes=float(row["bytes"]),
                dtype=row["dtype"],
                ranks=tuple(range(0, gpus * step, step)),
            )
            error = model.price([event]).value_s[0] / (float(row["time_us"]) * 1e-6) - 1
            size = next(name for limit, name in BINS if event.bytes < limit)
            errors[text, gpus, event.collective][size].append(float(error))
    for key, bins in sorted(errors.items()):
        parts = [f"{name} {median(bins[name]):+.0%}" for _, name in BINS if name in bins]
        sys.stdout.write(f"{key[0]} x{key[1]} {key[2]} | {', '.join(parts)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
