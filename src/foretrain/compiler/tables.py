"""Embedding tables that backward updates: what they take on a rank, and which ranks are alike.

A table whose rows are updated in backward (`sparse` in the strategy tree) has no dense gradient,
takes no part in the optimizer step, and keeps what its own optimizer keeps per row or per number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from foretrain.compiler.block import LoweredBlock, WeightUse, owner_axes
from foretrain.compiler.placements import local_elements
from foretrain.graph.precision import Precision
from foretrain.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRule:
    """What a table's optimizer keeps: numbers per number of the table, and numbers per row."""

    per_number: float = 0.0
    per_row: float = 0.0


#: Optimizers of tables (the choices of FBGEMM's table batched embeddings).
TABLE_OPTIMIZERS: Mapping[str, TableRule] = {
    "sgd": TableRule(),
    "rowwise-adagrad": TableRule(per_row=1.0),
    "adagrad": TableRule(per_number=1.0),
    "adam": TableRule(per_number=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Ranks of the data group with equal tables; `owner` is the first of them."""

    owner: int | None
    members: tuple[int, ...]


def table_groups(blocks: Sequence[LoweredBlock], mesh: Mesh) -> tuple[TableGroup, ...]:
    """Returns the ranks of the data group by what they own, in order of their first rank.

    One group with owner None where no table has an owner.
    """
    size = mesh.size(owner_axes(mesh))
    owned: dict[int, list[tuple[object, ...]]] = {}
    for block in blocks:
        for op in block.block.ops:
            owner = block.flow.owners.get(op.name)
            if owner is not None:
                shape = (*((d.name, d.size) for d in op.dims), *sorted(op.attributes.items()))
                owned.setdefault(owner, []).append(shape)
    if not owned:
        return (TableGroup(owner=None, members=tuple(range(size))),)
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in range(size):
        key = tuple(sorted(owned.get(rank, []), key=repr))
        alike.setdefault(key, []).append(rank)
    return tuple(TableGroup(owner=ranks[0], members=tuple(ranks)) for ranks in alike.values())


def table_bytes(
    blocks: Iterable[LoweredBlock], owner: int | None, mesh: Mesh, precision: Precision,
    optimizer: str,
) -> tuple[float, float]:  # fmt: skip
    """Returns the bytes of the tables on a rank, and those of their optimizer's states (fp32)."""
    rule = TABLE_OPTIMIZERS[optimizer]
    numbers = rows = 0.0
    for use in (use for block in blocks for use in block.weights if use.sparse):
        if use.owner is not None and use.owner != owner:
            continue
        local = local_elements(use.tensor.size, use.used, mesh)
        numbers += local
        rows += local / _local_dim(use, mesh)
    states = 4.0 * (rule.per_number * numbers + rule.per_row * rows)
    return numbers * precision.bytes("weight"), states


def _local_dim(use: WeightUse, mesh: Mesh) -> float:
    return use.tensor.shape[-1] / mesh.size(use.used.axes("dim"))


def bag_updates(lowered: LoweredBlock, optimizer: str) -> dict[str, tuple[tuple[str, float], ...]]:
    """Returns what backward does to each table, by its operator (compiler/bags.py)."""
    rule = TABLE_OPTIMIZERS[optimizer]
    sparse = (("states", rule.per_number), ("row_states", rule.per_row))
    kept = tuple((name, value) for name, value in sparse if value)
    users = {operand.tensor: op.name for op in lowered.block.ops for operand in op.inputs}
    return {
        users[use.tensor.name]: kept if use.sparse else (("dense", 1.0),)
        for use in lowered.weights
        if use.trained
    }


def position(place: Mapping[str, int], mesh: Mesh, axes: Sequence[str]) -> int:
    """Returns which rank of the data group the rank at `place` is."""
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + place.get(axis, 0)
    return index
