"""The optimizer step: bytes per parameter at the bandwidth of multi-tensor kernels.

A fused Adam with fp32 master and gradients moves 30 bytes per parameter; a `foreach` one makes
about ten passes over the same tensors; a per-tensor loop launches a dozen kernels per tensor.
The event's bytes are those of the fused kernel. Constants: [optimizer] of
catalog/calibration/memory.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, load
from foretrain.cost.compute.memory_bound import constants_for, memory_seconds
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent

Array = NDArray[np.float64]
#: Shape values that count.
SHAPE = ("params", "tensors", "copies")
#: Operators of the optimizer phase, by the name of their cost model.
OPS = frozenset(
    {
        "optimizer", "adam", "adamw", "sgd", "grad_norm", "grad_clip", "grad_scale", "zero_grad",
        "weight_copy", "weight_parts",
    }
)  # fmt: skip
_STEPS = frozenset({"optimizer", "adam", "adamw", "sgd"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Times of optimizer operators of one kind: seconds, bytes moved, launches."""

    seconds: Array
    moved: Array
    kernels: Array


def column_seconds(
    op: str, columns: Mapping[str, Array], machine: Machine, found: Constants
) -> Updates:
    """Returns the times of operators of one kind; columns bytes, params, tensors, copies.

    A column that is missing or nan in a row is not known there.
    """
    moved = columns["bytes"]
    kernels, more = _launches(op, columns, machine.stack.optimizer)
    seconds = memory_seconds(
        moved * more,
        kernels=kernels,
        share=found.number("multi_tensor"),
        bandwidth=machine.device.memory_bandwidth,
        l2_bytes=0.0,  # states were last touched a step ago
        constants=found.values,
    )
    return Updates(seconds=seconds, moved=moved * more, kernels=kernels)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of optimizer events (shape params, optional tensors; bytes given)."""
    found = constants_for(machine)
    share, floor = found.number("multi_tensor"), found.number("t0_us") * 1e-6
    kinds: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        kinds.setdefault(event.op, []).append(i)
    answers: dict[int, Answer] = {}
    for op, indices in kinds.items():
        shapes = [dict(events[i].shape) for i in indices]
        columns = {name: np.array([s.get(name, np.nan) for s in shapes]) for name in SHAPE}
        columns["bytes"] = np.array([events[i].bytes for i in indices])
        times = column_seconds(op, columns, machine, found)
        rows = zip(times.seconds, times.moved, times.kernels, strict=True)
        for i, (seconds, moved, kernels) in zip(indices, rows, strict=True):
            answers[i] = Answer(
                value_s=float(seconds),
                latency_s=float(kernels) * floor,
                factor=band(found),
                kernels=float(kernels),
                family="memory",
                provenance=found.provenance,
                formula=(
                    f"{machine.stack.optimizer} {op}: D/(B e), D {moved / 1e9:.3g} GB, e "
                    f"{share:.2f}"
                ),
            )
    return [answers[i] for i in range(len(events))]


def band(found: Constants) -> float:
    """Returns the interval factor."""
    return width(found.row, "memory")


def _launches(op: str, columns: Mapping[str, Array], kind: str) -> tuple[Array, float]:
    """Returns (kernel launches, bytes over those of the fused kernel)."""
    rules = load("memory")["optimizer"]
    ones = np.ones(columns["bytes"].shape)

    def known(name: str, usual: Array | float) -> Array:
        column = columns.get(name, np.nan * ones)
        return np.where(np.isnan(column), usual, column)

    if op == "weight_parts":
        return known("copies", 1.0), 1.0
    fused = float(rules["fused_launches"])
    if op not in _STEPS or kind == "fused":
        return fused * ones, 1.0
    if kind == "foreach":
        return float(rules["foreach_launches"]) * ones, float(rules["foreach_bytes"])
    guess = np.maximum(1.0, np.ceil(known("params", 0.0) / rules["parameters_per_tensor"]))
    launches = known("tensors", guess) * rules["loop_launches_per_tensor"]
    return launches, float(rules["loop_bytes"])
