"""How rows of measured operators are grouped: size class, shape key, what was left out of fits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal

from foretrain.program import ComputeEvent
from foretrain.validation.ops.predict import OpOutcome

#: Shape columns that decide together whether a row takes part in fits: never the one that grids
#: sweep (m, batch, sequence, tokens), because its neighbours on both sides would stay in.
KEYS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("n", "k"),
    "attention": ("heads", "kv_heads", "head_dim"),
    "conv2d": ("c", "k", "h"),
    "moe_gemm": ("hidden", "ffn"),
    "embedding_bag": ("rows", "dim"),
}
Part = Literal["all", "fitted", "left-out"]


def shape_key(op: str, shape: Mapping[str, float]) -> str:
    """Returns the key that is left out whole, e.g. "4096_11008" of a GEMM's n and k."""
    return "_".join(f"{shape.get(name, 0.0):g}" for name in KEYS.get(op, ("cols",)))


def is_left_out(key: str) -> bool:
    """Returns whether the rows of a shape key take no part in fits: one key in three, by CRC-32."""
    return zlib.crc32(key.encode()) % 3 == 0


def size_class(event: ComputeEvent) -> str:
    """Returns the size class of an operator, e.g. "big" for a GEMM with m, n and k of 1024."""
    shape = dict(event.shape)
    if event.op == "gemm":
        if min(shape["m"], shape["n"], shape["k"]) >= 1024:
            return "big"
        return "m >= 128" if shape["m"] >= 128 else "m < 128"
    if event.op == "attention":
        return "s >= 2048" if shape["seq_q"] >= 2048 else "s < 2048"
    if event.op == "conv2d":
        return "over 5 GFLOP" if event.flops > 5e9 else "small"
    if event.op == "moe_gemm":
        return "tokens >= 1024" if shape["tokens"] >= 1024 else "tokens < 1024"
    return "over 16 MB" if event.bytes > 16e6 else "small"


def same_work(outcome: OpOutcome) -> tuple[object, ...]:
    """Returns what rows of the same device and work share, whatever kernel ran it."""
    row = outcome.row
    return (outcome.device, outcome.op, row.part, row.dtype, row.launch_included, outcome.events)
