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

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, load
from foretrain.cost.compute.memory_bound import constants_for
from foretrain.cost.compute.reuse import Reuse, reuse_of
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent

Array = NDArray[np.float64]
#: What holds where a table does not say; other values are 0 then.
_USUAL = {"batch": 1.0, "pooling": 1.0, "tables": 1.0, "element": 4.0, "output": 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Kinds of tables: seconds of all of a kind, bytes from DRAM, share that L2 serves."""

    seconds: Array
    dram_bytes: Array
    hit: Array


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `embedding_bag` events (shapes: see compiler/bags.py).

    The least that a table needs is batch, rows, dim and pooling; numbers have 4 bytes then.
    """
    return price_under(events, machine, load("embedding")["rules"], constants_for(machine))


def price_under(
    events: Sequence[ComputeEvent],
    machine: Machine,
    rules: Mapping[str, float],
    found: Constants,
) -> list[Answer]:
    """Returns the time of events under given constants (studies/recsys fits the rules)."""
    answers: dict[int, Answer] = {}
    for backward in (False, True):
        chosen = [i for i, e in enumerate(events) if (e.direction != "forward") == backward]
        if not chosen:
            continue
        shapes = [table_shapes(events[i]) for i in chosen]
        columns = _columns([shape for kinds in shapes for shape in kinds])
        bags = column_times(columns, machine, rules, found, backward=backward)
        ends = np.cumsum([len(kinds) for kinds in shapes])
        for i, kinds, end in zip(chosen, shapes, ends, strict=True):
            own = slice(end - len(kinds), end)
            answers[i] = _answer(bags, columns["tables"], own, rules, found)
    return [answers[i] for i in range(len(events))]


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


def _columns(shapes: Sequence[Mapping[str, float]]) -> dict[str, Array]:
    names = dict.fromkeys([*_USUAL, *(name for shape in shapes for name in shape)])
    return {
        name: np.array([shape.get(name, _USUAL.get(name, 0.0)) for shape in shapes])
        for name in names
    }


def _answer(
    bags: Bags, tables: Array, own: slice, rules: Mapping[str, float], found: Constants
) -> Answer:
    """Returns the answer for one event, whose kinds of tables are `own`."""
    t0 = rules["t0_us"] * 1e-6
    hits = ", ".join(f"{hit:.2f}" for hit in bags.hit[own][:3])
    more = ", ..." if own.stop - own.start > 3 else ""
    count = np.maximum(1.0, tables[own]).sum()
    return Answer(
        value_s=max(t0, float(bags.seconds[own].sum())),
        latency_s=t0,
        factor=width(found.row, "memory"),
        kernels=1.0,
        family="memory",
        provenance=found.provenance,
        formula=(
            f"embedding bags of {count:g} tables: {bags.dram_bytes[own].sum() / 1e6:.3g} MB from "
            f"DRAM, hit rate {hits}{more}"
        ),
    )


def column_seconds(
    columns: Mapping[str, Array], machine: Machine, found: Constants, *, backward: bool
) -> Array:
    """Returns the times of kernels with one kind of table each: rows, dim, and what else is known.

    Names as in compiler/bags.py, without numbers of kinds.
    """
    rules: Mapping[str, float] = load("embedding")["rules"]
    length = columns["rows"].shape
    given = {name: np.full(length, usual) for name, usual in _USUAL.items()} | dict(columns)
    bags = column_times(given, machine, rules, found, backward=backward)
    return np.maximum(rules["t0_us"] * 1e-6, bags.seconds)


def column_times(
    columns: Mapping[str, Array],
    machine: Machine,
    rules: Mapping[str, float],
    found: Constants,
    *,
    backward: bool,
) -> Bags:
    """Returns the times of kinds of tables, one element per kind."""
    device, sector = machine.device, rules["sector_bytes"]
    batch, pooling, rows = columns["batch"], columns["pooling"], columns["rows"]
    dense = columns.get("dense", np.zeros(rows.shape)) > 0.0

    def sectors(num_bytes: Array) -> Array:
        return sector * np.ceil(num_bytes / sector - 1e-9)

    row = sectors(columns["element"] * columns["dim"])
    output = sectors(columns["output"] * columns["dim"])
    fixed = rules["offset_bytes"] + sectors(rules["index_bytes"] * pooling) + output
    lookups = batch * pooling
    concurrent = np.maximum(1.0, device.sm_count * rules["concurrent_warps"] / batch)
    resident = rules["l2_resident"] * device.l2_bytes / concurrent / row
    hit = _hit(reuse_of(columns, lookups), lookups, np.minimum(np.minimum(resident, rows), lookups))
    weight = pooling * row
    streams = device.memory_bandwidth * rules["e_d"]
    if backward:
        fixed = fixed + _sort_bytes(columns, pooling, rules)
        weight = weight * _update_passes(columns, row, sector)
    dram = streams * (rules["backward_share"] if backward else 1.0)
    l2 = device.memory_bandwidth * found.number("l2_ratio")
    from_dram = fixed + weight * (1.0 - hit)
    per_bag = np.maximum(from_dram / dram, (fixed + weight) / l2)
    seconds = _divergence(row, rules) * per_bag * batch
    if backward:  # the gradient of a whole table is zeroed
        seconds = seconds + np.where(dense, rows * row / streams, 0.0)
    tables = np.maximum(1.0, columns["tables"])
    return Bags(seconds=tables * seconds, dram_bytes=tables * batch * from_dram, hit=hit)


def _hit(reuse: Reuse, lookups: Array, resident: Array) -> Array:
    """Returns the share of lookups that L2 serves.

    All but the first of each row where all rows fit, else those of the hottest rows.
    """
    most = np.maximum(0.0, 1.0 - reuse.distinct / np.maximum(lookups, 1.0))
    return np.where(reuse.distinct <= resident, most, np.minimum(most, reuse.served(resident)))


def _divergence(row: Array, rules: Mapping[str, float]) -> Array:
    """Narrow rows leave lanes of a warp idle; measured for 4-byte numbers."""
    medium = np.where(row <= 4 * 64, rules["medium_penalty"], 1.0)
    return np.where(row <= 4 * 32, rules["narrow_penalty"], medium)


def _update_passes(columns: Mapping[str, Array], row: Array, sector: float) -> Array:
    """Passes over the looked-up rows in backward: read and write of rows and of their states."""
    dense, states, per_row = _kept(columns, row)
    return np.where(dense > 0.0, 2.0, 2.0 * (1.0 + states + per_row * sector / row))


def _sort_bytes(columns: Mapping[str, Array], pooling: Array, rules: Mapping[str, float]) -> Array:
    """Bytes per sample of sorting lookups by row; plain SGD adds every lookup on its own."""
    exact = sum(_kept(columns, pooling)) > 0.0
    return np.where(exact, rules["sort_bytes"] * pooling, 0.0)


def _kept(columns: Mapping[str, Array], like: Array) -> list[Array]:
    """Whether the gradient is dense, and what an optimizer keeps per number and per row."""
    return [columns.get(name, np.zeros(like.shape)) for name in ("dense", "states", "row_states")]
