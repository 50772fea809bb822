"""Fits the convolution constants to the measured tables and writes convolution_fitted.toml.

    python studies/costs/convolution.py DATA [--write]

DATA is the folder with ops/deepbench_conv.parquet (fp32 and fp16 with tensor cores; forward, data
and weight gradient) and ops/neusight_conv2d_fp32.parquet (PyTorch, 3x3, forward; every call
contains a launch, which is fitted beside and belongs to the host). One in three shapes (channels,
filters and height) is left out; the error printed is that of those rows. About a minute.

The calls of NeuSight's collection take longer one after the other: what small ones last at the
least grows with the number of the row, on all four devices, and by no size of the shape (it adds to
the kernel; an allocator or a cache of algorithms that fills up, say). So the host's time in a row
is fitted as `call_us` + `slower_us` x (rows before it / rows of the device); op_tables_more.py
writes it as `host_us`, from those two constants of convolution_fitted.toml. Where a table says
nothing, the mean of the collection stands for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from least_squares import fit, held_out

from foretrain.cost.compute.convolution import Kernels, constants_for, conv_seconds
from foretrain.cost.compute.convolution_kernels import Images
from foretrain.cost.compute.gemm_tiles import Rates
from foretrain.cost.machine import Machine
from foretrain.hardware import find_device
from foretrain.run.stacks import load_stack

FITTED = Path(__file__).parents[2] / "src/foretrain/catalog/calibration/convolution_fitted.toml"
SIDES = ("n", "c", "h", "w", "k", "r", "s", "stride", "oh", "ow")
#: Patterns, generations, kernels, kind, table -> device of it. DeepBench lets cuDNN measure its
#: algorithms and takes the fastest (as `cudnn.benchmark` does); PyTorch's default is a heuristic,
#: and its table has 3x3 filters only, so that it says little of the direct algorithm.
TARGETS = (
    (["v100*"], ["volta"], [], "fp32", ("NV_V100", "v100-sxm-16gb")),
    (["v100*"], ["volta"], ["deepbench"], "tensor", ("NV_V100", "v100-sxm-16gb")),
    (["t4"], ["turing"], [], "fp32", ("NV_T4", "t4")),
    (["t4"], ["turing"], ["deepbench"], "tensor", ("NV_T4", "t4")),
    (["gtx-1080-ti", "titan-x*"], ["pascal", "maxwell", "kepler"], [], "fp32",
     ("NV_1080Ti", "gtx-1080-ti")),
    (["v100*"], [], ["torch*"], "fp32", ("Tesla V100-PCIE-32GB", "v100-pcie-32gb")),
    (["t4"], [], ["torch*"], "fp32", ("Tesla T4", "t4")),
    (["p100*"], [], ["torch*"], "fp32", ("Tesla P100-PCIE-16GB", "p100-pcie-16gb")),
    (["p4"], [], ["torch*"], "fp32", ("Tesla P4", "p4")),
)  # fmt: skip
MOST = 500
NAMES = ("e_c", "k0", "c", "q", "sigma_us", "e_b", "t0_us", "input", "weight", "fused",
         "non_fused", "transform", "stride_power", "narrow")  # fmt: skip
STARTS = (
    (0.8, 50.0, 0.3, 0.5, 5.0, 0.7, 5.0, 1.1, 1.1, 1.6, 0.7, 0.7, 1.0, 0.15),
    (0.9, 100.0, 1.0, 0.2, 10.0, 0.7, 3.0, 1.1, 0.9, 1.6, 0.7, 0.7, 1.0, 0.1),
    (0.7, 60.0, 0.6, 0.2, 8.0, 0.9, 11.0, 1.2, 1.2, 1.3, 0.8, 0.8, 1.3, 0.2),
)
LOW = (0.2, 1.0, 0.02, 0.02, 0.1, 0.3, 1.0, 0.8, 0.8, 1.0, 0.2, 0.3, 0.2, 0.01)
HIGH = (1.1, 2000.0, 4.0, 1.0, 60.0, 1.0, 25.0, 2.5, 2.5, 2.25, 1.1, 1.0, 2.0, 1.0)
#: Where the host's two constants start.
HOST = (60.0, 300.0)
FIXED = {"form": "tile", "tiles": "basic", "beta": 0.4, "clock": 0.0, "clock_ms": 1.0}
#: Of the tensor-core kernels of cuDNN 7 (DeepBench): sizes by which they fill up what they run
#: through, tiles, and filters that they do not take. Chosen by errors of shapes left out in turn of
#: those that take part: V100 28 -> 16 %, T4 23 -> 18 %.
TENSOR = {"narrow": 0.0, "piece": 32.0, "weight_piece": 64.0, "most_taps": 64.0,
          "input_tiles": "cudnn7-input"}  # fmt: skip
#: Where strided gradients skip pixels: on T4 the median error rises by four points with it.
OWN = {"v100-sxm-16gb": {"phases": True}, "t4": {"weight_tiles": "cudnn7-weight"}}
#: DeepBench's conv_bench.cu fills channels up to 8 itself and asks for one algorithm per direction
#: where it uses tensor cores (baidu-research/DeepBench 0cb389f): no other kernel can win.
FORCED = {"forced": True}


def fixed(kind: str, device: str) -> dict:
    """Returns the constants that are not fitted."""
    return FIXED if kind == "fp32" else FIXED | TENSOR | OWN[device]


def deepbench(data: Path) -> pd.DataFrame:
    """Returns DeepBench's rows in our names: S is the width of a filter there, R its height."""
    rows = pd.read_parquet(data / "ops/deepbench_conv.parquet").astype({"gpu": str, "sheet": str})
    rows = rows.rename(
        columns={"N": "n", "C": "c", "K": "k", "R": "r", "S": "s", "H": "h", "W": "w"}
    )
    rows["oh"] = (rows.h + 2 * rows.pad_h - rows.r) // rows.stride_h + 1
    rows["ow"] = (rows.w + 2 * rows.pad_w - rows.s) // rows.stride_w + 1
    rows = rows.assign(
        stride=rows.stride_h, launch=0.0, at=0.0,
        kind=np.where(rows.sheet.str.contains("Mixed"), "tensor", "fp32"),
    )  # fmt: skip
    ways = {
        "fwd_ms": "forward",
        "bwd_data_ms": "backward_input",
        "bwd_weight_ms": "backward_weight",
    }
    return pd.concat([rows.assign(ms=rows[c], way=way) for c, way in ways.items()]).query("ms > 0")


def neusight(data: Path) -> pd.DataFrame:
    """Returns NeuSight's rows in our names."""
    rows = pd.read_parquet(data / "ops/neusight_conv2d_fp32.parquet").astype({"gpu": str})
    rows = rows.rename(
        columns={"B": "n", "Input_Channel": "c", "Output_Channel": "k", "Input_Size": "h",
                 "Kernel_Size": "r", "Stride": "stride", "latency_ms": "ms"}
    )  # fmt: skip
    size = (rows.h + 2 * rows.Padding - rows.r) // rows.stride + 1
    return rows.assign(
        w=rows.h, s=rows.r, oh=size, ow=size, launch=1.0, at=position(rows.gpu), kind="fp32",
        way="forward",
    )  # fmt: skip


def position(devices: pd.Series) -> pd.Series:
    """Returns how far a collection had come at each row: the share of the device's rows before."""
    groups = devices.groupby(devices)
    return groups.cumcount() / groups.transform("size")


def called_us(devices: pd.Series, at: pd.Series) -> pd.Series:
    """Returns the host's microseconds in each call of NeuSight's collection, as they were fitted.

    `at`: as `position` has it.
    """
    stack = replace(load_stack("pytorch-eager"), gemm_kernel="torch")
    line = pd.DataFrame(
        {
            name: constants_for(Machine(device=find_device(name), stack=stack), "fp32")[1]
            for name in devices.unique()
        }
    ).T
    return devices.map(line.call_us).astype(float) + devices.map(line.slower_us).astype(float) * at


class Part:
    """The rows of one device and direction, ready to be priced with any constants."""

    def __init__(self, rows: pd.DataFrame, device: str, kind: str) -> None:
        arrays = {name: rows[name].to_numpy(float) for name in SIDES}
        self.images = Images(**arrays, groups=np.ones(len(rows)))
        self.machine = Machine(device=find_device(device), stack=load_stack("pytorch-eager"))
        self.kind, self.way = kind, str(rows.way.iloc[0])
        self.dtype = "fp32" if kind == "fp32" else "fp16"
        self.launch, self.at = rows.launch.to_numpy(), rows["at"].to_numpy()
        self.measured = rows.ms.to_numpy() * 1e-3
        self.big = self.images.flops > 5e9
        device_ = self.machine.device
        rates = Rates(
            peak=self.machine.peak(self.dtype),
            bandwidth=device_.memory_bandwidth,
            sms=device_.sm_count,
        )
        self.kernels = Kernels(rates=rates, constants={}, size=4.0 if kind == "fp32" else 2.0)

    def seconds(self, values: np.ndarray, vector: dict | None) -> np.ndarray:
        """Returns the predicted seconds; the last two of `values` are the host of PyTorch calls."""
        constants = dict(zip(NAMES, values[:-2], strict=True)) | fixed(
            self.kind, self.machine.device.name
        )
        constants |= FORCED if self.kind == "tensor" else {}
        kernels = replace(self.kernels, constants=constants)
        if self.kind == "tensor" and vector is not None:
            rates = replace(kernels.rates, peak=self.machine.peak("fp32"))
            plain = replace(self.kernels, rates=rates, constants=vector)
            kernels = replace(kernels, vector=plain)
        body = conv_seconds(self.images, self.way, kernels)[0]
        host = self.launch * (values[-2] + values[-1] * self.at)
        return body + 1e-6 * (constants["t0_us"] + host)


def main() -> None:
    """Fits all targets, prints the errors and writes the file if told to."""
    data = Path(sys.argv[1])
    rows = pd.concat([deepbench(data), neusight(data)])
    rows["key"] = [f"{c:g}_{k:g}_{h:g}" for c, k, h in zip(rows.c, rows.k, rows.h, strict=True)]
    text = ["# Convolution constants, written by studies/costs/convolution.py: do not edit.\n"
            "# Meaning: src/foretrain/cost/compute/convolution_kernels.py.\n"]  # fmt: skip
    vector: dict[str, dict] = {}
    for patterns, generations, names, kind, table in TARGETS:
        values, words, band = fit_target(rows, kind, table, vector.get(patterns[0]))
        short = [float(f"{v:.3g}") for v in values]
        constants = dict(zip(NAMES, short[:-2], strict=True)) | fixed(kind, table[1])
        if kind == "fp32" and not names:
            vector[patterns[0]] = constants
        constants |= {"band": band}
        if names == ["deepbench"]:  # other callers let the library choose
            text.append(entry(patterns, generations, [], kind, constants, words))
            constants |= FORCED
        elif names:
            constants |= {"call_us": short[-2], "slower_us": short[-1]}
        text.append(entry(patterns, generations, names, kind, constants, words))
    if "--write" in sys.argv:
        FITTED.write_text("\n".join(text), encoding="utf-8")


def fit_target(
    rows: pd.DataFrame, kind: str, table: tuple[str, str], vector: dict | None
) -> tuple[np.ndarray, str, float]:
    """Returns the constants of a device and dtype, and errors and band of the shapes left out."""
    gpu, device = table
    here = rows[(rows.gpu == gpu) & (rows.kind == kind)]
    out = held_out(here.key.tolist())

    def parts(chosen: pd.DataFrame) -> list[Part]:
        return [Part(part, device, kind) for _, part in chosen.groupby("way", sort=True)]

    train = here[~out]
    train = train.sample(min(len(train), MOST), random_state=1)  # the rest tells nothing new
    train, test = parts(train), parts(here[out])

    def residual(values: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [np.log(part.seconds(values, vector) / part.measured) for part in train]
        )

    calls = bool(train[0].launch.any())
    host = HOST if calls else ()
    tries = [
        fit(
            lambda values: residual(values if calls else np.append(values, (0.0, 0.0))),
            (*start, *host), (*LOW, *(1.0 for _ in host)), (*HIGH, *(2e3 for _ in host)),
            rounds=40, delta=0.3,
        )
        for start in STARTS
    ]  # fmt: skip
    found = min(tries, key=lambda result: result[1])[0]
    found = found if calls else np.append(found, (0.0, 0.0))
    error = [part.seconds(found, vector) / part.measured - 1.0 for part in test]
    size, big = np.abs(np.concatenate(error)), np.concatenate([part.big for part in test])
    ways = ", ".join(
        f"{p.way} {100 * np.abs(e).mean():.1f}" for p, e in zip(test, error, strict=True)
    )
    source = "NeuSight" if gpu.startswith("Tesla") else "DeepBench"
    known = ", the host of each call known" if gpu.startswith("Tesla") else ""
    words = (
        f"{source}{known}: {100 * size.mean():.1f} % mean error of {len(size)} rows left out "
        f"({ways}), over 5 GFLOP {100 * size[big].mean():.1f} %, median "
        f"{100 * np.median(size):.1f} %"
    )
    spread = np.exp(np.quantile(np.abs(np.log1p(np.concatenate(error))), 0.9))
    sys.stdout.write(
        f"{device} {kind} {words}; 90 % within x/ {spread:.2f}; {np.round(found, 2)}\n"
    )
    sys.stdout.flush()
    return found, words, round(float(spread), 2)


def entry(
    patterns: list[str], generations: list[str], names: list[str], kind: str, constants: dict,
    words: str,
) -> str:  # fmt: skip
    """Returns one [[entry]] of the file."""
    lines = ["[[entry]]", f"devices = {patterns}".replace("'", '"')]
    for key, values in (("generations", generations), ("kernels", names)):
        lines += [f"{key} = {values}".replace("'", '"')] if values else []
    lines += [f'kind = "{kind}"', 'mark = "fitted"', f'source = "{words}"']
    for name, value in constants.items():
        text = f'"{value}"' if isinstance(value, str) else str(value).lower()
        lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
