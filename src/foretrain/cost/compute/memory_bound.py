"""Memory-bound operators: bytes over bandwidth, with a share of the bytes served by L2.

    T = kernels t0 + D (1 - f) / (B e_d) + D f / (B e_d l2_ratio),   f = min(1, x L2 / (D/kernels))

D is what an ideally fused kernel reads and writes, times what the stack's kernels move beyond it
(`Stack.eager_bytes`). The share e_d depends on the operator, its direction and, for norms and
softmax, on whether a row fits into the registers of a block. Constants:
catalog/calibration/memory.toml, from studies/costs/memory.py. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent

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
    hit = np.minimum(1.0, float(constants["l2_share"]) * l2_bytes / per_kernel)
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
    if not machine.warm and "l2_repeat" in constants:
        ratio = load("memory")["rules"]["repeat_ratio"]
        constants = {**constants, "l2_share": constants["l2_repeat"], "l2_ratio": ratio}
    launches = [stack_value(stack.kernels, e) for e in events]
    kernels = np.array([max(1.0, n) if n > 0.0 else 0.0 for n in launches])
    moved = np.array(
        [
            e.bytes * _passes(e) * stack_value(stack.eager_bytes, e) if n > 0.0 else 0.0
            for e, n in zip(events, launches, strict=True)
        ]
    )
    share = np.array([_share(e, constants) * _half(e, stack.half_share) for e in events])
    seconds = memory_seconds(
        moved,
        kernels=kernels,
        share=share,
        bandwidth=machine.device.memory_bandwidth,
        l2_bytes=machine.device.l2_bytes,
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
