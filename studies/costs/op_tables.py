"""Writes published operator tables in the format of `foretrain validate ops`, one Parquet each.

    python studies/costs/op_tables.py DATA/ops OUT [NAME...]

DATA is the folder of measurements, OUT receives NAME.parquet (docs/reference/operator-tables.md).
Every adapter below is one source: it renames columns, states units, device and kernel, and drops
what is no measurement of the operator (weight-only quantisation, impossible rates).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

AIC = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "rtx_pro_6000_server": "rtx-pro-6000",
    "b60": "arc-pro-b60",
}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
DEEPBENCH = {
    "NV_V100": "v100-sxm-16gb",
    "NV_T4": "t4",
    "NV_1080Ti": "gtx-1080-ti",
    "NV_TitanX_Pascal": "titan-x-pascal",
    "NV_TitanX": "titan-x",
    "NV_M40": "m40",
    "AMD_VegaFE": "vega-fe",
    "IA_KNL7250": "xeon-phi-7250",
}
NEUSIGHT = {
    "Tesla P4": "p4",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "AMD Instinct MI100": "mi100",
}
XLA = {"gfx942": "mi300x", "sm_100_B200": "b200-sxm", "sm_107": "sm-107"}
SIGNATURES = {
    "bf16xbf16->bf16": "bf16",
    "f16xf16->f16": "fp16",
    "f32xf32->f32": "fp32",
    "f8e4m3fnxf8e4m3fn->bf16": "fp8",
    "f8e4m3fnuzxf8e4m3fnuz->bf16": "fp8",
}
SERVING = {
    "H100": "h100-sxm",
    "A6000": "rtx-a6000",
    "RTX4090": "rtx-4090",
    "RTXPRO6000": "rtx-pro-6000",
}


def read(folder: Path, name: str) -> pd.DataFrame:
    """Returns a table with its categories as text."""
    frame = pd.read_parquet(folder / f"{name}.parquet")
    for column in frame.select_dtypes("category").columns:
        frame[column] = frame[column].astype(str)
    return frame


def finish(
    frame: pd.DataFrame, name: str, op: str, latency_us: pd.Series, **fixed: object
) -> pd.DataFrame:
    """Returns the columns of the format; `fixed` values hold for every row."""
    frame = frame.assign(**fixed, op=op, latency_us=latency_us)
    frame["id"] = [f"{name}-{i}" for i in range(len(frame))]
    return frame


def aic_gemm(folder: Path) -> pd.DataFrame:
    """GEMM forward in CUDA graphs; int8 and int4 weights are inference only."""
    frame = read(folder, "aic_gemm")
    frame = frame[frame.gemm_dtype.isin(DTYPES)]
    frame = frame.assign(
        device=frame.system.map(AIC), dtype=frame.gemm_dtype.map(DTYPES), stack=frame.kernel_source
    )
    frame = finish(frame, "aic_gemm", "gemm", 1e3 * frame.latency_ms, launch_included=False, b=1)
    return frame.assign(**{"pass": "forward"})


def aic_moe(folder: Path) -> pd.DataFrame:
    """Fused experts, forward; *_nongated kernels have two GEMMs."""
    frame = read(folder, "aic_moe")
    frame = frame[frame.moe_dtype.isin(DTYPES)]
    frame = frame.rename(
        columns={
            "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "ffn",
            "num_experts": "experts", "moe_tp_size": "tp", "moe_ep_size": "ep",
        }
    )  # fmt: skip
    frame = frame.assign(
        device=frame.system.map(AIC),
        dtype=frame.moe_dtype.map(DTYPES),
        stack=versioned(frame),
        gated=(~frame.kernel_source.str.contains("nongated")).astype(int),
    )
    frame = finish(frame, "aic_moe", "moe_gemm", 1e3 * frame.latency_ms, launch_included=False)
    return frame.assign(**{"pass": "forward"})


def versioned(frame: pd.DataFrame) -> pd.Series:
    """Returns the kernel names, with @version where a device and format has several of them.

    CUTLASS and Triton experts of H100 were measured with two releases each, which differ by a half.
    """
    name, version = frame.kernel_source.astype(str), frame.fw_version.astype(str)
    keys = [frame.system.astype(str), frame.moe_dtype.astype(str), name]
    several = version.groupby(keys).transform("nunique") > 1
    return name.where(~several, name + "@" + version)


def xla_gemm(folder: Path) -> pd.DataFrame:
    """The performance table inside XLA; its times contain a launch of about 5 us."""
    frame = read(folder, "xla_gemm")
    frame = frame[frame.dtype_sig.isin(SIGNATURES) & (frame.latency_us > 0)]
    frame = frame.assign(
        device=frame.arch.map(XLA), dtype=frame.dtype_sig.map(SIGNATURES), stack="xla"
    )
    frame = finish(frame, "xla_gemm", "gemm", frame.latency_us, launch_included=False)
    return frame.assign(**{"pass": "forward"})


def deepbench_gemm(folder: Path) -> pd.DataFrame:
    """Training GEMMs of 2016-2020; the sheet is the precision."""
    frame = read(folder, "deepbench_gemm").rename(columns={"M": "m", "N": "n", "K": "k"})
    mixed = frame.sheet.str.contains("Mixed")
    frame = frame.assign(
        device=frame.gpu.map(DEEPBENCH), dtype=np.where(mixed, "fp16", "fp32"), stack="deepbench"
    )
    for size in "mnk":  # tensor units wanted multiples of 8: the benchmark pads for them
        padded = np.ceil(frame[size] / 8).astype(int) * 8
        frame[size] = np.where(mixed, padded, frame[size])
    latency = 1e3 * frame.latency_ms
    frame = finish(frame, "deepbench_gemm", "gemm", latency, launch_included=False, b=1)
    return frame[frame.latency_us > 0].assign(**{"pass": "forward"})


def neusight_gemm(folder: Path) -> pd.DataFrame:
    """torch.bmm and nn.Linear in fp32 without TF32; each call is timed alone, launch included."""
    frame = read(folder, "neusight_gemm_fp32")
    frame = frame.rename(columns={"B": "b", "M": "m", "N": "n", "K": "k"})
    frame = frame.assign(device=frame.gpu.map(NEUSIGHT), stack="torch_" + frame.op)
    latency = 1e3 * frame.latency_ms
    frame = finish(frame, "neusight_gemm", "gemm", latency, launch_included=True, dtype="fp32")
    return frame.assign(**{"pass": "forward"})


def vidur_gemm(folder: Path) -> pd.DataFrame:
    """Projections of an inference engine in fp16, single kernels."""
    frame = read(folder, "vidur_layers_fp16")
    tp = frame.num_tensor_parallel_workers
    head = frame.n_embd // frame.n_head
    qkv = (frame.n_head + 2 * frame.n_kv_head) // tp * head
    gate = np.where(frame.use_gated_mlp, 2, 1)
    shapes = {
        "attn_pre_proj": (qkv, frame.n_embd),
        "attn_post_proj": (frame.n_embd, frame.n_embd // tp),
        "mlp_up_proj": (gate * frame.n_expanded_embd // tp, frame.n_embd),
        "mlp_down_proj": (frame.n_embd, frame.n_expanded_embd // tp),
    }
    frame = frame.assign(n=0, k=0, m=frame.num_tokens)
    for op, (n, k) in shapes.items():
        frame["n"] = np.where(frame.op == op, n, frame.n)
        frame["k"] = np.where(frame.op == op, k, frame.k)
    frame = frame[frame.op.isin(list(shapes)) & (frame.latency_ms > 0)]
    frame = frame.assign(device=frame.gpu.map({"a100": "a100-sxm-80gb", "a40": "a40"}))
    frame = frame.assign(stack="vidur", dtype="fp16")
    frame = finish(frame, "vidur_gemm", "gemm", 1e3 * frame.latency_ms, launch_included=False, b=1)
    return frame.assign(**{"pass": "forward"})


#: Name of the output -> adapter.
TABLES: dict[str, Callable[[Path], pd.DataFrame]] = {
    "aic_gemm": aic_gemm,
    "aic_moe": aic_moe,
    "xla_gemm": xla_gemm,
    "deepbench_gemm": deepbench_gemm,
    "neusight_gemm": neusight_gemm,
    "vidur_gemm": vidur_gemm,
}
COLUMNS = (
    "id", "device", "op", "pass", "dtype", "stack", "launch_included", "host_us", "latency_us",
    "b", "m", "n", "k", "batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v",
    "causal", "window", "c", "h", "w", "r", "s", "stride", "padding", "groups", "oh", "ow",
    "tokens", "hidden", "ffn", "experts", "topk", "ep", "tp", "gated", "distribution", "rows",
    "cols", "operands",
)  # fmt: skip


def write(
    folder: Path, out: Path, names: list[str], tables: dict[str, Callable[[Path], pd.DataFrame]]
) -> None:
    """Writes the tables asked for, all by default."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or tables:
        frame = tables[name](folder)
        kept = [column for column in COLUMNS if column in frame.columns]
        frame[kept].to_parquet(out / f"{name}.parquet", index=False)
        sys.stdout.write(f"{name}: {len(frame):,} rows\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], TABLES)
