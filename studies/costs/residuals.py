"""Fits residuals.toml and residuals.npz of catalog/calibration, and says what they gain.

    python studies/costs/residuals.py TABLES [--write] [--only PATTERN]

TABLES holds what op_tables.py and op_tables_more.py write. Runs after the scripts that fit the
formulas (gemm.py, moe.py, attention.py, convolution.py): a residual belongs to the constants of one
entry. The rows that are left out are those of these scripts; of the others every fifth of the
shapes is left out in turn, to decide whether trees are worth it and for the bands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import gemm as gemm_study
import numpy as np
import pandas as pd
from gemm_targets import ODD
from residual_trees import Shipped, Table, fit, save

from foretrain.cost.compute import gemm
from foretrain.cost.compute.features import gemm_features
from foretrain.cost.residual import key_of


def gemm_tables(tables: Path) -> Iterator[Table]:
    """Yields GEMMs: of every named kernel, and of all kernels of a device together."""
    frame = gemm_study.read(tables)
    for (device, dtype), group in frame.groupby(["device", "dtype"], sort=True):
        common = group[~group["stack"].str.lower().isin(ODD)]
        yield from gemm_table(common, device, dtype, "")
        for stack, part in group.groupby("stack", sort=True):
            yield from gemm_table(part, device, dtype, str(stack))


def gemm_table(frame: pd.DataFrame, device: str, dtype: str, kernel: str) -> Iterator[Table]:
    """Yields the GEMMs of a device, dtype and kernel ("" for any) where it has an entry."""
    if not len(frame):
        return
    rows = gemm_study.Rows(frame, device, dtype)
    stack = replace(rows.machine.stack, gemm_kernel=kernel)
    machine = replace(rows.machine, stack=stack)
    found = gemm.constants_for(machine, dtype)
    own = found.row in ("measured", "fitted") and bool(kernel) == ("kernels" in found.values)
    known = rows.measured > 0
    if not own or not known.any():
        return
    seconds = gemm.column_seconds(rows.columns, rows.loss, dtype, machine, found.values).seconds
    half = dtype in ("bf16", "fp16")
    yield Table(
        name=f"gemm {device} {dtype} {kernel or 'any kernel'}",
        family="gemm",
        key=key_of(found.values),
        sms=machine.device.sm_count,
        dtypes=tuple(d for d in found.values["dtypes"] if not half or d in ("bf16", "fp16")),
        source=gemm_study.sources(frame),
        features=gemm_features(rows.columns, seconds, machine.device.sm_count)[:, known],
        predicted=seconds[known],
        measured=rows.measured[known],
        shape=(frame.n.astype(str) + "x" + frame.k.astype(str)).to_numpy(str)[known],
        left_out=rows.left_out[known],
        classes=rows.classes[known],
        sizes={name: rows.columns[name][known] for name in "bmnk"},
        extra={"aligned": bool((rows.loss[known] == 1.0).all())},
    )


def main(tables: Path, *, write: bool, only: str) -> None:
    """Fits the residual of every table, and writes those that are worth it when asked."""
    shipped: list[Shipped] = []
    keys: set[str] = set()
    for table in gemm_tables(tables):
        if not fnmatchcase(table.name, only) or table.key in keys:
            continue
        keys.add(table.key)
        found = fit(table)
        shipped += [found] if found else []
    if write:
        save(shipped)


if __name__ == "__main__":
    words = sys.argv[1:]
    pattern = words[words.index("--only") + 1] if "--only" in words else "*"
    main(Path(words[0]), write="--write" in words, only=pattern)
