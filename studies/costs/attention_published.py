"""Fits the attention kernels that people train with to published benchmarks.

    python studies/costs/attention_published.py [--write]

Inference tables time other builds of a kernel (paged keys, a cache to write) and no backward. What
the authors and users of FlashAttention and cuDNN published of the kernels themselves stands in
published_attention.csv, a citation per row. Every series (kernel, direction, mask, head_dim) has
one number of tokens and one width, so it shows the share of the peak and the length at which it is
reached, and no more: e and k0 are fitted, the others are set (FIXED). Backward has one set for both
masks, because causal backward was published at one length. Prints, per series, the error at each
length, and at 2,048 and more where the series at the other head dims alone give k0 and the rest.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attention_text import entry
from least_squares import fit

from foretrain.cost.compute.attention import BACKWARD_FLOPS, attention_seconds
from foretrain.hardware import find_device

FOLDER = Path(__file__).parent
FITTED = FOLDER.parents[1] / "src/foretrain/catalog/calibration/attention_published.toml"
#: What one number of tokens and one width cannot tell: operands that stream in under the products,
#: waves that overlap by half, a launch. Of e_b 0.7 to 1 and g 0.1 to 0.5 these left the least error
#: at 512 tokens, where traffic shows.
FIXED = {"e_b": 0.95, "t0_us": 8.0, "q": 0.5, "g": 0.1, "a": 1.0, "p": 0.0005, "tile": 128.0}
#: Device of the rows -> patterns and generations of the entry.
WHERE: dict[str, tuple[list[str], str]] = {
    "h100-sxm": (["h100*", "h200*", "gh200*", "h800*"], "hopper"),
}
#: Fewest points of a case that are fitted.
LEAST = 4

Row = dict[str, Any]


def published() -> list[Row]:
    """Returns the rows of the table, with the seconds of a call.

    FLOP are counted as the benchmarks do: 4 b s^2 h d, half with a causal mask, 2.5 times backward.
    """
    rows: list[Row] = []
    with (FOLDER / "published_attention.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = {n: float(row[n]) for n in ("causal", "batch", "seq", "heads", "head_dim")}
            flop = 4.0 * numbers["batch"] * numbers["seq"] ** 2
            flop *= numbers["heads"] * numbers["head_dim"] * (0.5 if numbers["causal"] else 1.0)
            flop *= BACKWARD_FLOPS if row["direction"] == "backward" else 1.0
            rows.append({**row, **numbers, "seconds": flop / (float(row["tflops"]) * 1e12)})
    return rows


def predicted(rows: Sequence[Row], values: dict[str, Any]) -> np.ndarray:
    """Returns the seconds of rows of one device and direction by some constants."""
    device = find_device(rows[0]["device"])
    column = {name: np.array([row[name] for row in rows]) for name in rows[0] if name in SAME}
    shape = {ours: column[theirs] for ours, theirs in SHAPE.items()}
    return attention_seconds(
        {**shape, "window": np.zeros(len(rows))},
        peak=device.peak_flops["bf16"],
        bandwidth=device.memory_bandwidth,
        sms=device.sm_count,
        constants=values,
        work=BACKWARD_FLOPS if rows[0]["direction"] == "backward" else 1.0,
    )


SHAPE = {
    "batch": "batch", "seq_q": "seq", "seq_kv": "seq", "heads": "heads", "kv_heads": "heads",
    "head_dim": "head_dim", "head_dim_v": "head_dim", "causal": "causal",
}  # fmt: skip
SAME = frozenset(SHAPE.values())


def fit_case(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the constants of the rows of one case: k0, and e of each head_dim."""
    measured = np.array([row["seconds"] for row in rows])
    dims = sorted({row["head_dim"] for row in rows})

    def constants(values: np.ndarray) -> dict[str, Any]:
        e = {f"{dim:g}": float(x) for dim, x in zip(dims, values[1:], strict=True)}
        return FIXED | {"k0": float(values[0]), "e": e}

    def residual(values: np.ndarray) -> np.ndarray:
        return np.log(predicted(rows, constants(values)) / measured)

    count = len(dims)
    found, _ = fit(residual, [60.0, *[0.5] * count], [0.5, *[0.05] * count], [1e3, *[1.45] * count])
    return constants(found)


def left_out(rows: Sequence[Row], values: dict[str, Any]) -> float:
    """Returns the mean error of each third row by constants of the others (nan: too few)."""
    out = [row for i, row in enumerate(rows) if i % 3 == 1]
    rest = [row for i, row in enumerate(rows) if i % 3 != 1]
    if len(rest) < LEAST or {r["head_dim"] for r in rest} != {r["head_dim"] for r in rows}:
        return float("nan")
    error = predicted(out, fit_case(rest)) / np.array([row["seconds"] for row in out]) - 1.0
    return float(np.abs(error).mean())


def with_band(values: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the constants with their 90 % intervals, from the rows that they were fitted to.

    Never narrower than BAND: two publications of one kernel on one device differ by that much.
    """
    error = np.abs(np.log(predicted(rows, values) / np.array([row["seconds"] for row in rows])))
    long = np.array([row["seq"] >= 2048 for row in rows])
    for name, which in (("band_long", long), ("band", ~long)):
        inner = float(np.quantile(error[which], 0.9)) if which.any() else 0.0
        values[name] = max(BAND, float(np.exp(inner)))
    return values


#: FlashAttention-3 backward: 559 TFLOP/s in the paper, 554 in a pull request; forward of
#: FlashAttention-2, causal: 333 and 284.
BAND = 1.2


def main() -> None:
    """Fits everything; writes the file if told to."""
    rows = published()
    text = [
        "# Attention constants, written by studies/costs/attention_published.py: do not edit.\n"
        "#\n# Laid out as attention_fitted.toml; sources: studies/costs/published_attention.csv.\n"
    ]
    for device, kernel in sorted({(row["device"], row["kernel"]) for row in rows}):
        here = [row for row in rows if (row["device"], row["kernel"]) == (device, kernel)]
        found: dict[str, dict[str, Any]] = {}
        words = []
        for case, direction, masks in (
            ("causal", "forward", (1.0,)),
            ("full", "forward", (0.0,)),
            ("causal_backward", "backward", (0.0, 1.0)),
        ):
            part = [r for r in here if r["direction"] == direction and r["causal"] in masks]
            if len(part) < LEAST:
                continue
            found[case] = with_band(fit_case(part), part)
            error = predicted(part, found[case]) / np.array([r["seconds"] for r in part]) - 1.0
            said = f"{case} {100 * np.abs(error).mean():.1f} %"
            out = left_out(part, found[case])
            said += f" ({100 * out:.1f} % of rows left out)" if np.isfinite(out) else ""
            words.append(said)
            sys.stdout.write(f"{device} {kernel} {said}; worst {100 * np.abs(error).max():.0f} %\n")
        if not found:
            continue
        lacking(found)
        patterns, generation = WHERE[device]
        sources = "; ".join(sorted({row["source"] for row in here}))
        about = f"{sources}. Mean error of the rows: {', '.join(words)}"
        text.append(entry(kernel, [], patterns, generation, found, about))
    if "--write" in sys.argv:
        FITTED.write_text("\n".join(text), encoding="utf-8")


def lacking(found: dict[str, dict[str, Any]]) -> None:
    """Gives the causal mask the head dims that were published without a mask only."""
    if "causal" not in found or "full" not in found:
        return
    causal, full = found["causal"]["e"], found["full"]["e"]
    ratio = causal["128"] / full["128"]
    found["causal"]["e"] = {dim: causal.get(dim, ratio * e) for dim, e in full.items()}


if __name__ == "__main__":
    main()
