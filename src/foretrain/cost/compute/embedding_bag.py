"""Embedding bags: gathered rows from DRAM, with the rows that L2 keeps.

Per sample and table, in sectors of 32 bytes, with L lookups of rows of r bytes out of E rows:

    fixed  = offsets + c32(8 L) + c32(output)      weight = L r
    U      = distinct rows of N = B L lookups      X      = rows that L2 holds for this table
    hit    = 1 - U/N if U <= X, else the share of the lookups that the X hottest rows serve
    T      = sum over tables of phi max((fixed + weight (1 - hit)) / B_dram,
                                             (fixed + weight) / B_L2) B, at least t0

Uniform lookups read U = E (1 - (1 - 1/E)**N) rows, and any X rows serve X/E of them; Zipf and
measured reuse say how much the hottest rows serve. Backward reads and writes the row, and what
the table's optimizer keeps with it, at a lower share of the DRAM bandwidth; optimizers that need
the sum of a row's gradients sort the lookups first. A dense gradient is zeroed besides.
Constants: catalog/calibration/embedding.toml. Explained in docs/explain/recommenders.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, expm1, log1p

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, load
from foretrain.cost.compute.memory_bound import constants_for
from foretrain.cost.compute.reuse import Reuse, reuse_of
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent

Shape = Mapping[str, float]


def hit_rate(rows: float, lookups: float, resident: float) -> float:
    """Returns the share of `lookups` uniform reads of `rows` rows that a cache of rows serves."""
    if rows <= 1.0:
        return 1.0 - 1.0 / max(lookups, 1.0)
    distinct = -rows * expm1(lookups * log1p(-1.0 / rows))
    if distinct <= resident:
        return max(0.0, 1.0 - distinct / lookups)
    return min(1.0, resident / rows)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `embedding_bag` events (shapes: see compiler/bags.py).

    The least that a table needs is batch, rows, dim and pooling; numbers have 4 bytes then.
    """
    rules = load("embedding")["rules"]
    found = constants_for(machine)
    return [price_one(event, machine, rules, found) for event in events]


def table_shapes(event: ComputeEvent) -> list[dict[str, float]]:
    """Returns the shape of every kind of table of an event, with `tables` = how many."""
    shape = dict(event.shape)
    kinds = int(shape.get("kinds", 0))
    if not kinds:
        return [shape]
    found: list[dict[str, float]] = [{} for _ in range(kinds)]
    for name, value in event.shape:
        stem, _, index = name.rpartition(".")
        if stem:
            found[int(index)][stem] = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bag:
    """The traffic of one table per sample: bytes from DRAM, bytes through L2, seconds of both."""

    hit: float
    dram_bytes: float
    l2_bytes: float
    seconds: float


def price_one(
    event: ComputeEvent, machine: Machine, rules: Mapping[str, float], found: Constants
) -> Answer:
    """Returns the time of one event under given constants (studies/recsys fits the rules)."""
    kinds = table_shapes(event)
    bags = [_bag(kind, event, machine, rules, found) for kind in kinds]
    t0 = rules["t0_us"] * 1e-6
    seconds = sum(bag.seconds for bag in bags)
    moved = sum(
        bag.dram_bytes * kind.get("batch", 1.0) * max(1.0, kind.get("tables", 1.0))
        for bag, kind in zip(bags, kinds, strict=True)
    )
    hits = ", ".join(f"{bag.hit:.2f}" for bag in bags[:3]) + (", ..." if len(bags) > 3 else "")
    tables = sum(max(1.0, kind.get("tables", 1.0)) for kind in kinds)
    return Answer(
        value_s=max(t0, seconds),
        latency_s=t0,
        factor=width(found.row, "memory"),
        kernels=1.0,
        family="memory",
        provenance=found.provenance,
        formula=(
            f"embedding bags of {tables:g} tables: {moved / 1e6:.3g} MB from DRAM, hit rate {hits}"
        ),
    )


def _bag(
    shape: Shape,
    event: ComputeEvent,
    machine: Machine,
    rules: Mapping[str, float],
    found: Constants,
) -> _Bag:
    device = machine.device
    batch, pooling = shape.get("batch", 1.0), shape.get("pooling", 1.0)
    backward = event.direction != "forward"
    sector = rules["sector_bytes"]

    def sectors(num_bytes: float) -> float:
        return sector * ceil(num_bytes / sector - 1e-9)

    row = sectors(shape.get("element", 4.0) * shape["dim"])
    output = sectors(shape.get("output", 4.0) * shape["dim"])
    fixed = rules["offset_bytes"] + sectors(rules["index_bytes"] * pooling) + output
    lookups = batch * pooling
    concurrent = max(1.0, device.sm_count * rules["concurrent_warps"] / batch)
    resident = rules["l2_resident"] * device.l2_bytes / concurrent / row
    reuse = reuse_of(shape, lookups)
    hit = _hit(reuse, lookups, min(resident, shape["rows"], lookups))
    weight = pooling * row
    if backward:
        fixed += _sort_bytes(shape, pooling, rules)
        weight *= _update_passes(shape, row, sector)
    dram = device.memory_bandwidth * rules["e_d"] * (rules["backward_share"] if backward else 1.0)
    l2 = device.memory_bandwidth * found.number("l2_ratio")
    from_dram = fixed + weight * (1.0 - hit)
    per_bag = max(from_dram / dram, (fixed + weight) / l2)
    seconds = _divergence(row, rules) * per_bag * batch
    if backward and shape.get("dense"):
        streams = device.memory_bandwidth * rules["e_d"]
        seconds += shape["rows"] * row / streams  # the gradient of the whole table is zeroed
    tables = max(1.0, shape.get("tables", 1.0))
    return _Bag(hit=hit, dram_bytes=from_dram, l2_bytes=fixed + weight, seconds=tables * seconds)


def _hit(reuse: Reuse, lookups: float, resident: float) -> float:
    """Returns the share of lookups that L2 serves.

    All but the first of each row where all rows fit, else those of the hottest rows.
    """
    most = max(0.0, 1.0 - reuse.distinct / max(lookups, 1.0))
    if reuse.distinct <= resident:
        return most
    return min(most, reuse.served(resident))


def _divergence(row: float, rules: Mapping[str, float]) -> float:
    """Narrow rows leave lanes of a warp idle; measured for 4-byte numbers."""
    if row <= 4 * 32:
        return rules["narrow_penalty"]
    return rules["medium_penalty"] if row <= 4 * 64 else 1.0


def _update_passes(shape: Shape, row: float, sector: float) -> float:
    """Passes over the looked-up rows in backward: read and write of rows and of their states."""
    if shape.get("dense"):
        return 2.0
    states = 1.0 + shape.get("states", 0.0)
    return 2.0 * (states + shape.get("row_states", 0.0) * sector / row)


def _sort_bytes(shape: Shape, pooling: float, rules: Mapping[str, float]) -> float:
    """Bytes per sample of sorting lookups by row; plain SGD adds every lookup on its own."""
    exact = shape.get("states") or shape.get("row_states") or shape.get("dense")
    return rules["sort_bytes"] * pooling if exact else 0.0
