"""The optimizer step: bytes per parameter at the bandwidth of multi-tensor kernels.

A fused Adam with fp32 master and gradients moves 30 bytes per parameter; a `foreach` one makes
about ten passes over the same tensors; a per-tensor loop launches a dozen kernels per tensor.
The event's bytes are those of the fused kernel. Constants: [optimizer] of
catalog/calibration/memory.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import load
from foretrain.cost.compute.memory_bound import constants_for, memory_seconds
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent

#: Operators of the optimizer phase, by the name of their cost model.
OPS = frozenset(
    {
        "optimizer", "adam", "adamw", "sgd", "grad_norm", "grad_clip", "grad_scale", "zero_grad",
        "weight_copy", "weight_parts",
    }
)  # fmt: skip
_STEPS = frozenset({"optimizer", "adam", "adamw", "sgd"})


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of optimizer events (shape params, optional tensors; bytes given)."""
    found = constants_for(machine)
    rules = load("memory")["optimizer"]
    answers: list[Answer] = []
    for event in events:
        kernels, more = _launches(event, machine.stack.optimizer, rules)
        seconds = memory_seconds(
            np.array([event.bytes * more]),
            kernels=kernels,
            share=found.number("multi_tensor"),
            bandwidth=machine.device.memory_bandwidth,
            l2_bytes=0.0,  # states were last touched a step ago
            constants=found.values,
        )
        answers.append(
            Answer(
                value_s=float(seconds[0]),
                latency_s=kernels * found.number("t0_us") * 1e-6,
                factor=width(found.row, "memory"),
                kernels=kernels,
                family="memory",
                provenance=found.provenance,
                formula=(
                    f"{machine.stack.optimizer} {event.op}: D/(B e), D "
                    f"{event.bytes * more / 1e9:.3g} GB, e {found.number('multi_tensor'):.2f}"
                ),
            )
        )
    return answers


def _launches(event: ComputeEvent, kind: str, rules: dict[str, float]) -> tuple[float, float]:
    """Returns (kernel launches, bytes over those of the fused kernel)."""
    if event.op == "weight_parts":
        return event.get("copies"), 1.0
    fused = float(rules["fused_launches"])
    if event.op not in _STEPS or kind == "fused":
        return fused, 1.0
    if kind == "foreach":
        return float(rules["foreach_launches"]), float(rules["foreach_bytes"])
    guess = ceil(event.get("params", 0.0) / rules["parameters_per_tensor"])
    tensors = event.get("tensors", max(1.0, guess))
    return tensors * rules["loop_launches_per_tensor"], float(rules["loop_bytes"])
