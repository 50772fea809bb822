"""Fits gemm_fitted.toml and gemm_kernels.toml of catalog/calibration, and says how well.

    python studies/costs/gemm.py TABLES [--write] [--only PATTERN]

TABLES holds what op_tables.py writes. gemm_fitted.toml gets one entry per device and number format
for an unknown kernel, and a joint one for devices without a table; gemm_kernels.toml one per
kernel. Two thirds of
the (n, k) pairs take part in a fit; the errors printed are those of the other third (rule:
foretrain.validation.ops.classes.is_left_out, by CRC-32 of the pair). `band` is the 90th percentile
of the errors of the rows that took part, by size class.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from foretrain.cost.compute.gemm import alignment_loss, column_seconds
from foretrain.cost.machine import Machine
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack
from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.fitting import fit_constants

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "src/foretrain/catalog/calibration"
#: Constants, where a fit starts, the width of its prior, and bounds. The last one is for low
#: precision alone: elsewhere no cast precedes the product.
NAMES = (
    "e_c", "e_b", "t0_us", "k0", "c", "sigma_us", "beta", "q", "clock", "clock_ms", "cast_bytes",
)  # fmt: skip
START = (0.85, 0.80, 2.5, 120.0, 0.5, 2.0, 0.5, 0.7, 0.12, 1.0, 4.0)
WIDTH = (0.3, 0.3, 0.6, 0.6, 1.0, 0.7, 1.0, 0.5, 0.7, 1.5, 0.7)
LOW = (0.02, 0.05, 0.2, 1.0, 0.001, 0.01, 0.01, 0.01, 0.001, 0.01, 0.01)
HIGH = (1.1, 1.1, 200.0, 3000.0, 10.0, 60.0, 20.0, 1.0, 0.6, 300.0, 60.0)
#: A second start: hard waves of tiles that lose nothing by being small. The cost has two basins.
SECOND = {"q": 0.9, "c": 0.1}
LOW_PRECISION = ("fp8", "fp8_block", "nvfp4")
#: Widths of the prior where a table of 30 rows starts from the constants of other devices.
PROBE_WIDTH = (0.3, 0.2, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.7, 0.7, 0.7)
ROWS = 2000
SEED = 20240601
HALF = ("bf16", "fp16", "tf32")


@dataclass(frozen=True)
class Target:
    """Which devices an entry of a table's device holds for."""

    devices: tuple[str, ...]
    generations: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tiles: str = "basic"


TARGETS = {
    "a100-sxm-80gb": Target(("a100-sxm*", "a800-sxm*"), ("ampere",), ("sxm",)),
    "h100-sxm": Target(("h100-sxm*", "h200-sxm*", "gh200*", "h800*", "h20"), ("hopper",)),
    "b200-sxm": Target(("b200*",), ("blackwell",), ("sxm",), "fine"),
    "b300-sxm": Target(("b300*",), tiles="fine"),
    "gb200": Target(("gb200*", "gb300*"), tiles="fine"),
    "rtx-pro-6000": Target(("rtx-pro-6000*",), ("blackwell",), ("pcie",)),
    "mi300x": Target(("mi300x", "mi325x"), ("cdna3", "cdna4")),
    "v100-sxm-16gb": Target(("v100-sxm*",), ("volta",)),
    "v100-pcie-32gb": Target(("v100-pcie*",)),
    "a100-pcie-40gb": Target(("a100-*", "a800-*"), ("ampere",)),
    "t4": Target(("t4",), ("turing",)),
    "p4": Target(("p4",)),
    "p100-pcie-16gb": Target(("p100*",), ("pascal", "maxwell", "kepler")),
    "gtx-1080-ti": Target(("gtx-1080-ti", "titan-xp", "titan-x*")),
    "a40": Target(("a40",)),
}
SOURCES = {
    "aic_gemm": "NVIDIA aiconfigurator 0.12.0",
    "xla_gemm": "OpenXLA GemmPerfTable",
    "deepbench_gemm": "baidu-research/DeepBench",
    "neusight_gemm": "NeuSight",
    "vidur_gemm": "microsoft/vidur",
}
#: Where a table times calls one by one: rows below this are the host's time, not the kernel's.
HOST_US = 120.0
#: Kernels that a table runs with launches of its own in the time: no default is made of them.
ODD = ("torch_bmm", "cutlassfp8blockscaledmmkernel", "flashinferfp8blockscaledmmkernel")


class Rows:
    """Measured GEMMs of one device and number format as columns."""

    def __init__(self, frame: pd.DataFrame, device: str, dtype: str) -> None:
        self.frame, self.device, self.dtype = frame, device, dtype
        self.machine = Machine(
            device=find_device(device), stack=load_stack("pytorch-eager"), warm=False
        )
        self.columns = {x: frame[x].to_numpy(float) for x in "bmnk"}
        out = {"fp32": 4.0}.get(dtype, 2.0)
        self.columns["out_bytes"] = np.full(len(frame), out)
        self.columns["row"] = self.columns["k"]
        self.loss = alignment_loss(self.columns, dtype, dtype)
        self.measured = frame.latency_us.to_numpy(float) * 1e-6
        self.left_out = frame.left_out.to_numpy(bool)
        least = np.minimum(np.minimum(self.columns["m"], self.columns["n"]), self.columns["k"])
        self.classes = np.where(least >= 1024, 0, np.where(self.columns["m"] >= 128, 1, 2))

    def take(self, index: np.ndarray) -> Rows:
        """Returns some of the rows."""
        return Rows(self.frame.iloc[index], self.device, self.dtype)

    def model(self, values: np.ndarray, tiles: str) -> np.ndarray:
        """Returns the seconds of all rows."""
        constants = {**dict(zip(NAMES, values, strict=False)), "form": "tile", "tiles": tiles}
        times = column_seconds(self.columns, self.loss, self.dtype, self.machine, constants)
        return times.seconds

    def error(self, values: np.ndarray, tiles: str) -> np.ndarray:
        """Returns predicted / measured - 1 of all rows."""
        return self.model(values, tiles) / self.measured - 1.0

    def sample(self, rng: np.random.Generator, count: int = ROWS) -> Rows:
        """Returns rows that take part in fits, half of them from the largest 30 % by FLOP."""
        index = np.flatnonzero(~self.left_out)
        work = np.prod([self.columns[x][index] for x in "bmnk"], axis=0)
        large = index[work >= np.quantile(work, 0.7)]
        half = count // 2
        first = rng.choice(large, min(half, len(large)), replace=False)
        second = rng.choice(index, min(half, len(index)), replace=False)
        return self.take(np.concatenate([first, second]))


def fit_rows(
    parts: list[Rows],
    tiles: str,
    start: tuple[float, ...] = START,
    width: tuple[float, ...] = WIDTH,
) -> np.ndarray:
    """Returns the constants that fit rows of one or several devices together."""
    measured = np.concatenate([part.measured for part in parts])
    count = len(NAMES) if parts[0].dtype in LOW_PRECISION else len(NAMES) - 1

    def model(values: np.ndarray) -> np.ndarray:
        return np.concatenate([part.model(values, tiles) for part in parts])

    begin = np.array(start[:count])
    other = np.array([SECOND.get(name, value) for name, value in zip(NAMES, begin, strict=False)])
    fits = [
        fit_constants(
            model,
            measured,
            first,
            np.array(width[:count]),
            low=np.array(LOW[:count]),
            high=np.array(HIGH[:count]),
        )
        for first in ((begin, other) if len(measured) > 100 else (begin,))
    ]
    return min(fits, key=lambda values: float(np.abs(np.log(model(values) / measured)).mean()))


def read(tables: Path) -> pd.DataFrame:
    """Returns all GEMM tables below each other, with the rows that are left out marked."""
    frames = []
    for name in SOURCES:
        path = tables / f"{name}.parquet"
        if path.exists():
            frames.append(pd.read_parquet(path).assign(table=name))
    frame = pd.concat(frames, ignore_index=True)
    frame = frame[frame.device.isin(TARGETS) & (frame.latency_us > 0)]
    frame = frame[~frame.launch_included | (frame.latency_us > HOST_US)]
    # XLA's table of B200 comes from older software, a quarter slower than the others
    frame = frame[(frame.table != "xla_gemm") | (frame.device == "mi300x")]
    pairs = frame[["n", "k"]].drop_duplicates()
    pairs["left_out"] = [
        is_left_out(shape_key("gemm", {"n": n, "k": k}))
        for n, k in zip(pairs.n, pairs.k, strict=True)
    ]
    return frame.merge(pairs, on=["n", "k"])


def band(rows: Rows, values: np.ndarray, tiles: str) -> list[float]:
    """Returns the 90th percentile of the errors of the rows that took part, by class."""
    error = np.abs(np.log1p(rows.error(values, tiles)))
    used = ~rows.left_out
    result: list[float] = []
    for which in range(3):
        chosen = error[used & (rows.classes == which)]
        result.append(
            round(float(np.exp(np.quantile(chosen, 0.9))), 3) if len(chosen) > 20 else 0.0
        )
    known = [value for value in result if value]
    return [value or max(known) for value in result]


def report(name: str, rows: Rows, values: np.ndarray, tiles: str) -> str:
    """Returns a line of left-out errors, and prints it."""
    error = np.abs(rows.error(values, tiles))
    out = rows.left_out if rows.left_out.sum() > 10 else np.ones(len(error), bool)
    parts = [f"all {100 * error[out].mean():.1f} %"]
    for which, word in enumerate(("m, n, k >= 1024", "m >= 128", "m < 128")):
        chosen = error[out & (rows.classes == which)]
        if len(chosen):
            parts.append(f"{word} {100 * chosen.mean():.1f} %")
    text = ", ".join(parts)
    sys.stdout.write(f"{name:64s} {out.sum():6d} rows left out: {text}\n")
    sys.stdout.flush()
    return text


def entry(
    target: Target,
    dtypes: tuple[str, ...],
    values: np.ndarray,
    source: str,
    *,
    bands: list[float] | None,
    kernel: str = "",
    mark: str = "fitted",
) -> str:
    """Returns the TOML text of one entry."""

    def words(values: tuple[str, ...]) -> str:
        return "[" + ", ".join(f'"{value}"' for value in values) + "]"

    lines = ["[[entry]]"]
    if target.devices:
        lines.append(f"devices = {words(target.devices)}")
    if target.generations and not kernel:
        lines.append(f"generations = {words(target.generations)}")
        if target.forms:
            lines.append(f"forms = {words(target.forms)}")
    lines.append(f"dtypes = {words(dtypes)}")
    if kernel:
        lines.append(f"kernels = {words((kernel,))}")
    lines += ['form = "tile"', f'tiles = "{target.tiles}"']
    lines += [
        f"{name} = {float(f'{value:.4g}')}" for name, value in zip(NAMES, values, strict=False)
    ]
    if bands:
        lines.append(f"band = {bands}")
    lines += [f'mark = "{mark}"', f'source = "{source}"', ""]
    return "\n".join(lines)


def dtypes_of(dtype: str, device: str) -> tuple[str, ...]:
    """Returns the dtypes that an entry fitted on `dtype` holds for."""
    if device == "mi300x" and dtype == "bf16":
        return ("bf16", "tf32")
    if dtype == "bf16" or (dtype == "fp16" and device != "mi300x"):
        return HALF
    return ("fp8", "mxfp8") if dtype == "fp8" else (dtype,)


def main(tables: Path, *, write: bool, only: str) -> None:
    """Fits every entry, prints its left-out error, and writes the file when asked."""
    frame = read(tables)
    rng = np.random.default_rng(SEED)
    usual: list[str] = []
    kernels: list[str] = []
    samples: dict[str, Rows] = {}
    for (device, dtype), group in frame.groupby(["device", "dtype"], sort=True):
        if not fnmatchcase(f"{device}/{dtype}", only):
            continue
        target = TARGETS[device]
        source = ", ".join(SOURCES[name] for name in sorted(set(group.table)))
        values = START
        stacks = sorted(set(group["stack"]))
        if not (dtype == "fp16" and device == "a100-sxm-80gb"):  # there bf16 stands for both
            common = group[~group["stack"].str.lower().isin(ODD)]
            rows = Rows(common if len(common) else group, device, dtype)
            sample = rows.sample(rng)
            values = fit_rows([sample], target.tiles)
            errors = report(f"{device} {dtype} any kernel", rows, values, target.tiles)
            text = f"{source}; left out: {errors}"
            bands = band(rows, values, target.tiles)
            usual.append(entry(target, dtypes_of(dtype, device), values, text, bands=bands))
            if dtype == "bf16":
                samples[device] = sample
            if device == "a100-sxm-80gb":
                usual.append(a100_pcie(values))
            if len(stacks) == 1:
                continue
        for stack in stacks:
            rows = Rows(group[group["stack"] == stack], device, dtype)
            own = fit_rows([rows.sample(rng)], target.tiles, start=tuple(values))
            errors = report(f"{device} {dtype} {stack}", rows, own, target.tiles)
            text = f"{source}; left out: {errors}"
            bands = band(rows, own, target.tiles)
            dtypes = dtypes_of(dtype, device)
            kernels.append(entry(target, dtypes, own, text, bands=bands, kernel=stack.lower()))
    if only == "*":
        usual += families(frame, samples, rng)
    if write:
        save("gemm_fitted", "for an unknown kernel", usual)
        save("gemm_kernels", "of named kernels (`gemm_kernel` of a stack)", kernels)


def a100_pcie(values: np.ndarray) -> str:
    """Returns the entry of the PCIe card: best-shape search gives .81 of the peak against .87."""
    card = values * np.array([0.93 if name == "e_c" else 1.0 for name in NAMES[: len(values)]])
    source = (
        "A100-SXM fit, e_c less 7 %: .81 of the peak against .87 (achievable matmul FLOPS tables)"
    )
    return entry(Target(("a100-pcie*",)), HALF, card, source, bands=None)


def save(name: str, what: str, entries: list[str]) -> None:
    """Writes a file of the calibration."""
    head = (
        f"# GEMM constants {what}, fitted to tables of measured kernels. Written by\n"
        "# studies/costs/gemm.py: change that script, not this file. Keys: see gemm.toml.\n\n"
    )
    (OUT / f"{name}.toml").write_text(head + "\n".join(entries), encoding="utf-8")


#: Devices whose constants stand in for each other: a family is left out as a whole.
FAMILIES = {
    "a100-sxm-80gb": "ampere", "h100-sxm": "hopper", "b200-sxm": "blackwell",
    "b300-sxm": "blackwell", "gb200": "blackwell", "rtx-pro-6000": "blackwell gddr",
}  # fmt: skip


def families(frame: pd.DataFrame, samples: dict[str, Rows], rng: np.random.Generator) -> list[str]:
    """Leaves out device families, then adds 30 probe rows; returns the joint entry of all."""
    nvidia = {name: rows for name, rows in samples.items() if name in FAMILIES}
    everything = fit_rows(
        [r.take(np.arange(0, len(r.measured), 3)) for r in nvidia.values()], "basic"
    )
    for name, family in FAMILIES.items():
        if name not in nvidia:
            continue
        rest = [
            rows.take(np.arange(0, len(rows.measured), 3))
            for other, rows in nvidia.items()
            if FAMILIES[other] != family
        ]
        tiles = "basic"
        values = fit_rows(rest, tiles)
        rows = Rows(frame[(frame.device == name) & (frame.dtype == "bf16")], name, "bf16")
        report(f"{name} bf16, its family left out", rows, values, tiles)
        used = np.flatnonzero(~rows.left_out)
        big = used[rows.classes[used] == 0]
        wide = used[rows.columns["m"][used] >= 64]
        errors: list[float] = []
        for _ in range(8):
            probes = np.concatenate(
                [rng.choice(wide, 20, replace=False), rng.choice(big, 10, replace=False)]
            )
            own = fit_rows([rows.take(probes)], tiles, start=tuple(values), width=PROBE_WIDTH)
            error = np.abs(rows.error(own, tiles))
            errors.append(float(error[rows.left_out & (rows.classes == 0)].mean()))
        text = ", ".join(f"{100 * error:.1f}" for error in sorted(errors))
        sys.stdout.write(f"{name} bf16, after 30 probes, big shapes, 8 draws: {text} %\n")
    target = Target((), ("*",))
    source = (
        "joint fit of A100, H100, B200, B300, GB200, RTX PRO 6000 (NVIDIA aiconfigurator 0.12.0)"
    )
    return [entry(target, HALF, everything, source, bands=None, mark="guess")]


if __name__ == "__main__":
    words = sys.argv[1:]
    pattern = words[words.index("--only") + 1] if "--only" in words else "*"
    main(Path(words[0]), write="--write" in words, only=pattern)
