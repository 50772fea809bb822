"""Host time of checked collectives by ranks: check_base_us, check_near_us, check_far_us.

    python studies/costs/checked_collectives.py measured_runs.csv.gz

With TORCH_DISTRIBUTED_DEBUG=DETAIL every collective waits for a monitored barrier over sockets, in
which the first rank hears and answers the others one by one, and for two gathers of what each is
about to do (pytorch, torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp, runCollectiveChecks).
The time does not depend on the size of the collective. Pipelines of the Ultra-Scale Playbook over
several nodes ran so (docs/explain/costs.md). With small micro-batches they wait for the host:

    step / (micro-batches + stages - 1)
        = layers of the fullest stage x (host time of a layer + 10 collectives x check)

Rows with ZeRO-1 on up to 256 devices: of the others many stood still for half a second at every
stage boundary and micro-batch. Micro-batches of 1 and 2 samples (1 for two ranks: the device is
slower than the host with more), medians over the rows. The constants are fitted on the models of 1B
and 3B and shown on those of 8B and 80B. Ranks on other nodes: from groups of 16; those of 32 take a
third longer than the line.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from foretrain.frontends.spec import ModelSpec
from foretrain.strategy.stages import stages_by_cost

Row = dict[str, str]
COLLECTIVES = 10  # of a layer (nanotron_host.py)
LAYER_MS = 4.1  # host time of a layer without checks (nanotron_host.py)
FITTED = ("Llama-like 1B", "Llama-like 3B")
NODE = 8
LARGEST = 2


def rows(path: str) -> list[Row]:
    """Returns the timed rows of the playbook with pipelines and tensor parallelism over nodes."""
    with gzip.open(Path(path), "rt", encoding="utf-8", newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["family"] == "ultrascale_playbook"
            and row["iter_time_s"]
            and min(float(row["pp"]), float(row["tp"])) > 1.0
            and float(row["n_gpus"]) > NODE
            and row["zero_stage"].startswith("1")
            and float(row["n_gpus"]) <= 256.0
            and float(row["mbs"]) <= LARGEST
        ]


def fullest(row: Row) -> int:
    """Returns the layers of the stage that has most."""
    spec = ModelSpec(
        name=row["model"],
        family="llama",
        max_positions=None,
        layers=int(float(row["n_layers"])),
        hidden=int(float(row["hidden"])),
        heads=int(float(row["heads"])),
        kv_heads=int(float(row["kv_heads"])),
        head_dim=int(float(row["head_dim"])),
        ffn=int(float(row["ffn"])),
        vocab=int(float(row["vocab"])),
        gated=True,
    )
    return max(stages_by_cost(spec, int(float(row["pp"]))))


def checks(found: list[Row]) -> dict[str, dict[int, float]]:
    """Returns the microseconds of a check by model and ranks: medians over rows."""
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        ranks, slots = int(float(row["tp"])), float(row["ga_steps"]) + float(row["pp"]) - 1.0
        if ranks * float(row["mbs"]) <= 2.0 or ranks > 2:
            layer_ms = 1e3 * float(row["iter_time_s"]) / slots / fullest(row)
            values[row["model"]][ranks].append(1e3 * (layer_ms - LAYER_MS) / COLLECTIVES)
    return {m: {n: median(v) for n, v in sorted(by.items())} for m, by in sorted(values.items())}


def main(path: str) -> None:
    """Prints checks by model and ranks, and the constants of the fitted models."""
    found = checks(rows(path))
    out = sys.stdout.write
    for model, by in found.items():
        out(f"{model}: " + ", ".join(f"{n} ranks {us:.0f} us" for n, us in by.items()) + "\n")
    mean = {
        n: median([found[model][n] for model in FITTED if n in found[model]])
        for n in (2, 4, 8, 16, 32)
    }
    near = median([(mean[8] - mean[2]) / 6, (mean[4] - mean[2]) / 2, (mean[8] - mean[4]) / 4])
    base = median([mean[n] - near * (n - 1) for n in (2, 4, 8)])
    far = (mean[16] - base - near * (NODE - 1)) / (16 - NODE)
    out(f"check_base_us {base:.0f}\ncheck_near_us {near:.0f}\ncheck_far_us {far:.0f}\n")
    for model, by in found.items():
        line = (
            (n, (base + near * (min(n, NODE) - 1) + far * max(0, n - NODE)) / us - 1.0)
            for n, us in by.items()
        )
        apart = "" if model in FITTED else " (not fitted)"
        out(f"{model}{apart}: " + ", ".join(f"{n}: {100 * e:+.0f} %" for n, e in line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
