"""Units: seconds, bytes, FLOP inside; parsing and printing at the edges.

1 GB = 1e9 bytes, 1 GiB = 2**30 bytes, one multiply-add = 2 FLOP.
"""

from __future__ import annotations

GIB = 2**30
MIB = 2**20
GB = 1e9
US = 1e-6

#: Bytes of one element. `fp32` never means TF32; TF32 is a way to compute, stored in 4 bytes.
DTYPE_BYTES: dict[str, float] = {
    "fp32": 4.0,
    "tf32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4.0 / 128.0,  # one fp32 scale for 128 elements
    "mxfp8": 1.0 + 1.0 / 32.0,  # one scale byte for 32 elements
    "nvfp4": 0.5 + 1.0 / 16.0,  # one fp8 scale for 16 elements
    "int64": 8.0,
    "int32": 4.0,
    "uint8": 1.0,
    "bool": 1.0,
}

#: Dtypes a run may compute in.
COMPUTE_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")


def dtype_bytes(dtype: str) -> float:
    """Returns the bytes of one element of `dtype` (scales included for block formats)."""
    return DTYPE_BYTES[dtype]


def format_seconds(seconds: float) -> str:
    """Returns a time in the unit a person would choose, e.g. '13.8 s', '412 ms', '7.1 us'."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:,.0f} s"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_bytes(value: float) -> str:
    """Returns a size in powers of 1000, as nccl-tests counts, e.g. '134 MB', '16.4 kB', '4 B'."""
    return _with_prefix(value) + "B"


def format_flop(value: float) -> str:
    """Returns floating-point operations with a unit, e.g. '68.7 GFLOP'."""
    return _with_prefix(value) + "FLOP"


def _with_prefix(value: float) -> str:
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "


def format_count(value: float) -> str:
    """Returns a count with a unit prefix, e.g. '70.6 B' parameters or '1.2 k' tokens."""
    for scale, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
