"""Fits the constants of memory-bound operators to the measured tables and prints them.

    python studies/costs/memory.py DATA

DATA is the folder with ops/neusight_vector_fp32.parquet, cudnn_norms_fwd_bwd, liger_fwd_bwd,
vidur_layers_fp16 and gpu_benches_stream_bw_GBs. The printed shares of the bandwidth are those of
catalog/calibration/memory.toml (rounded); errors are those of row lengths (columns) left out.

The PyTorch calls of the first table contain a launch of 15 to 50 us per device and operator, which
is fitted beside and belongs to the host, not to these constants.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from least_squares import fit, held_out

from foretrain.cost.calibration import load
from foretrain.cost.compute.memory_bound import second_pass
from foretrain.hardware import Device, find_device

DEVICES = {
    "Tesla P4": "p4", "Tesla P100-PCIE-16GB": "p100-pcie-16gb", "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "AMD Instinct MI100": "mi100",
}  # fmt: skip
BINARY = ("add", "mul", "div")
ELEMENTWISE = (*BINARY, "addu", "mulu", "divu", "relu", "gelu", "tanh")
BIG = 16e6
SM_THREADS = {"t4": 1024.0}
#: Tables of several hosts: small norms are faster than small sums, so each operator is on its own.
HOSTS = ("p100-pcie-16gb",)


def say(text: str) -> None:
    """Prints a line."""
    sys.stdout.write(f"{text}\n")


def vectors(data: Path) -> None:
    """Prints shares and errors of the fp32 vector operators of PyTorch.

    A small call lasts `floor` (the host), a large one `launch` beside its kernel; both belong to
    the host of the table. What lies between them comes behind the launch and is the same for all
    operators: the element-wise ones, whose kernels are known best, say it for norms and softmax.
    """
    rows = pd.read_parquet(data / "ops/neusight_vector_fp32.parquet")
    rows["op"], rows["gpu"] = rows.op.astype(str), rows.gpu.astype(str)
    rows["bytes"] = 4.0 * rows.B * rows.H * np.where(rows.op.isin(BINARY), 3.0, 2.0)
    limit = float(load("memory")["rules"]["long_columns"])
    for gpu, name in DEVICES.items():
        device, every = find_device(name), rows[rows.gpu == gpu]
        if name == "a100-pcie-40gb":  # what fits into L2 stays there between repetitions
            every = every[(every.bytes < 1e6) | (every.bytes > 1.3 * device.l2_bytes)]
        behind: float | None = None
        for ops in (ELEMENTWISE, ("ln",), ("softmax",)):
            here = every[every.op.isin(ops)]
            floor = here[here.bytes < 1e6].groupby("op").latency_ms.median() * 1e-3
            here = here[here.bytes > 1e6]
            part = here.assign(floor=here.op.map(floor), which=here.op.map(ops.index))
            found = _vectors(device, ops, part, limit, behind)
            behind = None if name in HOSTS else found


def _vectors(
    device: Device, ops: tuple[str, ...], rows: pd.DataFrame, limit: float, behind: float | None
) -> float:
    """Fits and prints; returns the time behind the launch, which is fitted where it is None."""
    out = held_out([f"{h:g}" for h in rows.H])
    long = (limit < rows.H).to_numpy() & (ops[0] == "softmax")
    moved, measured = rows.bytes.to_numpy(), rows.latency_ms.to_numpy() * 1e-3
    floor, which = rows.floor.to_numpy(), rows.which.to_numpy()
    weight = np.where(moved > BIG, 1.0, 0.3)
    again = np.ones(len(rows))
    if ops == ("ln",):
        again = second_pass(4.0 * rows.H.to_numpy(), device, SM_THREADS.get(device.name, 2048.0))

    def seconds(v: np.ndarray, part: np.ndarray) -> np.ndarray:
        share = np.where(long[part], v[1], v[0])
        body = moved[part] * again[part] / (device.memory_bandwidth * share)
        if ops == ("ln",):
            body = body + rows.B.to_numpy()[part] * v[2] * 1e-9 / device.sm_count
        launch = v[3:][which[part]] * 1e-6 if behind is None else floor[part] - behind
        return np.maximum(floor[part], launch + body)

    found, _ = fit(
        lambda v: weight[~out] * np.log(seconds(v, ~out) / measured[~out]),
        [0.7, 0.6, 100.0, *[20.0] * len(ops)],
        [0.1, 0.1, 0.1, *[2.0] * len(ops)],
        [1.0, 1.0, 1000.0, *[90.0] * len(ops)],
    )
    error = np.abs(seconds(found, out) / measured[out] - 1.0)
    big = moved[out] > BIG
    if behind is None:
        behind = float(np.median(floor - found[3:][which] * 1e-6))
    launch = 1e6 * (np.median(floor) - behind)
    extra = f" (long rows {found[1]:.2f})" if ops[0] == "softmax" else ""
    extra = f", {found[2]:.0f} ns per row" if ops == ("ln",) else extra
    say(
        f"{device.name:16s} {ops[0]:8s} share {found[0]:.2f}{extra}, launch "
        f"{launch:.0f} us; left out: over 16 MB {100 * error[big].mean():.1f} %, all "
        f"{100 * error.mean():.1f} %"
    )
    return behind


def norms(data: Path) -> None:
    """Prints shares of forward and backward norms: cuDNN, PyTorch and torch.compile on GB200."""
    rows = pd.read_parquet(data / "ops/cudnn_norms_fwd_bwd.parquet")
    device, t0 = find_device("gb200"), 2e-6
    for key, part in rows[rows.N * rows.C * 4 > BIG].groupby(
        ["norm_type", "backend"], observed=True
    ):
        for way, operands in (("fwd", 2.0), ("bwd", 3.0)):
            moved = 2.0 * part.N * part.C * operands
            share = moved / (part[f"{way}_time_ms"] * 1e-3 - t0) / device.memory_bandwidth
            typical = share.median()
            error = (moved / (device.memory_bandwidth * typical) + t0) / (
                part[f"{way}_time_ms"] * 1e-3
            ) - 1
            say(
                f"gb200 {'/'.join(key):28s} {way} share {typical:.2f}, "
                f"in-sample error {100 * error.abs().mean():.1f} %"
            )


def liger(data: Path) -> None:
    """Prints shares of eager and fused training operators on A100 and RTX 3090."""
    rows = pd.read_parquet(data / "ops/liger_fwd_bwd.parquet").astype(
        {"kernel_name": str, "kernel_provider": str, "kernel_operation_mode": str, "gpu_name": str,
         "extra_benchmark_config_str": str}
    )  # fmt: skip
    rows = rows[rows.kernel_name.isin(("rms_norm", "layer_norm", "cross_entropy", "softmax"))]
    table = rows.pivot_table(
        index=["gpu_name", "kernel_name", "kernel_provider", "extra_benchmark_config_str",
               "x_value"],
        columns="kernel_operation_mode", values="latency_ms",
    ).reset_index()  # fmt: skip
    names = {"NVIDIA A100-SXM4-80GB": "a100-sxm-80gb", "NVIDIA GeForce RTX 3090": "rtx-3090"}
    for key, part in table.groupby(["gpu_name", "kernel_name", "kernel_provider"]):
        device = find_device(names[str(key[0])])
        config = [json.loads(text) for text in part.extra_benchmark_config_str]
        size = [2.0 if "bfloat16" in c.get("dtype", "") else 4.0 for c in config]
        lines = [c["M"] if "M" in c else c["B"] * c["T"] for c in config]
        tensor = np.array(size) * lines * part.x_value.to_numpy()
        back = part.get("backward")
        back = part.full - part.forward if back is None or back.isna().all() else back
        back = back.fillna(part.full - part.forward)
        fused = key[1] == "cross_entropy"
        big = 2 * tensor > BIG
        for way, time, operands in (("fwd", part.forward, 1.0 if fused else 2.0),
                                    ("bwd", back, 2.0 if fused else 3.0)):  # fmt: skip
            share = operands * tensor[big] / (time.to_numpy()[big] * 1e-3) / device.memory_bandwidth
            say(f"{device.name:14s} {key[1]:14s} {key[2]:12s} {way} share {np.median(share):.2f} "
                  f"({share.min():.2f} to {share.max():.2f})")  # fmt: skip


def streams(data: Path) -> None:
    """Prints the best share of the bandwidth that large arrays reach."""
    rows = pd.read_parquet(data / "ops/gpu_benches_stream_bw_GBs.parquet").astype({"gpu": str})
    for gpu, part in rows.groupby("gpu"):
        say(f"stream {gpu}: scale {part.scale.max():.0f}, triad {part.triad.max():.0f} GB/s")


if __name__ == "__main__":
    for step in (vectors, norms, liger, streams):
        step(Path(sys.argv[1]))
