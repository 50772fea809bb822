"""Fits catalog/calibration/moe_fitted.toml from tables of fused experts, and says how well.

    python studies/costs/moe.py TABLES [--write] [--only PATTERN]

TABLES holds aic_moe.parquet as op_tables.py writes it. One entry per device, number format and
kernel; the CUTLASS kernel (grouped GEMMs as training runs them) is also the entry of an unknown
one. Shapes are left out whole, by hidden size and expert width; `band` is the 90th percentile of
the errors of the rows that took part, each by a fit to the other half of their shapes, for many
tokens and for few.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
from gemm_targets import HALF, TARGETS, Target
from least_squares import folds

from foretrain.cost.compute.moe import MANY, column_seconds, columns_of
from foretrain.cost.machine import Machine
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack
from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.fitting import fit_constants

OUT = Path(__file__).resolve().parents[2] / "src/foretrain/catalog/calibration"
NAMES = (
    "e_c", "e_b", "t0_us", "k0", "c", "q", "clock", "row_bytes", "token_bytes", "expert_us",
    "input_bytes",
)  # fmt: skip
START = (0.7, 0.75, 12.0, 150.0, 0.5, 0.5, 0.12, 8.0, 4.0, 0.05, 0.5)
WIDTH = (0.4, 0.4, 0.7, 0.7, 1.0, 0.7, 0.7, 1.0, 1.0, 1.0, 1.0)
LOW = (0.02, 0.05, 0.5, 1.0, 0.01, 0.05, 0.001, 0.05, 0.01, 0.0001, 0.01)
HIGH = (1.1, 1.1, 1000.0, 4000.0, 10.0, 1.0, 0.6, 200.0, 200.0, 20.0, 400.0)
#: The kernel that stands for an unknown one, by what its name contains, first match.
USUAL = ("moe_torch_flow_cutlass", "moe_torch_flow", "deepgemm", "sglang_fused_moe_triton")
ROWS, LEAST, SEED = 1200, 60, 20240601
#: Parts of the shapes that take part which are left out in turn for the bands.
FOLDS = 2


def read(tables: Path) -> pd.DataFrame:
    """Returns the table of experts, with the rows that are left out marked."""
    frame = pd.read_parquet(tables / "aic_moe.parquet")
    frame = frame[frame.device.isin(TARGETS)]
    keys = frame[["hidden", "ffn"]].drop_duplicates()
    keys["left_out"] = [
        is_left_out(shape_key("moe_gemm", row._asdict())) for row in keys.itertuples(index=False)
    ]
    frame = frame.merge(keys, on=["hidden", "ffn"])
    power = frame.distribution.str.extract(r"power_law_([\d.]+)")[0].astype(float).fillna(0.0)
    return frame.assign(distribution=power, permute=1.0)


def main(tables: Path, *, write: bool, only: str) -> None:
    """Fits every device, format and kernel with enough rows."""
    frame = read(tables)
    rng = np.random.default_rng(SEED)
    named: list[str] = []
    usual: list[str] = []
    for (device, dtype), group in frame.groupby(["device", "dtype"], sort=True):
        if not fnmatchcase(f"{device}/{dtype}", only):
            continue
        counts = group["stack"].value_counts()
        kernels = [name for name in sorted(counts.index) if counts[name] >= LEAST]
        default = next(name for name in USUAL if any(k.startswith(name) for k in kernels))
        newest = {kernel.partition("@")[0]: kernel for kernel in kernels}  # in order of versions
        for kernel in kernels:
            text = fit_kernel(group[group["stack"] == kernel], device, dtype, kernel, rng)
            bare = kernel.partition("@")[0]
            names = dict.fromkeys([kernel, *([bare] if newest[bare] == kernel else [])])
            words = ", ".join(f'"{name.lower()}"' for name in names)
            named.append(text.replace("\n", f"\nkernels = [{words}]\n", 1))
            if kernel == newest.get(default):
                usual.append(text)
    if write:
        head = (
            "# Constants of grouped GEMMs fitted to tables of fused experts. Written by\n"
            "# studies/costs/moe.py: change that script, not this file. Keys: see moe.toml.\n\n"
        )
        (OUT / "moe_fitted.toml").write_text(head + "\n".join(named + usual), encoding="utf-8")


class Kernel:
    """The rows of one kernel."""

    def __init__(self, frame: pd.DataFrame, device: str, dtype: str) -> None:
        stack = load_stack("pytorch-eager")
        self.machine = Machine(device=find_device(device), stack=stack, warm=False)
        self.dtype = dtype
        self.measured = frame.latency_us.to_numpy(float) * 1e-6
        self.columns = columns_of(frame.to_dict("records"))
        self.shape = (frame.hidden.astype(str) + "x" + frame.ffn.astype(str)).to_numpy(str)
        self.left_out = frame.left_out.to_numpy(bool)
        self.many = self.columns["tokens"] >= MANY

    def model(self, values: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Returns predicted seconds of some rows."""
        columns = {name: column[index] for name, column in self.columns.items()}
        constants = dict(zip(NAMES, values, strict=True))
        return column_seconds(columns, self.dtype, self.machine, constants)

    def fit(self, index: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns the constants that fit some of the rows."""
        index = rng.choice(index, min(ROWS, len(index)), replace=False)
        start, width, low, high = (np.array(part) for part in (START, WIDTH, LOW, HIGH))
        return fit_constants(
            lambda x: self.model(x, index), self.measured[index], start, width, low=low, high=high
        )

    def bands(self) -> list[float]:
        """Returns the 90 % factors of many tokens and of few, of shapes left out in turn."""
        used = np.flatnonzero(~self.left_out)
        fold = folds(self.shape[used], FOLDS)
        errors = np.zeros(len(used))
        for which in np.unique(fold):
            here = fold == which
            rest = used if here.all() else used[~here]  # a single shape
            values = self.fit(rest, np.random.default_rng(SEED))
            errors[here] = self.model(values, used[here]) / self.measured[used[here]] - 1.0
        size = np.abs(np.log1p(errors))
        every = [size[self.many[used]], size[~self.many[used]]]
        return [
            round(float(np.exp(np.quantile(part if len(part) > 20 else size, 0.9))), 3)
            for part in every
        ]


def fit_kernel(
    frame: pd.DataFrame, device: str, dtype: str, kernel: str, rng: np.random.Generator
) -> str:
    """Returns the entry of one kernel, and prints its errors."""
    rows = Kernel(frame, device, dtype)
    values = rows.fit(np.flatnonzero(~rows.left_out), rng)
    error = np.abs(rows.model(values, np.arange(len(frame))) / rows.measured - 1.0)
    left_out = rows.left_out
    out = error[left_out] if left_out.sum() > 10 else error
    big = error[left_out & rows.many]
    text = f"all {100 * out.mean():.1f} %, median {100 * np.median(out):.1f} %"
    text += f", tokens >= 1024 {100 * big.mean():.1f} %" if len(big) else ""
    sys.stdout.write(f"{device} {dtype} {kernel}: {left_out.sum()} rows left out: {text}\n")
    sys.stdout.flush()
    return entry(TARGETS[device], dtype, values, rows.bands(), text)


def entry(target: Target, dtype: str, values: np.ndarray, bands: list[float], text: str) -> str:
    """Returns the TOML text of an entry."""
    dtypes = HALF if dtype == "bf16" else ("fp8", "mxfp8") if dtype == "fp8" else (dtype,)
    lists = {"devices": target.devices, "generations": target.generations, "dtypes": dtypes}
    if target.forms:
        lists["forms"] = target.forms
    lines = ["[[entry]]"]
    lines += [f"{key} = {list(words)}".replace("'", '"') for key, words in lists.items() if words]
    lines += [
        f"{name} = {float(f'{value:.4g}')}" for name, value in zip(NAMES, values, strict=True)
    ]
    source = f"NVIDIA aiconfigurator 0.12.0; left out: {text}"
    lines += [f"band = {bands}", 'mark = "fitted"', f'source = "{source}"', ""]
    return "\n".join(lines)


if __name__ == "__main__":
    words = sys.argv[1:]
    pattern = words[words.index("--only") + 1] if "--only" in words else "*"
    main(Path(words[0]), write="--write" in words, only=pattern)
