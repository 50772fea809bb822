"""Fits the attention constants to the measured tables and writes attention_fitted.toml.

    python studies/costs/attention.py DATA [--write]

DATA is the folder with ops/aic_attention_context.parquet, ops/aic_attention_encoder.parquet and
ops/cudnn_sdpa_fwd_bwd.parquet. One in three head configurations (heads x KV heads x head_dim; the
whole model in the cuDNN table) is left out of each fit; the error printed is that of those rows.
Takes about three minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from least_squares import fit, held_out

from foretrain.cost.compute.attention import BACKWARD_FLOPS, LONG, attention_seconds
from foretrain.hardware import Device, find_device

FITTED = Path(__file__).parents[2] / "src/foretrain/catalog/calibration/attention_fitted.toml"
SYSTEMS = {
    "a100_sxm": ("a100-sxm-80gb", ["a100*", "a800*"], "ampere"),
    "h100_sxm": ("h100-sxm", ["h100*", "h200*", "gh200*", "h800*"], "hopper"),
    "b200_sxm": ("b200-sxm", ["b200*"], "blackwell"),
    "b300_sxm": ("b300-sxm", ["b300*", "gb300*"], ""),
    "gb200": ("gb200", ["gb200*"], ""),
    "rtx_pro_6000_server": ("rtx-pro-6000", ["rtx-pro-6000*", "rtx-50*"], ""),
}
#: (system or "", causal kernel of a table, encoder kernel) -> our name of the kernel.
KERNELS = (
    ("", "flash_attention", "", "flash2"),
    ("", "vllm_flash_attn", "", "flash2-vllm"),
    ("", "torch_flow", "torch_flow", "trtllm"),
    ("", "vllm_flash_attn_fa2", "vllm_vit_flash_attn_fa2", "flash2"),
    ("", "vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3", "flash3"),
    ("", "fa3", "flash_attention_v3", "flash3-sglang"),
    ("", "", "vllm_vit_flash_attn_fa4", "flash4"),
    ("", "", "flash_attention_v4", "flash4-sglang"),
    ("", "trtllm_mha", "", "trtllm-sglang"),
    ("", "vllm_flashinfer_trtllmprefill", "", "trtllm-vllm"),
    ("", "vllm_flashinfer", "", "flashinfer-vllm"),
    ("", "flashinfer", "", "flashinfer"),
    ("", "triton", "triton", "triton"),
)
#: Head dims that a table lacks -> efficiency over that of 128: from the FlashAttention-2 paper
#: (A100), from the kernels of the inference engines on the same device (cuDNN on Blackwell).
OTHER_DIMS = {
    "ampere": {"32": 0.68, "64": 0.88, "256": 0.91},
    "cudnn": {"64": 0.60},
}
#: name, start, lowest, highest of the constants but e.
NAMES = ("e_b", "t0_us", "k0", "q", "g", "p")
BANDS = ("band_long", "band")
LOW, HIGH = (0.1, 0.5, 0.5, 0.02, 0.02, 5e-4), (1.5, 40.0, 3000.0, 1.0, 1.5, 0.4)
STARTS = ((0.6, 8.0, 20.0, 0.5, 0.5, 0.03), (0.6, 8.0, 200.0, 0.5, 0.5, 0.03))


def shapes(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the arrays that attention_seconds wants."""
    names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v")
    return {name: rows[name].to_numpy(float) for name in (*names, "causal", "window")}


def fit_case(
    rows: pd.DataFrame, device: Device, work: float = 1.0
) -> tuple[dict, np.ndarray, pd.DataFrame]:
    """Returns (constants, signed errors of the rows left out, those rows)."""
    out = held_out(rows["key"].tolist())
    if out.sum() < 5 or (~out).sum() < 10:
        out = np.zeros(len(rows), dtype=bool)
    train = rows[~out]
    dims = sorted(set(train.head_dim))
    shape, measured = shapes(train), train.latency_ms.to_numpy(float) * 1e-3
    weight = np.where(train.seq_q >= LONG, 1.0, 0.35)
    bf16 = device.peak_flops["bf16"]

    def constants(values: np.ndarray, tile: float) -> dict:
        e = {str(dim): float(v) for dim, v in zip(dims, values[6:], strict=True)}
        return dict(zip(NAMES, map(float, values[:6]), strict=True)) | {"tile": tile, "e": e}

    def seconds(shape: dict, values: dict) -> np.ndarray:
        return attention_seconds(
            shape, peak=bf16, bandwidth=device.memory_bandwidth, sms=device.sm_count,
            constants=values, work=work,
        )  # fmt: skip

    best: tuple[float, dict] = (np.inf, {})
    for tile in (128.0, 256.0):
        for start in STARTS:
            found, cost = fit(
                lambda v, tile=tile: weight * np.log(seconds(shape, constants(v, tile)) / measured),
                [*start, *[0.5] * len(dims)],
                [*LOW, *[0.02] * len(dims)],
                [*HIGH, *[1.6] * len(dims)],
            )
            if cost < best[0]:
                best = cost, constants(found, tile)
    test = rows[out] if out.any() else rows
    error = seconds(shapes(test), best[1]) / (test.latency_ms.to_numpy(float) * 1e-3) - 1.0
    return best[1], error, test


def context(data: Path) -> pd.DataFrame:
    """Returns the causal rows of bf16 with a bf16 cache, in our names."""
    rows = pd.read_parquet(data / "ops/aic_attention_context.parquet")
    for name in ("system", "kernel_source", "attn_dtype", "kv_cache_dtype"):
        rows[name] = rows[name].astype(str)
    rows = rows[(rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")]
    rows = rows[rows.isl >= 16].rename(columns={"num_key_value_heads": "kv_heads"})
    rows["kv_heads"] = rows.kv_heads.where(rows.kv_heads > 0, rows.num_heads)
    rows["window"] = rows.window_size.fillna(0.0).astype(float)
    rows["causal"] = 1.0
    return _common(rows)


def encoder(data: Path) -> pd.DataFrame:
    """Returns the rows without a mask, in our names."""
    rows = pd.read_parquet(data / "ops/aic_attention_encoder.parquet")
    for name in ("system", "kernel_source"):
        rows[name] = rows[name].astype(str)
    rows = rows[rows.isl >= 16].assign(causal=0.0, window=0.0)
    rows["kv_heads"] = rows.num_heads
    return _common(rows)


def _common(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.rename(columns={"batch_size": "batch", "isl": "seq_q", "num_heads": "heads"})
    rows["seq_kv"], rows["head_dim_v"] = rows.seq_q, rows.head_dim
    shape = zip(rows.heads, rows.kv_heads, rows.head_dim, strict=True)
    rows["key"] = [f"{h}_{k}_{d}" for h, k, d in shape]
    return rows


def cudnn(data: Path) -> pd.DataFrame:
    """Returns the bf16 rows without a window of the cuDNN table, in our names."""
    rows = pd.read_parquet(data / "ops/cudnn_sdpa_fwd_bwd.parquet")
    rows = rows[(rows.data_type.astype(str) == "bfloat16") & rows.sliding_window_size.isna()]
    rows = rows.rename(
        columns={"batch_size": "batch", "q_seqlen": "seq_q", "kv_seqlen": "seq_kv",
                 "num_q_heads": "heads", "num_kv_heads": "kv_heads", "head_dim_qk": "head_dim",
                 "head_dim_vo": "head_dim_v"}
    )  # fmt: skip
    rows["causal"] = (rows.attn_mask.astype(str) == "top_left").astype(float)
    rows["window"] = 0.0
    rows["key"] = [f"{m}_{s}" for m, s in zip(rows.model_name.astype(str), rows.seq_q, strict=True)]
    return rows


def report(name: str, case: str, error: np.ndarray, rows: pd.DataFrame) -> tuple[str, dict]:
    """Prints the errors of the rows left out; returns them in words, and the 90 % bands."""
    size, long = np.abs(error), (rows.seq_q >= LONG).to_numpy()
    words = f"{100 * size[long].mean():.1f} % for s >= 2048, {100 * size.mean():.1f} % for all"
    bands = {
        name: float(np.exp(np.quantile(np.abs(np.log1p(error[which])), 0.9)))
        for name, which in (("band_long", long), ("band", ~long))
        if which.sum() >= 10
    }
    sys.stdout.write(
        f"{name:36s} {case:16s} {len(rows):5d} rows left out: {words}; 90 % within x/ "
        f"{bands.get('band_long', 0):.3f} (s < 2048: {bands.get('band', 0):.3f})\n"
    )
    sys.stdout.flush()
    return words, bands


def table_entries(data: Path) -> Iterator[str]:
    """Yields the TOML of the kernels of the inference tables."""
    causal, full = context(data), encoder(data)
    for system, (name, patterns, generation) in SYSTEMS.items():
        device = find_device(name)
        for where, source, vit, kernel in KERNELS:
            if where not in ("", system):
                continue
            rows = causal[(causal.system == system) & (causal.kernel_source == source)]
            cases = {
                "causal": rows[rows.window == 0],
                "window": rows[(rows.window > 0) & (rows.window < rows.seq_q)],
                "full": full[(full.system == system) & (full.kernel_source == vit)],
            }
            found = {}
            for case, part in cases.items():
                if len(part) >= 60:
                    found[case] = fit_case(part, device)
            if not found:
                continue
            words = []
            for case, (values, error, test) in found.items():
                said, bands = report(f"{name} {kernel}", case, error, test)
                words.append(f"{case}: {said}")
                values |= bands
            yield entry(
                kernel, [n for n in (source, vit) if n], patterns, generation,
                {case: values for case, (values, _, _) in found.items()},
                "NVIDIA aiconfigurator tables; mean error of left-out head configurations "
                + "; ".join(words),
            )  # fmt: skip


def cudnn_entries(data: Path) -> Iterator[str]:
    """Yields the TOML of cuDNN, forward and backward, with and without determinism."""
    rows, device = cudnn(data), find_device("gb200")
    for kernel, deterministic in (("cudnn", False), ("cudnn-deterministic", True)):
        found, words = {}, []
        for case, causal, way in (
            ("causal", 1.0, "fwd"), ("full", 0.0, "fwd"),
            ("causal_backward", 1.0, "bwd"), ("full_backward", 0.0, "bwd"),
        ):  # fmt: skip
            part = rows[(rows.causal == causal) & (rows.profile_pass.astype(str) == way)]
            if way == "bwd":
                part = part[part.deterministic_bwd == deterministic]
            values, error, test = fit_case(part, device, BACKWARD_FLOPS if way == "bwd" else 1.0)
            said, bands = report(f"gb200 {kernel}", case, error, test)
            found[case] = values | bands
            words.append(f"{case}: {said}")
        yield entry(
            kernel, [], ["gb200*", "gb300*", "b200*", "b300*"], "blackwell", found,
            "cuDNN 1.21 on GB200 (cudnn-frontend benchmark); mean error of left-out shapes "
            + "; ".join(words),
        )  # fmt: skip


def entry(
    kernel: str, names: list[str], patterns: list[str], generation: str, cases: dict, source: str
) -> str:
    """Returns one [[entry]] of the file; the first case gives the entry's own constants."""
    rho = {"ampere": 0.86, "hopper": 0.80}.get(generation, 0.79)
    lines = ["[[entry]]", f"devices = {_list(patterns)}"]
    if generation:
        lines.append(f"generations = {_list([generation])}")
    lines += [f'kernel = "{kernel}"', *([f"names = {_list(names)}"] if names else [])]
    lines += [f"rho = {rho}", 'mark = "fitted"', f'source = "{source}"']
    key = "cudnn" if kernel.startswith("cudnn") else generation
    for values in cases.values():
        known = values["e"]
        more = {d: r * known["128"] for d, r in OTHER_DIMS.get(key, {}).items() if d not in known}
        values["e"] = dict(sorted((known | more).items(), key=lambda item: int(item[0])))
    first, *others = cases
    lines += [*_constants(cases[first]), "[entry.e]", *_efficiency(cases[first])]
    for case in cases if first != "causal" else others:
        lines += [f"[entry.{case}]", *_constants(cases[case])]
        lines += [f"[entry.{case}.e]", *_efficiency(cases[case])]
    return "\n".join(lines) + "\n"


def _list(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def _constants(values: dict) -> list[str]:
    return [
        f"{name} = {float(f'{values[name]:.3g}')}"
        for name in (*NAMES, "tile", *BANDS)
        if name in values
    ]


def _efficiency(values: dict) -> list[str]:
    return [f"{dim} = {value:.3f}" for dim, value in values["e"].items()]


def main() -> None:
    """Fits everything; writes the file if told to."""
    data = Path(sys.argv[1])
    text = [
        "# Attention constants, written by studies/costs/attention.py: do not edit.\n"
        "#\n# The entry's own constants are those of the causal mask (or of the only case);\n"
        "# [entry.CASE] holds those of another case. names: what the tables call the kernel.\n"
        "# Meaning: src/foretrain/cost/compute/attention.py.\n",
        *cudnn_entries(data),
        *table_entries(data),
    ]
    if "--write" in sys.argv:
        FITTED.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
