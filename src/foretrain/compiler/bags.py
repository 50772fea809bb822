"""The shape of embedding bags on one rank, as the cost model reads it.

Per table: batch, rows, dim, pooling (lookups per sample on this rank), element (bytes of a number
of the table), output (bytes of a number of the result), and where they are known zipf, distinct
and the bins of measured reuse. Backward of a table that it updates itself has `states` (numbers
that its optimizer keeps per number) and `row_states` (per row); backward into a dense gradient has
`dense` 1. Tables of one kernel that differ are numbered: "rows.0", "rows.1", ...; `tables` counts
equal ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.graph.ir import Op
from foretrain.graph.precision import Precision

#: The cost name of a lookup in an embedding table and of its backward.
BAG = "embedding_bag"
#: The tag of an interaction's operators, and the cost name of the one kernel some stacks have.
INTERACTION = "interaction"
Shape = tuple[tuple[str, float], ...]


def bag_shape(
    op: Op, sizes: Mapping[str, int], precision: Precision, *, sparse: bool = False
) -> dict[str, float]:
    """Returns the shape of one table with the local `sizes` of its dims.

    A split of the rows splits the lookups: every rank finds its share of them. With `sparse` a
    rank works on the samples only for which it has a row.
    """
    share = sizes["row"] / op.dim("row").size
    pooling = float(op.attributes["pooling"])
    held = held_share(share, pooling) if sparse else 1.0
    shape = {
        "batch": sizes["batch"] * held,
        "rows": float(sizes["row"]),
        "dim": float(sizes["dim"]),
        "pooling": pooling * share / held,
        "element": precision.bytes("weight"),
        "output": precision.bytes("compute"),
    }
    # a share of the rows or of the columns is read as often as the whole table
    known = {k: float(v) for k, v in op.attributes.items() if k != "pooling" and v}
    return shape | known


def held_share(share: float, pooling: float) -> float:
    """Returns the share of the samples of which a rank with `share` of the rows holds any."""
    return 1.0 - (1.0 - share) ** pooling


def bag_bytes(shape: Mapping[str, float], phase: str) -> float:
    """Returns the bytes that a kernel without any cache moves: rows, indices, results.

    Backward reads and writes every row that was looked up.
    """
    row = shape["dim"] * shape["element"]
    passes = 1.0 if phase == "forward" else 2.0
    per_sample = shape["pooling"] * (row * passes + 8.0) + shape["dim"] * shape["output"]
    dense = shape.get("dense", 0.0) * shape["rows"] * row
    return shape["batch"] * per_sample + dense


def table_set(tables: Mapping[Shape, int]) -> Shape:
    """Returns the shape of an event: one kind of table plain, several numbered.

    The order of the tables does not matter.
    """
    kinds = sorted(tables.items())
    if len(kinds) == 1:
        shape, count = kinds[0]
        return (("tables", float(count)), *shape)
    parts: list[tuple[str, float]] = [("kinds", float(len(kinds)))]
    for i, (shape, count) in enumerate(kinds):
        parts.append((f"tables.{i}", float(count)))
        parts += [(f"{name}.{i}", value) for name, value in shape]
    return tuple(parts)
