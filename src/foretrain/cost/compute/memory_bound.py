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

from collections.abc import Mapping, Sequence
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
        "elementwise", "gelu", "relu", "relu6", "hardswish", "sigmoid", "class_loss",
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


def stack_value(table: Mapping[str, float], event: ComputeEvent, default: float = 1.0) -> float:
    """Returns what a stack says of an operator, or of all others under "*".

    "NAME_backward" goes before "NAME" in backward.
    """
    name = like(event.op)
    if event.direction != "forward":
        for key in (f"{event.op}_backward", f"{name}_backward"):
            if key in table:
                return float(table[key])
    return float(table.get(event.op, table.get(name, table.get("*", default))))


def like(op: str) -> str:
    """Returns the operator whose constants `op` shares."""
    return "cross_entropy" if op.startswith("ce_") else _LIKE.get(op, op)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of memory-bound events."""
    found = constants_for(machine)
    stack, constants = machine.stack, found.values
    launches = [stack_value(stack.kernels, e) for e in events]
    kernels = np.array([max(1.0, n) if n > 0.0 else 0.0 for n in launches])
    moved = np.array(
        [
            e.bytes * _passes(e) * stack_value(stack.eager_bytes, e) if n > 0.0 else 0.0
            for e, n in zip(events, launches, strict=True)
        ]
    )
    share = np.array([_share(e, constants) * _half(e, stack.half_share) for e in events])
    again, rows_s = norm_extra(events, kernels, machine, constants)
    seconds = rows_s + memory_seconds(
        moved * again,
        kernels=kernels,
        share=share,
        bandwidth=machine.device.memory_bandwidth,
        l2_bytes=machine.device.l2_bytes if machine.warm else 0.0,
        constants=constants,
    )
    t0 = float(constants["t0_us"]) * 1e-6
    plain, rows = (width(found.row, family) for family in ("memory", "memory_rows"))
    return [
        Answer(
            value_s=float(seconds[i]),
            latency_s=float(kernels[i]) * t0,
            factor=rows if like(events[i].op) in ROWS else plain,
            kernels=float(kernels[i]),
            family="memory",
            provenance=found.provenance,
            formula=(
                f"{events[i].op}: {kernels[i]:g} t0 + D/(B e), D {moved[i] / 1e6:.3g} MB, "
                f"e {share[i]:.2f}, t0 {t0 * 1e6:g} us"
            ),
        )
        for i in range(len(events))
    ]


def second_pass(row_bytes: Array, device: Device, sm_threads: float) -> Array:
    """Returns the bytes of norms over those of one pass, by the bytes of a row."""
    flight = device.sm_count * sm_threads / BLOCK * np.maximum(row_bytes, 1.0)
    if device.l2_bytes <= 0.0:
        return np.ones(flight.shape)
    return 1.0 + 0.5 * np.clip(0.5 + np.log(flight / device.l2_bytes) / log(4.0), 0.0, 1.0)


def norm_extra(
    events: Sequence[ComputeEvent], kernels: Array, machine: Machine, constants: Mapping[str, Any]
) -> tuple[Array, Array]:
    """Returns (bytes over those of one pass, seconds of rows) of forward norms in one kernel."""
    again, seconds = np.ones(len(events)), np.zeros(len(events))
    chosen = [
        i
        for i, event in enumerate(events)
        if event.op in NORMS and event.direction == "forward" and kernels[i] == 1.0
    ]
    if chosen:
        sizes = [events[i].get("cols") * dtype_bytes(events[i].dtype) for i in chosen]
        rows = np.array([events[i].get("rows") for i in chosen])
        threads = float(constants.get("sm_threads", 2048.0))
        again[chosen] = second_pass(np.array(sizes), machine.device, threads)
        row_s = 1e-9 * float(constants.get("row_ns", 0.0))
        seconds[chosen] = rows * row_s / machine.device.sm_count
    return again, seconds


def _half(event: ComputeEvent, half_share: float) -> float:
    """What kernels that load one element per thread reach of the bandwidth at 16 bits."""
    return half_share if event.dtype in ("fp16", "bf16") else 1.0


def _passes(event: ComputeEvent) -> float:
    """What a kernel moves over reading every input and writing every output once."""
    passes = load("memory")["passes"]
    word = event.op if event.direction == "forward" else f"{event.op}_backward"
    return float(passes.get(word, 1.0))


def _share(event: ComputeEvent, constants: Mapping[str, Any]) -> float:
    """The share of the bandwidth: the operator's own, by direction and length of a row."""
    table = load("memory")
    name, own = like(event.op), constants.get("op", {})
    backward = event.direction != "forward"
    if backward and f"{name}_backward" in own:
        return float(own[f"{name}_backward"])
    usual = float(constants["e_d"]) * float(table["relative"].get(name, 1.0))
    share = float(own.get(name, usual))
    if event.get("cols") > table["rules"]["long_columns"]:
        share = float(own.get(f"{name}_long", share))
    return share * (float(table["backward"].get(name, 1.0)) if backward else 1.0)
