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
import zlib
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
from gemm_targets import (
    BASE,
    FAMILIES,
    HALF,
    HOST_BOUND,
    LOW_PRECISION,
    ODD,
    PRIORS,
    RULES,
    SECOND,
    SOURCES,
    TARGETS,
    UNITS,
    Target,
)  # fmt: skip

from foretrain.cost.compute.gemm import alignment_loss, column_seconds
from foretrain.cost.machine import Machine
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack
from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.fitting import fit_constants

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "src/foretrain/catalog/calibration"
ROWS = 1200
SEED = 20240601


#: The host's time for a call in the stack that prices such tables (pytorch-eager).
CALL_US = 20.0
#: Where a table times calls one by one: rows below this are the host's time, not the kernel's.
HOST_US = 120.0
#: Floor of a kernel where a table's floor is that of the call: the launch is priced apart.
KERNEL_US = 3.0
Values = dict[str, float]


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
        # a call that is timed alone is the host's launch and the kernel, one after the other
        called = frame.launch_included.to_numpy(bool)
        self.measured = (frame.latency_us.to_numpy(float) - called * CALL_US) * 1e-6
        units = UNITS.get((device, dtype))
        self.units = {"units": units} if units else {}
        self.left_out = frame.left_out.to_numpy(bool)
        least = np.minimum(np.minimum(self.columns["m"], self.columns["n"]), self.columns["k"])
        self.classes = np.where(least >= 1024, 0, np.where(self.columns["m"] >= 128, 1, 2))

    def take(self, index: np.ndarray) -> Rows:
        """Returns some of the rows."""
        return Rows(self.frame.iloc[index], self.device, self.dtype)

    def model(self, values: Values, tiles: str) -> np.ndarray:
        """Returns the seconds of all rows."""
        constants = {**values, "form": "tile", "tiles": tiles, **self.units}
        times = column_seconds(self.columns, self.loss, self.dtype, self.machine, constants)
        return times.seconds

    def error(self, values: Values, tiles: str) -> np.ndarray:
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


def names_of(dtype: str, kernel: str, tiles: str) -> tuple[str, ...]:
    """Returns the constants that a fit of `kernel` ("" for any) has."""
    names = BASE
    if dtype in LOW_PRECISION:
        names += ("cast_bytes",)
        if kernel:
            names += ("row_ns",)
    if tiles in RULES.values():
        names += ("ragged",)
    if kernel in HOST_BOUND:
        names += ("host_us", "host_odd_us")
    return names


def fit_rows(parts: list[Rows], tiles: str, *, kernel: str = "") -> Values:
    """Returns the constants that fit rows of one or several devices together."""
    measured = np.concatenate([part.measured for part in parts])
    names = names_of(parts[0].dtype, kernel, tiles)

    def model(values: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, values, strict=True))
        return np.concatenate([part.model(constants, tiles) for part in parts])

    usual = {name: PRIORS[name][0] for name in names}
    if "host_us" in usual:  # the least time of a call is the host's
        usual |= {"host_us": 1e6 * float(np.quantile(measured, 0.1)), "t0_us": 6.0}
    begins = [usual, {**usual, **SECOND}]
    low, high = (np.array([PRIORS[name][i] for name in names]) for i in (2, 3))
    width = np.array([PRIORS[name][1] for name in names])
    fits = [
        fit_constants(model, measured, np.array(list(begin.values())), width, low=low, high=high)
        for begin in begins
    ]
    big = np.concatenate([part.classes == 0 for part in parts])

    def cost(values: np.ndarray) -> float:
        error = np.abs(np.log(model(values) / measured))
        return float(error.mean() + (error[big].mean() if big.any() else 0.0))

    return dict(zip(names, min(fits, key=cost).tolist(), strict=True))


def best_fit(rows: Rows, choices: tuple[str, ...], *, kernel: str = "") -> tuple[Values, str]:
    """Returns the constants and the tiles that fit best."""
    fits = [(fit_rows([rows], tiles, kernel=kernel), tiles) for tiles in dict.fromkeys(choices)]
    return min(fits, key=lambda fit: float(np.abs(np.log1p(rows.error(*fit))).mean()))


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


def band(rows: Rows, values: Values, tiles: str) -> list[float]:
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


def report(name: str, rows: Rows, values: Values, tiles: str) -> str:
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
    values: Values,
    source: str,
    *,
    bands: list[float] | None,
    kernel: str = "",
    tiles: str = "",
    units: str = "",
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
    lines += ['form = "tile"', f'tiles = "{tiles or target.tiles}"']
    if units:
        lines.append(f'units = "{units}"')
    lines += [f"{name} = {float(f'{value:.4g}')}" for name, value in values.items()]
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
    usual: list[str] = []
    kernels: list[str] = []
    samples: dict[str, Rows] = {}
    for (device, dtype), group in frame.groupby(["device", "dtype"], sort=True):
        if not fnmatchcase(f"{device}/{dtype}", only):
            continue
        rng = np.random.default_rng([SEED, zlib.crc32(f"{device}/{dtype}".encode())])
        called, units = bool(group.launch_included.any()), (device, dtype) in UNITS
        # bf16 stands for both on A100
        if not (units or (dtype == "fp16" and device == "a100-sxm-80gb")):
            texts, sample = fit_any(group, device, dtype, rng)
            usual += texts
            if dtype == "bf16":
                samples[device] = sample
            if group["stack"].nunique() == 1 and not called:
                continue
        for stack, part in group.groupby("stack", sort=True):
            kernels.append(fit_kernel(part, device, dtype, str(stack), rng))
    if only == "*":
        usual.append(joint(samples))
    if write:
        save("gemm_fitted", "for an unknown kernel", usual)
        save("gemm_kernels", "of named kernels (`gemm_kernel` of a stack)", kernels)


def fit_any(
    group: pd.DataFrame, device: str, dtype: str, rng: np.random.Generator
) -> tuple[list[str], Rows]:
    """Returns the entries of an unknown kernel, and the rows that they were fitted to."""
    target = TARGETS[device]
    common = group[~group["stack"].str.lower().isin(ODD)]
    rows = Rows(common if len(common) else group, device, dtype)
    sample = rows.sample(rng)
    values = fit_rows([sample], target.tiles)
    text = f"{sources(group)}; left out: "
    text += report(f"{device} {dtype} any kernel", rows, values, target.tiles)
    bands = band(rows, values, target.tiles)
    if group.launch_included.any():
        text += f"; t0_us: of a kernel, the table's calls {values['t0_us']:.0f}"
        values = {**values, "t0_us": KERNEL_US}
    texts = [entry(target, dtypes_of(dtype, device), values, text, bands=bands)]
    if device == "a100-sxm-80gb":
        texts.append(a100_pcie(values))
    return texts, sample


def fit_kernel(
    group: pd.DataFrame, device: str, dtype: str, stack: str, rng: np.random.Generator
) -> str:
    """Returns the entry of a named kernel."""
    target, kernel = TARGETS[device], stack.lower()
    rows = Rows(group, device, dtype)
    choices = RULES.get((device, kernel), target.tiles), "basic"
    own, tiles = best_fit(rows.sample(rng), choices[: 2 if dtype == "nvfp4" else 1], kernel=kernel)
    text = f"{sources(group)}; left out: {report(f'{device} {dtype} {stack}', rows, own, tiles)}"
    return entry(
        target,
        dtypes_of(dtype, device),
        own,
        text,
        bands=band(rows, own, tiles),
        kernel=kernel,
        tiles=tiles,
        units=UNITS.get((device, dtype), ""),
    )


def sources(group: pd.DataFrame) -> str:
    """Returns the publications that rows come from."""
    return ", ".join(SOURCES[name] for name in sorted(set(group.table)))


def a100_pcie(values: Values) -> str:
    """Returns the entry of the PCIe card: best-shape search gives .81 of the peak against .87."""
    card = {**values, "e_c": 0.93 * values["e_c"]}
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


def joint(samples: dict[str, Rows]) -> str:
    """Returns the entry of devices without a table: one fit of all families."""
    values = joint_values([rows for name, rows in samples.items() if name in FAMILIES])
    source = (
        "joint fit of A100, H100, B200, B300, GB200, RTX PRO 6000 (NVIDIA aiconfigurator 0.12.0)"
    )
    return entry(Target((), ("*",)), HALF, values, source, bands=None, mark="guess")


def joint_values(parts: list[Rows]) -> Values:
    """Returns the constants that fit several devices together, to every third row of each."""
    return fit_rows([rows.take(np.arange(0, len(rows.measured), 3)) for rows in parts], "basic")


if __name__ == "__main__":
    words = sys.argv[1:]
    pattern = words[words.index("--only") + 1] if "--only" in words else "*"
    main(Path(words[0]), write="--write" in words, only=pattern)
