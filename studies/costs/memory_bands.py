"""Prints the 90 % intervals of kernels that move data, by size: `[table]` of intervals.toml.

    python studies/costs/memory_bands.py TABLES

TABLES holds what op_tables_more.py writes. The rows are those of kernels timed without their
launch, of shapes that take part in fits; those of left-out shapes say how much the intervals cover.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from foretrain.cost.compute import memory_bound
from foretrain.cost.model import provider
from foretrain.validation.ops.predict import kernel_class
from foretrain.validation.ops.validate import validate_ops

NAMES = ("vidur_vector", "llmservingsim", "small_kernels", "cudnn_norms", "liger")


def main(tables: Path) -> None:
    """Prints one line per size."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in NAMES:
        for part in ("fitted", "left-out"):
            for result in validate_ops(tables / f"{name}.parquet", part=part):
                memory = provider(result.outcome.op) is memory_bound.price
                if memory and result.ratio is not None:
                    size = kernel_class(result.outcome)
                    found[size, part].append(abs(float(np.log(result.ratio))))
    for size in ("small", "cached", "large"):
        wide = float(np.quantile(found[size, "fitted"], 0.9))
        inside = float(np.mean(np.array(found[size, "left-out"]) <= wide))
        sys.stdout.write(
            f"memory_{size} = {np.exp(wide):.2f}: {len(found[size, 'fitted'])} rows; of "
            f"{len(found[size, 'left-out'])} left out {inside:.0%} inside\n"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
