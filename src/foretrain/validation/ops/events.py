"""A row of the table becomes the events that the compiler would have made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from foretrain.cost.model import PROVIDERS
from foretrain.program import ComputeEvent
from foretrain.units import DTYPE_BYTES, dtype_bytes
from foretrain.validation.ops.table import OpRow

#: What tables call a dtype -> its name here.
DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float8": "fp8", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "e4m3": "fp8", "fp4": "nvfp4",
    "fp8_per_tensor": "fp8", "": "bf16",
}  # fmt: skip
#: What tables call an operator -> the name of its cost model.
OPS: Mapping[str, str] = {
    "matmul": "gemm", "linear": "gemm", "mm": "gemm", "bmm": "gemm", "conv": "conv2d",
    "convolution": "conv2d", "grouped_gemm": "moe_gemm", "moe": "moe_gemm", "sdpa": "attention",
    "flash_attention": "attention", "add": "elementwise", "mul": "elementwise",
    "div": "elementwise", "pow": "elementwise", "sub": "elementwise", "tanh": "elementwise",
    "layer_norm": "layernorm", "rms_norm": "rmsnorm", "batch_norm": "batchnorm", "rope": "rotary",
    "act": "gelu", "activation": "gelu", "crossentropy": "cross_entropy",
}  # fmt: skip
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch", "seq_q", "heads", "head_dim"),
    "conv2d": ("n", "c", "h", "w", "k", "r", "s"),
    "moe_gemm": ("tokens", "hidden", "ffn", "experts", "topk"),
    "embedding_bag": ("batch", "rows", "dim"),
}
#: Tensors that an ideally fused kernel reads and writes: (forward, backward). Others: (2, 3).
_OPERANDS: Mapping[str, tuple[float, float]] = {
    "elementwise": (3.0, 3.0), "swiglu": (3.0, 5.0), "geglu": (3.0, 5.0), "residual": (3.0, 2.0),
    "cross_entropy": (1.0, 2.0), "copy": (2.0, 2.0), "cast": (2.0, 2.0), "transpose": (2.0, 2.0),
    "rotary": (2.0, 2.0), "dropout": (2.0, 2.0), "embedding": (2.0, 2.0), "zero": (1.0, 1.0),
    "reduction": (1.0, 1.0), "bias_grad": (1.0, 1.0), "scale": (2.0, 2.0), "bias": (2.0, 1.0),
}  # fmt: skip
#: Columns that count things: no operator has half of one.
_WHOLE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("b", "m", "n", "k"),
    "attention": (
        "batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v", "window",
    ),
    "conv2d": ("n", "c", "h", "w", "k", "r", "s", "stride", "padding", "groups", "oh", "ow"),
    "moe_gemm": ("tokens", "hidden", "ffn", "experts", "topk", "ep", "tp"),
    "embedding_bag": ("batch", "rows", "tables", "dim"),
}  # fmt: skip
_SWITCHES: Mapping[str, str] = {"attention": "causal", "moe_gemm": "gated"}

Direction = Literal["forward", "backward", "backward_input", "backward_weight"]


class Unsupported(Exception):  # noqa: N818 - no error of ours: the reason why a row has no price
    """Says why a row cannot be priced."""


def op_of(row: OpRow) -> str:
    """Returns the cost model of a row's operator; Unsupported when there is none."""
    op = OPS.get(row.op, row.op)
    if op not in PROVIDERS:
        raise Unsupported(f"operator {row.op!r} has no cost model" if row.op else "no operator")
    return op


def dtype_of(row: OpRow) -> str:
    """Returns the dtype of a row under our name; Unsupported when it is none of ours."""
    dtype = DTYPES.get(row.dtype, row.dtype)
    if dtype not in DTYPE_BYTES:
        raise Unsupported(f"dtype {row.dtype!r} is not modelled")
    return dtype


def events_of(row: OpRow) -> tuple[ComputeEvent, ...]:
    """Returns the events whose times add up to the row's; Unsupported says what is missing."""
    if row.unreadable:
        raise Unsupported(f"unreadable: {', '.join(row.unreadable)}")
    op, dtype = op_of(row), dtype_of(row)
    needs = _NEEDS.get(op, ("rows",))
    missing = [key for key in needs if row.shape.get(key, 0.0) <= 0.0]
    if missing:
        raise Unsupported(f"{op} needs {', '.join(missing)}")
    fault = _contradiction(op, row.shape)
    if fault:
        raise Unsupported(fault)
    maker = {"gemm": _gemm, "attention": _attention, "conv2d": _conv2d, "moe_gemm": _moe}.get(op)
    directions = _directions(row.part, two=op in ("gemm", "conv2d"))
    if maker is not None:
        return tuple(maker(row.shape, dtype, direction) for direction in directions)
    return tuple(_memory(row, op, dtype, direction) for direction in directions)


def _contradiction(op: str, shape: Mapping[str, float]) -> str:
    """Returns why no operator has such a shape, or an empty text."""
    pairs = {
        "attention": (("heads", "kv_heads"),),
        "conv2d": (("c", "groups"), ("k", "groups")),
        "moe_gemm": (("experts", "ep"), ("ffn", "tp")),
    }
    broken = [key for key in _WHOLE.get(op, ()) if shape.get(key, 0.0) % 1.0]
    if broken:
        return f"{op}: {broken[0]} {shape[broken[0]]:g} is no whole number"
    switch = _SWITCHES.get(op, "")
    if shape.get(switch, 0.0) not in (0.0, 1.0):
        return f"{op}: {switch} {shape[switch]:g} is neither 0 nor 1"
    if op == "conv2d" and shape.get("stride", 1.0) < 1.0:
        return f"conv2d: stride {shape['stride']:g} is below 1"
    for whole, part in pairs.get(op, ()):
        if shape.get(part, 0.0) > 0.0 and shape[whole] % shape[part]:
            return f"{op}: {part} {shape[part]:g} does not divide {whole} {shape[whole]:g}"
    if op == "moe_gemm" and shape["topk"] > shape["experts"]:
        return f"moe_gemm: topk {shape['topk']:g} of {shape['experts']:g} experts"
    return ""


def _directions(part: str, *, two: bool) -> tuple[Direction, ...]:
    """Contractions have two backward kernels, one per operand."""
    if part == "backward_input":
        return ("backward_input",)
    if part == "backward_weight":
        return ("backward_weight",)
    if part == "forward":
        return ("forward",)
    backward: tuple[Direction, ...] = ("backward_input", "backward_weight")
    if not two:
        backward = ("backward",)
    return backward if part == "backward" else ("forward", *backward)


def _event(
    op: str,
    dtype: str,
    direction: Direction,
    shape: Mapping[str, float],
    flops: float,
    moved: float,
) -> ComputeEvent:
    return ComputeEvent(
        op=op,
        direction=direction,
        dtype=dtype,
        shape=tuple(shape.items()),
        flops=flops,
        bytes=moved,
    )


def _gemm(given: Mapping[str, float], dtype: str, direction: Direction) -> ComputeEvent:
    b, m, n, k = given.get("b", 1.0) or 1.0, given["m"], given["n"], given["k"]
    if direction == "backward_input":
        n, k = k, n
    elif direction == "backward_weight":
        m, n, k = n, k, m
    moved = dtype_bytes(dtype) * b * (m * k + k * n + m * n)
    shape = {"b": b, "m": m, "n": n, "k": k}
    return _event("gemm", dtype, direction, shape, 2.0 * b * m * n * k, moved)


def _attention(given: Mapping[str, float], dtype: str, direction: Direction) -> ComputeEvent:
    shape = {
        "batch": given["batch"],
        "seq_q": given["seq_q"],
        "seq_kv": given.get("seq_kv") or given["seq_q"],
        "heads": given["heads"],
        "kv_heads": given.get("kv_heads") or given["heads"],
        "head_dim": given["head_dim"],
        "head_dim_v": given.get("head_dim_v") or given["head_dim"],
        "causal": given.get("causal", 1.0),
        "window": given.get("window", 0.0),
    }
    pairs = shape["batch"] * shape["heads"] * shape["seq_q"] * shape["seq_kv"]
    flops = 2.0 * pairs * (shape["head_dim"] + shape["head_dim_v"])
    rows = shape["seq_q"] * shape["heads"] + shape["seq_kv"] * shape["kv_heads"]
    moved = dtype_bytes(dtype) * shape["batch"] * rows * 2.0 * shape["head_dim"]
    return _event("attention", dtype, direction, shape, flops, moved)


def _conv2d(given: Mapping[str, float], dtype: str, direction: Direction) -> ComputeEvent:
    stride, padding = given.get("stride") or 1.0, given.get("padding", 0.0)
    shape = {key: given[key] for key in ("n", "c", "h", "w", "k", "r", "s")}
    shape |= {"stride": stride, "padding": padding, "groups": given.get("groups") or 1.0}
    shape["oh"] = given.get("oh") or (given["h"] + 2 * padding - given["r"]) // stride + 1
    shape["ow"] = given.get("ow") or (given["w"] + 2 * padding - given["s"]) // stride + 1
    if min(shape["oh"], shape["ow"]) < 1:
        raise Unsupported("conv2d: the filter is larger than the padded image")
    out = given["n"] * given["k"] * shape["oh"] * shape["ow"]
    weights = given["c"] / shape["groups"] * given["r"] * given["s"]
    moved = given["n"] * given["c"] * given["h"] * given["w"] + out + given["k"] * weights
    return _event(
        "conv2d", dtype, direction, shape, 2.0 * out * weights, dtype_bytes(dtype) * moved
    )


def _moe(given: Mapping[str, float], dtype: str, direction: Direction) -> ComputeEvent:
    shape = {"ep": 1.0, "tp": 1.0, "gated": 1.0, "distribution": 0.0, "permute": 1.0, **given}
    work = given["tokens"] * given["topk"] * given["hidden"] * given["ffn"]
    return _event("moe_gemm", dtype, direction, shape, 6.0 * work, dtype_bytes(dtype) * work)


def _memory(row: OpRow, op: str, dtype: str, direction: Direction) -> ComputeEvent:
    """Rows x cols elements, `operands` tensors of that size (those of forward when both run)."""
    rows, cols = row.shape["rows"], row.shape.get("cols") or 1.0
    usual = _OPERANDS.get(op, (2.0, 3.0))
    backward = direction != "forward"
    operands = row.shape.get("operands") or usual[backward]
    if backward and row.part == "full" and row.shape.get("operands"):
        operands += usual[1] - usual[0]
    shape = {**row.shape, "rows": rows, "cols": cols, "operands": operands}
    elements = rows * cols
    return _event(op, dtype, direction, shape, elements, elements * operands * dtype_bytes(dtype))
