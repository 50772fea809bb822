"""Fits residuals.json and residuals.npz of catalog/calibration, and says what they gain.

    python studies/costs/residuals.py DATA TABLES [--write] [--only PATTERN]

DATA is the folder of measurements, TABLES holds what op_tables.py writes. Runs after the scripts
that fit the formulas (gemm.py, moe.py, attention.py, convolution.py): a residual belongs to the
constants of one entry. The rows that are left out are those of these scripts; of the others every
fifth of the shapes is left out in turn, to decide whether trees are worth it and for the bands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import attention as attention_study
import convolution as convolution_study
import gemm as gemm_study
import moe as moe_study
import numpy as np
import pandas as pd
from gemm_targets import ODD
from least_squares import held_out
from residual_trees import LEAST_SHAPES, WORTH, WORTH_ANY, Shipped, Table, fit, save

from foretrain.cost.compute import attention, convolution, gemm, moe
from foretrain.cost.compute.convolution_kernels import Images
from foretrain.cost.compute.features import (
    attention_features,
    convolution_features,
    expert_features,
    gemm_features,
)
from foretrain.cost.machine import Machine
from foretrain.cost.residual import key_of
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack

#: Numbers of heads that a head_dim with a table of its own must show.
FEW_HEADS = 3
#: A call of more times its host's time shows its kernel.
SEEN = 1.3
AIC = "NVIDIA aiconfigurator 0.12.0"
#: Sizes of a convolution that bound where its residual acts.
SIZES = ("n", "c", "h", "k", "r", "s", "stride", "groups")


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
        features=gemm_features(rows.columns, machine.device.sm_count)[:, known],
        predicted=seconds[known],
        measured=rows.measured[known],
        shape=(frame.n.astype(str) + "x" + frame.k.astype(str)).to_numpy(str)[known],
        left_out=rows.left_out[known],
        classes=rows.classes[known],
        sizes={name: rows.columns[name][known] for name in "bmnk"} | {"loss": rows.loss[known]},
        worth=WORTH if kernel else WORTH_ANY,
    )


def expert_tables(tables: Path) -> Iterator[Table]:
    """Yields grouped GEMMs of every kernel of every device."""
    frame = moe_study.read(tables)
    for (device, dtype, kernel), part in frame.groupby(["device", "dtype", "stack"], sort=True):
        stack = replace(load_stack("pytorch-eager"), gemm_kernel=str(kernel))
        machine = Machine(device=find_device(device), stack=stack, warm=False)
        found = moe.constants_for(machine, dtype)
        if found.row not in ("measured", "fitted") or "kernels" not in found.values:
            continue
        columns = moe.columns_of(part.to_dict("records"))
        names = ("tokens", "hidden", "ffn", "experts", "topk", "ep", "tp", "distribution")
        half = dtype == "bf16"
        yield Table(
            name=f"moe {device} {dtype} {kernel}",
            family="moe",
            key=key_of(found.values),
            sms=machine.device.sm_count,
            dtypes=("bf16", "fp16") if half else tuple(found.values["dtypes"]),
            source=AIC,
            features=expert_features(columns, machine.device.sm_count),
            predicted=moe.column_seconds(columns, dtype, machine, found.values),
            measured=part.latency_us.to_numpy(float) * 1e-6,
            shape=(part.hidden.astype(str) + "x" + part.ffn.astype(str)).to_numpy(str),
            left_out=part.left_out.to_numpy(bool),
            classes=np.where(columns["tokens"] >= moe.MANY, 0, 1),
            sizes={name: columns[name] for name in names},
        )


def attention_tables(data: Path) -> Iterator[Table]:
    """Yields attention of every kernel, case and device, and cuDNN's of GB200."""
    every = attention_study.tables(data)
    for system, (device, *_) in attention_study.SYSTEMS.items():
        here = every[every.system == system]
        for source, vit, kernel in attention_study.KERNELS:
            rows = here[here["stack"] == np.where(here.case == "full", vit, source)]
            for case, dtype in attention_study.CASES:
                part = rows[(rows.case == case) & (rows.dtype == dtype)]
                if len(part) >= attention_study.LEAST:
                    yield from attention_case(part, device, kernel, dtype)


def attention_case(rows: pd.DataFrame, device: str, kernel: str, dtype: str) -> Iterator[Table]:
    """Yields the tables of one case: of all head dims together, and of those with their own."""
    stack = replace(load_stack("pytorch-eager"), attention_kernel=kernel)
    machine = Machine(device=find_device(device), stack=stack, warm=False)
    parts = attention.column_times(attention_study.shapes(rows), dtype, "forward", machine)
    tables: dict[str, list[np.ndarray]] = {}
    for part in parts:
        tables.setdefault(part.kernel.measured, []).append(part.where)
    for where in tables.values():
        own = rows.iloc[np.sort(np.concatenate(where))]
        yield from attention_table(own, machine, kernel, dtype)


def attention_table(
    rows: pd.DataFrame, machine: Machine, kernel: str, dtype: str
) -> Iterator[Table]:
    """Yields the rows of one table where its case has constants of its own."""
    shape = attention_study.shapes(rows)
    parts = attention.column_times(shape, dtype, "forward", machine)
    found, case = parts[0].kernel.found, parts[0].kernel.measured
    if found.row not in ("measured", "fitted") or parts[0].kernel.name != kernel:
        return
    if any(part.kernel.ratio != 1.0 or not part.kernel.own for part in parts):
        return
    predicted = np.empty(len(rows))
    for part in parts:
        predicted[part.where] = part.seconds / part.beyond
    names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v", "window")
    yield Table(
        name=f"attention {machine.device.name} {kernel} {case}",
        family="attention",
        key=key_of(found.values),
        case=case,
        sms=machine.device.sm_count,
        dtypes=("bf16", "fp16") if dtype == "bf16" else ("fp8",),
        source=AIC,
        features=attention_features(shape, machine.device.sm_count),
        predicted=predicted,
        measured=rows.latency_ms.to_numpy(float) * 1e-3,
        shape=rows["key"].to_numpy(str),
        left_out=held_out(rows["key"].tolist()),
        classes=1 - (np.minimum(shape["seq_q"], shape["seq_kv"]) >= attention.LONG),
        sizes={name: shape[name] for name in names},
        least_shapes=FEW_HEADS if "heads" in parts[0].kernel.constants else LEAST_SHAPES,
        apart="head_dim",
    )


def convolution_tables(data: Path) -> Iterator[Table]:
    """Yields convolutions of every target, all directions together."""
    rows = pd.concat([convolution_study.deepbench(data), convolution_study.neusight(data)])
    rows["key"] = [f"{c:g}_{k:g}_{h:g}" for c, k, h in zip(rows.c, rows.k, rows.h, strict=True)]
    for _, _, kernels, kind, (gpu, device) in convolution_study.TARGETS:
        here = rows[(rows.gpu == gpu) & (rows.kind == kind)]
        yield from convolution_table(here, device, kind, kernels[0] if kernels else "")


def convolution_table(rows: pd.DataFrame, device: str, kind: str, kernel: str) -> Iterator[Table]:
    """Yields the convolutions of one device, kind of units and library."""
    stack = replace(load_stack("pytorch-eager"), gemm_kernel=kernel.replace("*", ""))
    machine = Machine(device=find_device(device), stack=stack, warm=False)
    dtype = "fp32" if kind == "fp32" else "fp16"
    found, _ = convolution.constants_for(machine, dtype)
    parts: list[dict[str, np.ndarray]] = []
    for way, part in rows.groupby("way", sort=True):
        arrays = {name: part[name].to_numpy(float) for name in convolution_study.SIDES}
        images = Images(**arrays, groups=np.ones(len(part)))
        times = convolution.column_times(images, dtype, str(way), machine)
        seconds = times.seconds / times.beyond
        measured, host = part.ms.to_numpy(float) * 1e-3, np.zeros(len(part))
        if part.launch.any():  # the host first, then the kernel
            host = convolution_study.called_us(part.gpu.map(lambda _: device), part["at"])
            host = 1e-6 * host.to_numpy(float)
        parts.append({
            "features": convolution_features(images, str(way), machine.device.sm_count).T,
            "predicted": seconds, "measured": measured - host,
            "known": measured > SEEN * host,
            "shape": part.key.to_numpy(str), "big": images.flops > convolution.BIG,
            **{f"size {n}": getattr(images, n) for n in SIZES},
        })  # fmt: skip
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known = columns["known"]
    columns = {name: column[known] for name, column in columns.items()}
    yield Table(
        name=f"conv {device} {kind} {kernel or 'cuDNN'}",
        family="conv",
        key=key_of(found.values),
        sms=machine.device.sm_count,
        dtypes=("fp32",) if kind == "fp32" else ("fp16", "bf16"),
        source="NeuSight" if kernel else "baidu-research/DeepBench",
        features=columns["features"].T,
        predicted=columns["predicted"],
        measured=columns["measured"],
        shape=columns["shape"],
        left_out=held_out(columns["shape"].tolist()),
        classes=np.where(columns["big"], 0, 1),
        sizes={n.removeprefix("size "): c for n, c in columns.items() if n.startswith("size ")},
    )


def main(data: Path, tables: Path, *, write: bool, only: str) -> None:
    """Fits the residual of every table, and writes those that are worth it when asked."""
    shipped: list[Shipped] = []
    keys: set[tuple[str, str]] = set()
    every = (
        gemm_tables(tables), expert_tables(tables), attention_tables(data), convolution_tables(data)
    )  # fmt: skip
    for table in chain(*every):
        if not fnmatchcase(table.name, only) or (table.key, table.case) in keys:
            continue
        keys.add((table.key, table.case))
        found = fit(table)
        shipped += [found] if found else []
    if write:
        save(shipped)


if __name__ == "__main__":
    words = sys.argv[1:]
    pattern = words[words.index("--only") + 1] if "--only" in words else "*"
    main(Path(words[0]), Path(words[1]), write="--write" in words, only=pattern)
