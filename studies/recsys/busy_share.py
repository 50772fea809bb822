"""How much of a step one V100 is busy with DLRM: predicted against measured. Nothing is fitted.

python studies/recsys/busy_share.py gpu_active_fraction_single_gpu.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import mean

from foretrain.predict import predict
from foretrain.run.load import load_run

#: DLRM_MLPerf on one device has fewer rows; lookups are one each, so the rows hardly matter.
MODELS = {
    "DLRM_default": "dlrm-default",
    "DLRM_MLPerf": "dlrm-criteo-small",
    "DLRM_DDP": "dlrm-ddp",
}


def main(path: str) -> None:
    """Prints one line per run and the mean difference in points."""
    gaps: list[float] = []
    for row in csv.DictReader(Path(path).read_text().splitlines()):
        if row["model"] not in MODELS:
            continue
        run = load_run(
            {
                "model": MODELS[row["model"]],
                "training": {
                    "global_batch": int(row["batch_size"]), "precision": "fp32",
                    "optimizer": "sgd", "lookups": "uniform",
                },
                "cluster": "1x1 v100-sxm-16gb",
                "stack": "pytorch-dlrm",
            }
        )  # fmt: skip
        result = predict(run)
        parts = result.time_parts
        share = (parts.compute + parts.optimizer) / result.step_time_s.value
        measured = float(row["gpu_active_fraction"])
        gaps.append(abs(share - measured))
        sys.stdout.write(
            f"{row['model']:13} {row['batch_size']:>5}  measured {measured:.2f}"
            f"  predicted {share:.2f}"
            f"  step {result.step_time_s.value * 1e3:.2f} ms\n"
        )
    sys.stdout.write(f"mean difference {100 * mean(gaps):.0f} points\n")


if __name__ == "__main__":
    main(sys.argv[1])
