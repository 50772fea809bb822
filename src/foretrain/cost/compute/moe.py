"""Experts as one grouped GEMM: padding of every expert to its tile, weights read once.

R tokens reach this rank (tokens topk / ep, times the load of the busiest rank), E experts live here
(experts / ep), the width is I = ffn / tp:

    active = min(E, R),  rows = active ceil(max(1, R/E) / tile) tile
    t_c = (rows 2 g I (H + k0) + rows 2 H (I + k0)) / (P e)        g = 2 gated, 1 plain
    t_m = (active (g + 1) H I w + R (2H + (g+1) I) 2 w) / (B e_b)
    T   = t0 + max(t_c, t_m) + overlap loss min(t_c, t_m)

Backward does the same twice. Constants: catalog/calibration/moe.toml. Explained in
docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log2

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `moe_gemm` events (shape tokens hidden ffn experts topk ep tp gated).

    `load` is the busiest rank's share over the mean (1 when absent); `distribution` 1 means the
    skewed token distribution of published tables.
    """
    table = load("moe")
    found = find(table["entry"], machine.device)
    if found is None:
        raise InternalError("moe.toml has no default entry")
    return [_price(event, machine, found, table["rules"]) for event in events]


def _price(
    event: ComputeEvent, machine: Machine, found: Constants, rules: Mapping[str, float]
) -> Answer:
    shape = dict(event.shape)
    ep, tp = max(1.0, shape.get("ep", 1.0)), max(1.0, shape.get("tp", 1.0))
    load_factor = shape.get("load", _skew(ep, rules) if shape.get("distribution", 0.0) else 1.0)
    tokens = shape["tokens"] * shape.get("topk", 1.0) / ep * load_factor
    experts = max(1.0, shape.get("experts", 1.0) / ep)
    hidden, ffn = shape["hidden"], shape["ffn"] / tp
    gates = 2.0 if shape.get("gated", 1.0) else 1.0
    tile, k0 = found.number("tile"), found.number("k0")
    active = max(1.0, min(experts, tokens))
    rows = active * ceil(max(1.0, tokens / active) / tile) * tile
    work = rows * 2.0 * gates * ffn * (hidden + k0) + rows * 2.0 * hidden * (ffn + k0)
    compute = work / (machine.peak(event.dtype) * found.number("e"))
    size = max(dtype_bytes(event.dtype), 1.0)
    moved = active * (gates + 1.0) * hidden * ffn * size
    moved += tokens * (2.0 * hidden + (gates + 1.0) * ffn) * 2.0 * 2.0
    memory = moved / (machine.device.memory_bandwidth * found.number("e_b"))
    t0 = found.number("t0_us") * 1e-6
    passes = 2.0 if event.direction == "backward" else 1.0
    once = t0 + max(compute, memory) + found.number("g") * min(compute, memory)
    return Answer(
        value_s=passes * once,
        latency_s=passes * t0,
        factor=width(found.row, "moe"),
        kernels=2.0 * passes,
        family="moe",
        provenance=found.provenance,
        formula=(
            f"grouped GEMM: {active:g} experts, {rows:g} rows padded to {tile:g}, "
            f"e {found.number('e'):g} K/(K+{k0:g})"
        ),
    )


def _skew(ep: float, rules: Mapping[str, float]) -> float:
    return rules["power_law_small"] * rules["power_law_per_doubling"] ** max(0.0, log2(ep / 8.0))
