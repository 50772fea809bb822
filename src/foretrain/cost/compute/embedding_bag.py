"""Embedding bags: gathered rows from DRAM, with the rows that L2 keeps.

Per sample and table, in sectors of 32 bytes, with L lookups of D columns from E rows:

    fixed  = offsets + c32(4 L) + c32(4 D)         weight = L c32(4 D), twice in backward
    U      = E (1 - (1 - 1/E)**(B L))              distinct rows of a batch of B samples
    X      = rows that L2 holds while n_conc tables are processed at the same time
    hit    = 1 - U/(B L) if U <= X else X/E
    T      = phi max((fixed + weight (1 - hit)) / B_dram, (fixed + weight) / B_L2) B tables

Backward moves its bytes at 0.55 of the DRAM bandwidth. Constants:
catalog/calibration/embedding.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, expm1, log1p

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import load
from foretrain.cost.compute.memory_bound import constants_for
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent


def hit_rate(rows: float, lookups: float, resident: float) -> float:
    """Returns the share of `lookups` uniform reads of `rows` rows that a cache of rows serves."""
    if rows <= 1.0:
        return 1.0 - 1.0 / max(lookups, 1.0)
    distinct = -rows * expm1(lookups * log1p(-1.0 / rows))
    if distinct <= resident:
        return max(0.0, 1.0 - distinct / lookups)
    return min(1.0, resident / rows)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `embedding_bag` events (shape batch tables rows dim pooling)."""
    rules = load("embedding")["rules"]
    return [_price(event, machine, rules) for event in events]


def _price(event: ComputeEvent, machine: Machine, rules: Mapping[str, float]) -> Answer:
    found, device = constants_for(machine), machine.device
    shape = dict(event.shape)
    batch, tables = shape.get("batch", 1.0), max(1.0, shape.get("tables", 1.0))
    rows, dim, pooling = shape["rows"], shape["dim"], max(1.0, shape.get("pooling", 1.0))
    sector = rules["sector_bytes"]
    row = sector * ceil(4.0 * dim / sector)
    fixed = rules["offset_bytes"] + sector * ceil(4.0 * pooling / sector) + row
    backward = event.direction != "forward"
    weight = pooling * row * (2.0 if backward else 1.0)
    lookups = batch * pooling
    concurrent = max(1.0, device.sm_count * rules["concurrent_warps"] / batch)
    resident = min(rows, lookups, rules["l2_resident"] * device.l2_bytes / concurrent / row)
    hit = hit_rate(rows, lookups, resident)
    dram = device.memory_bandwidth * rules["e_d"] * (rules["backward_share"] if backward else 1.0)
    l2 = device.memory_bandwidth * found.number("l2_ratio")
    narrow = rules["narrow_penalty"] if dim <= 32 else rules["medium_penalty"] if dim <= 64 else 1.0
    per_bag = max((fixed + weight * (1.0 - hit)) / dram, (fixed + weight) / l2)
    t0 = rules["t0_us"] * 1e-6
    return Answer(
        value_s=t0 + narrow * per_bag * batch * tables,
        latency_s=t0,
        factor=width(found.row, "memory"),
        kernels=1.0,
        family="memory",
        provenance=found.provenance,
        formula=f"embedding bag: hit rate {hit:.2f}, {fixed + weight:.0f} B a bag, phi {narrow:g}",
    )
