"""Prints how much wider intervals of attention are for fewer heads than any that were fitted.

    python studies/costs/attention_reach.py DATA

Causal kernels of head_dim 128: constants are fitted to rows of MANY heads and more, and predict all
that take part. The 90 % error of rows of fewer heads, over that of MANY and more, by how often the
heads were halved, is the mean over kernels (`width_per_halving` of attention.toml is the slope of
a line through 1, the figures of every number of halvings alike). Rows that are left out of the fits
of attention.py are left out here too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from attention import KERNELS, SYSTEMS, Fitter, shapes, tables
from least_squares import held_out

from foretrain.hardware import find_device

MANY, LEAST_ROWS, LEAST_FEW = 32, 150, 100


def kernels(data: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the rows of every kernel with how often their heads are halved, and their errors."""
    every = tables(data)
    every = every[(every.case == "causal") & (every.dtype == "bf16")]
    every = every[(every.head_dim == 128) & (every.head_dim_v == 128)]
    every = every[~held_out(every["key"].tolist())]
    for system, (device, *_) in SYSTEMS.items():
        for source, _, kernel in KERNELS:
            rows = every[(every.system == system) & (every["stack"] == source)]
            many = rows[rows.heads >= MANY]
            if len(many) < LEAST_ROWS or len(rows) - len(many) < LEAST_FEW:
                continue
            fitter = Fitter(find_device(device), 1.0)
            seconds = fitter.plain(shapes(rows), fitter.fit(many, {}))
            error = np.abs(np.log(seconds / (rows.latency_ms.to_numpy(float) * 1e-3)))
            halved = np.ceil(np.log2(np.maximum(MANY / rows.heads, 1.0)))
            yield f"{device} {kernel}", rows.assign(error=error, halved=halved)


def main(data: Path) -> None:
    """Prints 90 % errors of every kernel over those of many heads, their means and the slope."""
    found: dict[str, pd.Series] = {}
    for name, rows in kernels(data):
        sizes = rows.groupby("halved").error.quantile(0.9)
        found[name] = sizes / sizes.loc[0.0]
        words = ", ".join(f"{h:.0f}: {size:.2f}" for h, size in found[name].items())
        sys.stdout.write(f"{name:32s} {words}\n")
    mean = pd.DataFrame(found).mean(axis=1)
    sys.stdout.write("mean: " + ", ".join(f"{h:.0f}: {size:.2f}" for h, size in mean.items()))
    far = mean.index.to_numpy(float)
    slope = float((far * (mean.to_numpy() - 1.0)).sum() / (far**2).sum())
    sys.stdout.write(f"\nwidth_per_halving = {slope:.2f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
