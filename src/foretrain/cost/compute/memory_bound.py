"""Memory-bound operators: bytes over bandwidth, with a share of the bytes served by L2.

    T = kernels t0 + D (1 + m/2) / (B e_d) ((1 - f) + f / l2_ratio) + rows r / SM
    f = 1 where D/kernels < (x - w) L2, 0 where it is > (x + w) L2, linear in between
    m = 1/2 + log4(SM blocks row / L2), between 0 and 1: LayerNorm reads its rows twice

D is what an ideally fused kernel reads and writes, times what the stack's kernels move beyond it
(`Stack.eager_bytes`). Its operands are found in L2 within a step, where they were just written,
if they fit; tables of isolated operators (`Machine.warm` is off) flush it. The share e_d depends
on the operator, its direction and, for softmax, on whether a row fits into the registers of a
block. LayerNorm takes a block per row, which costs an SM the time r beside its bytes; its second
pass finds in L2 what of the rows in flight fits there. Constants:
catalog/calibration/memory.toml, from studies/costs/memory.py. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.hardware.device import Device
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

Array = NDArray[np.float64]

#: Operators that move data and compute next to nothing, by the name of their cost model.
OPS = frozenset(
    {
        "elementwise", "gelu", "gelu_new", "relu", "relu6", "hardswish", "sigmoid", "class_loss",
        "silu", "swiglu", "geglu", "rotary", "dropout", "residual",
        "bias_dropout_add", "bias", "scale", "softmax", "layernorm", "rmsnorm", "batchnorm",
        "embedding", "position", "cross_entropy", "ce_max", "ce_exp", "ce_sum", "ce_target",
        "ce_loss", "max", "sum_exp", "target_gather", "loss", "reduction", "cast", "grad_add",
        "copy", "zero", "transpose", "concat", "split", "pool", "bias_grad", "permute", "topk",
        "select", "scatter", "score_bias", "softcap", "triangle", "cross", "bce_loss", "mse_loss",
        "interaction",
    }
)  # fmt: skip

#: Half-width of the fall from L2 to DRAM over the size of L2 (gpu-benches: A100 .72 to 1.3, H100
#: .72 to 1.25).
L2_WIDTH = 0.3
#: Norms that read their rows twice, a block of so many threads each.
NORMS, BLOCK = frozenset({"layernorm", "rmsnorm"}), 128.0

#: Operators that reduce over rows, known less well than plain passes over memory.
ROWS = frozenset({"softmax", "layernorm", "rmsnorm", "batchnorm", "cross_entropy"})
#: Names that share the bandwidth of another operator.
_LIKE = {
    "gelu_new": "gelu",
    "max": "cross_entropy",
    "sum_exp": "cross_entropy",
    "target_gather": "cross_entropy",
    "loss": "cross_entropy",
    "class_loss": "cross_entropy",
}


def memory_seconds(
    num_bytes: Array,
    *,
    kernels: Array | float,
    share: Array | float,
    bandwidth: float,
    l2_bytes: float,
    constants: Mapping[str, Any],
) -> Array:
    """Returns the seconds to move `num_bytes` in `kernels` launches at `share` of `bandwidth`."""
    per_kernel = np.maximum(num_bytes / np.maximum(kernels, 1.0), 1.0)
    hit = np.zeros(per_kernel.shape)
    if l2_bytes > 0.0:
        over = per_kernel / l2_bytes - float(constants["l2_share"])
        hit = np.clip(0.5 - over / (2.0 * L2_WIDTH), 0.0, 1.0)
    slow = (1.0 - hit) + hit / float(constants["l2_ratio"])
    floor = kernels * float(constants["t0_us"]) * 1e-6
    return floor + num_bytes * slow / (bandwidth * share)


def constants_for(machine: Machine) -> Constants:
    """Returns the memory constants of the device."""
    found = find(load("memory")["entry"], machine.device)
    if found is None:
        raise InternalError("memory.toml has no default entry")
    return found


def stack_value(table: Mapping[str, float], op: str, direction: str, default: float = 1.0) -> float:
    """Returns what a stack says of an operator, or of all others under "*".

    "NAME_backward" goes before "NAME" in backward.
    """
    name = like(op)
    if direction != "forward":
        for key in (f"{op}_backward", f"{name}_backward"):
            if key in table:
                return float(table[key])
    return float(table.get(op, table.get(name, table.get("*", default))))


def like(op: str) -> str:
    """Returns the operator whose constants `op` shares."""
    return "cross_entropy" if op.startswith("ce_") else _LIKE.get(op, op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Times of operators of one kind: seconds, bytes moved, share of the bandwidth; launches."""

    seconds: Array
    moved: Array
    share: Array
    kernels: float


def column_seconds(
    op: str,
    dtype: str,
    direction: str,
    columns: Mapping[str, Array],
    machine: Machine,
    constants: Mapping[str, Any],
) -> Moved:
    """Returns the times of operators of one kind, dtype and direction.

    `columns`: bytes, rows and cols (0 where not known).
    """
    stack, device = machine.stack, machine.device
    launches = stack_value(stack.kernels, op, direction)
    kernels = max(1.0, launches) if launches > 0.0 else 0.0
    half = dtype in ("fp16", "bf16")
    table = {**stack.eager_bytes, **stack.autocast_bytes} if half else stack.eager_bytes
    more = _passes(op, direction) * stack_value(table, op, direction)
    moved = columns["bytes"] * (more if kernels else 0.0)
    share = _share(op, direction, columns["cols"], constants)
    if half:  # of kernels that load one element per thread
        share = share * stack.half_share
    again, rows_s = np.ones(1), np.zeros(1)
    if op in NORMS and direction == "forward" and kernels == 1.0:
        threads = float(constants.get("sm_threads", 2048.0))
        again = second_pass(columns["cols"] * dtype_bytes(dtype), device, threads)
        rows_s = columns["rows"] * 1e-9 * float(constants.get("row_ns", 0.0)) / device.sm_count
    seconds = rows_s + memory_seconds(
        moved * again,
        kernels=kernels,
        share=share,
        bandwidth=device.memory_bandwidth,
        l2_bytes=device.l2_bytes if machine.warm else 0.0,
        constants=constants,
    )
    return Moved(seconds=seconds, moved=moved, share=share, kernels=kernels)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of memory-bound events."""
    found = constants_for(machine)
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for i, event in enumerate(events):
        kinds.setdefault((event.op, event.dtype, event.direction), []).append(i)
    answers: dict[int, Answer] = {}
    for (op, dtype, direction), indices in kinds.items():
        columns = {
            "bytes": np.array([events[i].bytes for i in indices]),
            "rows": np.array([events[i].get("rows") for i in indices]),
            "cols": np.array([events[i].get("cols") for i in indices]),
        }
        times = column_seconds(op, dtype, direction, columns, machine, found.values)
        answers.update(zip(indices, _answers(op, times, found), strict=True))
    return [answers[i] for i in range(len(events))]


def _answers(op: str, times: Moved, found: Constants) -> Iterator[Answer]:
    t0 = found.number("t0_us") * 1e-6
    factor, kernels = band(op, found), times.kernels
    for seconds, moved, share in zip(times.seconds, times.moved, times.share, strict=True):
        yield Answer(
            value_s=float(seconds),
            latency_s=kernels * t0,
            factor=factor,
            kernels=kernels,
            family="memory",
            provenance=found.provenance,
            formula=f"{op}: {kernels:g} t0 + D/(B e), D {moved / 1e6:.3g} MB, e {share:.2f}, "
            f"t0 {t0 * 1e6:g} us",
        )


def band(op: str, found: Constants) -> float:
    """Returns the interval factor of an operator."""
    return width(found.row, "memory_rows" if like(op) in ROWS else "memory")


def second_pass(row_bytes: Array, device: Device, sm_threads: float) -> Array:
    """Returns the bytes of norms over those of one pass, by the bytes of a row."""
    flight = device.sm_count * sm_threads / BLOCK * np.maximum(row_bytes, 1.0)
    if device.l2_bytes <= 0.0:
        return np.ones(flight.shape)
    return 1.0 + 0.5 * np.clip(0.5 + np.log(flight / device.l2_bytes) / log(4.0), 0.0, 1.0)


def _passes(op: str, direction: str) -> float:
    """What a kernel moves over reading every input and writing every output once."""
    word = op if direction == "forward" else f"{op}_backward"
    return float(load("memory")["passes"].get(word, 1.0))


def _share(op: str, direction: str, cols: Array, constants: Mapping[str, Any]) -> Array:
    """The share of the bandwidth: the operator's own, by direction and length of a row."""
    table = load("memory")
    name, own = like(op), constants.get("op", {})
    backward = direction != "forward"
    if backward and f"{name}_backward" in own:
        return np.full(cols.shape, float(own[f"{name}_backward"]))
    usual = float(constants["e_d"]) * float(table["relative"].get(name, 1.0))
    share = float(own.get(name, usual))
    long = float(own.get(f"{name}_long", share))
    factor = float(table["backward"].get(name, 1.0)) if backward else 1.0
    return factor * np.where(cols > table["rules"]["long_columns"], long, share)
