"""Fits the attention constants to the measured tables and writes attention_fitted.toml.

    python studies/costs/attention.py DATA [--write]

DATA is the folder with ops/aic_attention_context.parquet, aic_attention_encoder, aic_mla_context
and cudnn_sdpa_fwd_bwd. One in three head configurations (heads x KV heads x head_dim; the
whole model in the cuDNN table) is left out of each fit; the error printed is that of those rows.
Takes about three minutes on one core.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from attention_text import NAMES, entry
from least_squares import fit, folds, held_out
from op_tables_more import aic_attention_context, aic_attention_encoder, aic_mla_context

from foretrain.cost.compute.attention import BACKWARD_FLOPS, LONG, attention_seconds, head_name
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
#: Causal kernel of a table, encoder kernel, our name of the kernel.
KERNELS = (
    ("flash_attention", "", "flash2"),
    ("vllm_flash_attn", "", "flash2-vllm"),
    ("torch_flow", "torch_flow", "trtllm"),
    ("vllm_flash_attn_fa2", "vllm_vit_flash_attn_fa2", "flash2"),
    ("vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3", "flash3-vllm"),
    ("fa3", "flash_attention_v3", "flash3-sglang"),
    ("", "vllm_vit_flash_attn_fa4", "flash4"),
    ("", "flash_attention_v4", "flash4-sglang"),
    ("trtllm_mha", "", "trtllm-sglang"),
    ("vllm_flashinfer_trtllmprefill", "", "trtllm-vllm"),
    ("vllm_flashinfer", "", "flashinfer-vllm"),
    ("flashinfer", "", "flashinfer"),
    ("triton", "triton", "triton"),
    ("torch_flow_flashinfer", "", "flashinfer-trtllm"),
    ("vllm_flash_attn_fa4", "", "flash4-vllm"),
)
#: Case, dtype, in the order of fitting: a window takes the efficiencies of its kernel from causal.
CASES = (
    ("causal", "bf16"),
    ("window", "bf16"),
    ("full", "bf16"),
    ("causal", "fp8"),
    ("window", "fp8"),
)
LEAST = 60
#: Kernels with other code for windows (Triton computes what it masks).
OWN_WINDOW = ("triton",)
#: Bounds of the constants but e.
LOW, HIGH = (0.1, 0.5, 0.5, 0.02, 0.02, 5e-4, 0.2), (1.5, 40.0, 3000.0, 1.0, 1.5, 0.4, 3.0)
TILES = (64.0, 128.0, 256.0)
#: How sure the constants of a head_dim of fewer numbers of heads than FEW are to be like those of
#: its kernel at the head_dim of its values: width of the logarithm, and weight of that.
ALIKE = {"e_b": 0.5, "t0_us": 0.7, "k0": 0.7, "q": 0.5, "g": 1.0, "p": 1.0, "a": 0.25, "e": 0.3}
FEW, PULL = 4, 0.15
#: Kernels of an engine that moves 512 + 64 numbers of every token to its cache, once for all heads,
#: before they run expanded (TensorRT-LLM, mlaKernels: read and written in 16 bits).
LATENT = ("trtllm", "trtllm-sglang")
LATENT_BYTES = 2.0 * 2.0 * (512 + 64)
#: Rows of a head_dim that are enough for constants of its own; rows that a fit looks at.
OWN, MOST = 60, 600
#: Parts of the head configurations that take part which are left out in turn for the bands.
FOLDS = 2
STARTS = ((0.6, 8.0, 20.0, 0.5, 0.5, 0.03, 1.0), (0.6, 8.0, 200.0, 0.5, 0.5, 0.03, 1.0))


def shapes(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    """Returns the arrays that attention_seconds wants."""
    names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v")
    return {name: rows[name].to_numpy(float) for name in (*names, "causal", "window")}


class Fitter:
    """Fits the rows of one case of one kernel on one device."""

    def __init__(self, device: Device, work: float, kernel: str = "") -> None:
        self.device, self.work, self.kernel = device, work, kernel

    def seconds(self, rows: pd.DataFrame, values: dict) -> np.ndarray:
        """Returns predicted seconds, with constants of a head_dim where there are some."""
        result = np.empty(len(rows))
        for head, where in rows.groupby("head").indices.items():
            result[where] = self.plain(
                shapes(rows.iloc[where]), {**values, **values.get("dim", {}).get(head, {})}
            )
        return result

    def plain(self, shape: dict, values: dict) -> np.ndarray:
        """Returns predicted seconds by one set of constants."""
        device = self.device
        return attention_seconds(
            shape, peak=device.peak_flops["bf16"], bandwidth=device.memory_bandwidth,
            sms=device.sm_count, constants=values, work=self.work,
        )  # fmt: skip

    def fit(self, rows: pd.DataFrame, known: dict) -> dict:
        """Returns the constants of some rows.

        `known`: e of head dims without a window, which a kernel keeps but for its masked tiles.
        """
        rows = rows.sample(min(len(rows), MOST), random_state=1)  # the rest tells nothing new
        shape, measured = shapes(rows), _seconds(rows)
        weight = np.where(rows.seq_q >= LONG, 1.0, 0.35)
        dims = sorted(set(rows.head_dim))
        most = [1.1 * known.get(str(dim), 1.45) for dim in dims]
        least = [0.4 * known.get(str(dim), 0.05) for dim in dims]
        count = len(NAMES)

        def constants(values: np.ndarray, tile: float, skips: bool) -> dict:
            e = {str(dim): float(v) for dim, v in zip(dims, values[count:], strict=True)}
            found = dict(zip(NAMES, map(float, values[:count]), strict=True))
            return found | {"tile": tile, "e": e} | ({} if skips else {"skips": False})

        def residual(values: np.ndarray, kind: tuple[float, bool]) -> np.ndarray:
            return weight * np.log(self.plain(shape, constants(values, *kind)) / measured)

        low, high = [*LOW, *least], [*HIGH, *most]
        skips = (True, False) if (rows.window > 0).any() else (True,)
        tries = []
        for kind, start in itertools.product(itertools.product(TILES, skips), STARTS):
            first = [*start, *(float(np.clip(0.5, a, b)) for a, b in zip(least, most, strict=True))]
            found, cost = fit(lambda v, k=kind: residual(v, k), first, low, high, rounds=12)
            tries.append((cost, tuple(found), kind))
        best = [
            (*fit(lambda v, k=kind: residual(v, k), list(start), low, high), kind)
            for _, start, kind in sorted(tries)[:3]
        ]
        found, _, kind = min(best, key=lambda result: result[1])
        return constants(found, *kind)

    def fit_all(self, rows: pd.DataFrame, known: dict) -> dict:
        """Returns the constants of all rows, and beside them of head dims with enough rows."""
        joint = rows[rows.head_dim == rows.head_dim_v]
        values = self.fit(joint if len(joint) else rows, known)
        counts = rows["head"].value_counts()
        if len(counts) == 1:
            return values
        own = sorted(head for head, count in counts.items() if count >= OWN or "x" in head)
        dims: dict[str, dict] = {}
        for head in sorted(own, key=lambda head: "x" in head):
            part = rows[rows["head"] == head]
            like = dims.get(head.partition("x")[2])
            if like and part.heads.nunique() < FEW:
                dims[head] = self.fit_like(part, like)
            else:
                dims[head] = self.fit(part, known)
        return values | ({"dim": dims} if dims else {})

    def fit_like(self, rows: pd.DataFrame, like: dict) -> dict:
        """Returns constants near those of the same kernel at another head_dim, and its heads."""
        shape, measured = shapes(rows), _seconds(rows)
        weight = np.where(rows.seq_q >= LONG, 1.0, 0.35)
        (dim,), (e,) = sorted(set(rows.head_dim)), like["e"].values()
        start = np.array([*(like[name] for name in NAMES), e])
        width = np.array([*(ALIKE[name] for name in NAMES), ALIKE["e"]])
        latent = {"token_bytes": LATENT_BYTES} if self.kernel in LATENT else {}

        def constants(values: np.ndarray) -> dict:
            found = dict(zip(NAMES, map(float, values), strict=False))
            return found | {"tile": like["tile"], "e": {str(dim): float(values[-1])}} | latent

        def residual(values: np.ndarray) -> np.ndarray:
            errors = weight * np.log(self.plain(shape, constants(values)) / measured)
            return np.concatenate([errors, PULL * np.log(values / start) / width])

        found, _ = fit(residual, list(start), [*LOW, 0.05], [*HIGH, 1.45])
        return constants(found) | {"heads": [float(rows.heads.min()), float(rows.heads.max())]}


def fit_case(
    rows: pd.DataFrame, fitter: Fitter, known: dict | None = None
) -> tuple[dict, np.ndarray, pd.DataFrame]:
    """Returns (constants with their bands, signed errors of the rows left out, those rows).

    A head_dim with OWN rows or more gets constants of its own beside those of all. `known` are the
    efficiencies of the same kernel without a window.
    """
    rows = rows.assign(
        head=[head_name(*p) for p in zip(rows.head_dim, rows.head_dim_v, strict=True)]
    )
    out = held_out(rows["key"].tolist())
    if out.sum() < 5 or (~out).sum() < 10:
        out = np.zeros(len(rows), dtype=bool)
    train, known = rows[~out], known or {}
    values = fitter.fit_all(train, known)
    dims = values.get("dim", {})
    few = [head for head, own in dims.items() if "heads" in own]
    many = train[~train["head"].isin(few)]
    values |= bands(in_turn(many, fitter, known), many)
    for head in few:
        rows_of = train[train["head"] == head]
        dims[head] |= bands(heads_in_turn(rows_of, fitter, dims[head.partition("x")[2]]), rows_of)
    test = rows[out] if out.any() else rows
    error = fitter.seconds(test, values) / _seconds(test) - 1.0
    return values, error, test


def in_turn(rows: pd.DataFrame, fitter: Fitter, known: dict) -> np.ndarray:
    """Returns the signed errors of rows by constants that were fitted on other configurations."""
    fold = folds(rows["key"].to_numpy(str), FOLDS)
    said = np.empty(len(rows))
    for which in range(FOLDS):
        here = fold == which
        if not here.any() or here.all():  # a single configuration
            return fitter.seconds(rows, fitter.fit_all(rows, known)) / _seconds(rows) - 1.0
        said[here] = fitter.seconds(rows[here], fitter.fit_all(rows[~here], known))
    return said / _seconds(rows) - 1.0


def heads_in_turn(rows: pd.DataFrame, fitter: Fitter, like: dict) -> np.ndarray:
    """Returns the signed errors of rows by constants that were fitted to other numbers of heads."""
    said = np.empty(len(rows))
    for heads in set(rows.heads):
        here = (rows.heads == heads).to_numpy()
        said[here] = fitter.seconds(rows[here], fitter.fit_like(rows[~here], like))
    return said / _seconds(rows) - 1.0


def _seconds(rows: pd.DataFrame) -> np.ndarray:
    return rows.latency_ms.to_numpy(float) * 1e-3


def bands(error: np.ndarray, rows: pd.DataFrame) -> dict:
    """Returns the 90 % interval factors by length."""
    long = (rows.seq_q >= LONG).to_numpy()
    return {
        name: float(np.exp(np.quantile(np.abs(np.log1p(error[which])), 0.9)))
        for name, which in (("band_long", long), ("band", ~long))
        if which.sum() >= 10
    }


def tables(data: Path) -> pd.DataFrame:
    """Returns the inference tables in our names, with the key of the split."""
    adapters = (aic_attention_context, aic_attention_encoder, aic_mla_context)
    rows = pd.concat([adapter(data / "ops") for adapter in adapters], ignore_index=True)
    rows = rows.assign(
        seq_kv=rows.seq_q, window=rows.window.fillna(0.0), latency_ms=1e-3 * rows.latency_us,
        head_dim_v=rows.head_dim_v.fillna(rows.head_dim),
    )  # fmt: skip
    integers = ["heads", "kv_heads", "head_dim", "head_dim_v", "seq_q", "batch"]
    rows[integers] = rows[integers].astype(int)
    rows["case"] = np.select(
        [rows.causal == 0, (rows.window > 0) & (rows.window < rows.seq_q), rows.window == 0],
        ["full", "window", "causal"], "",
    )  # fmt: skip
    shape = zip(rows.heads, rows.kv_heads, rows.head_dim, strict=True)
    rows["key"] = [f"{h}_{k}_{d}" for h, k, d in shape]
    return rows


def cudnn(data: Path) -> pd.DataFrame:
    """Returns the rows without a window of the cuDNN table, in our names."""
    rows = pd.read_parquet(data / "ops/cudnn_sdpa_fwd_bwd.parquet")
    rows = rows[rows.sliding_window_size.isna()].astype({"data_type": str})
    rows = rows.rename(
        columns={"batch_size": "batch", "q_seqlen": "seq_q", "kv_seqlen": "seq_kv",
                 "num_q_heads": "heads", "num_kv_heads": "kv_heads", "head_dim_qk": "head_dim",
                 "head_dim_vo": "head_dim_v"}
    )  # fmt: skip
    rows["causal"] = (rows.attn_mask.astype(str) == "top_left").astype(float)
    rows["window"] = 0.0
    rows["key"] = [f"{m}_{s}" for m, s in zip(rows.model_name.astype(str), rows.seq_q, strict=True)]
    return rows


def report(name: str, case: str, error: np.ndarray, rows: pd.DataFrame) -> str:
    """Prints the errors of the rows left out; returns them in words."""
    size, long = np.abs(error), (rows.seq_q >= LONG).to_numpy()
    words = f"{100 * size[long].mean():.1f} % for s >= 2048, {100 * size.mean():.1f} % for all"
    sys.stdout.write(f"{name:36s} {case:16s} {len(rows):5d} rows left out: {words}\n")
    sys.stdout.flush()
    return words


def table_entries(data: Path) -> Iterator[str]:
    """Yields the TOML of the kernels of the inference tables."""
    every = tables(data)
    for system, (name, patterns, generation) in SYSTEMS.items():
        device = find_device(name)
        here = every[every.system == system]
        for source, vit, kernel in KERNELS:
            rows = here[here["stack"] == np.where(here.case == "full", vit, source)]
            found, words = {}, []
            for case, dtype in CASES:
                part = rows[(rows.case == case) & (rows.dtype == dtype)]
                if len(part) < LEAST:
                    continue
                name_of = case if dtype == "bf16" else f"{case}_fp8"
                causal = found.get(name_of.replace("window", "causal"))
                same = case == "window" and causal and kernel not in OWN_WINDOW
                known = causal["e"] if same else None
                fitter = Fitter(device, 1.0, kernel)
                values, error, test = fit_case(part, fitter, known=known)
                said = report(f"{name} {kernel}", name_of, error, test)
                words.append(f"{name_of}: {said}")
                found[name_of] = values
            if found:
                yield entry(
                    kernel, [n for n in (source, vit) if n], patterns, generation, found,
                    "NVIDIA aiconfigurator tables; mean error of left-out head configurations "
                    + "; ".join(words),
                )  # fmt: skip


def cudnn_entries(data: Path) -> Iterator[str]:
    """Yields the TOML of cuDNN, forward and backward, with and without determinism."""
    rows, device = cudnn(data), find_device("gb200")
    for kernel, deterministic in (("cudnn", False), ("cudnn-deterministic", True)):
        found, words = {}, []
        for low, causal, way in itertools.product(("", "_fp8"), (1.0, 0.0), ("fwd", "bwd")):
            part = rows[(rows.causal == causal) & (rows.profile_pass.astype(str) == way)]
            part = part[part.data_type == ("fp8" if low else "bfloat16")]
            if way == "bwd":
                part = part[part.deterministic_bwd == (deterministic and not low)]
            case = ("causal" if causal else "full") + low + ("_backward" if way == "bwd" else "")
            fitter = Fitter(device, BACKWARD_FLOPS if way == "bwd" else 1.0)
            found[case], error, test = fit_case(part, fitter)
            said = report(f"gb200 {kernel}", case, error, test)
            words.append(f"{case}: {said}")
        yield entry(
            kernel, [], ["gb200*", "gb300*", "b200*", "b300*"], "blackwell", found,
            "cuDNN 1.21 on GB200 (cudnn-frontend benchmark); mean error of left-out shapes "
            + "; ".join(words),
        )  # fmt: skip


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
