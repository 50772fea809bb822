"""Recommendation models (DLRM) as Graphs: embedding bags, bottom MLP, interaction, top MLP, loss.

    dot    the pairwise products of the table outputs and the bottom MLP's output (the lower
           triangle without its diagonal), behind the bottom MLP's output (Naumov et al. 2019,
           arXiv 1906.00091)
    cat    all of them side by side; tables may then differ in width
    dcn    cat, then `cross_layers` low-rank cross layers x0 (W (V x) + b) + x (Wang et al. 2020,
           arXiv 2008.13535)

Two blocks: `features` holds the tables, the bottom MLP and the interaction, `top` the rest. An
embedding bag has the dims batch, row (a reduction) and dim: `pooling` of its rows are summed for
every sample, so its density is pooling / rows. Plans split or place each table by its path,
features.tables.NAME.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from foretrain.errors import InputError, Problem
from foretrain.frontends.conv_layers import ROWS, ConvBuilder, add_linear, add_row_activation
from foretrain.frontends.spec import RecSpec, Table
from foretrain.graph.ir import Block, Graph

#: Tag of embedding bags that some stacks run as one kernel.
FUSED_TABLES = "tables"
#: Tag of the interaction's operators, which some stacks run as one kernel.
FUSED_INTERACTION = "interaction"
#: The path below which the tables stand.
TABLES = "features.tables"


def build_rec_graph(spec: RecSpec, *, batch: int) -> Graph:
    """Returns the forward graph of one micro-step of `batch` samples."""
    if batch < 1:
        raise InputError(Problem(what="must be at least 1", where="batch", value=batch))
    features, width = _features(spec, batch)
    facts: Mapping[str, float | str | bool] = {
        "family": spec.family, "tables": len(spec.tables), "interaction": spec.interaction,
    }  # fmt: skip
    blocks = (features, _top(spec, batch, width))
    return Graph(name=spec.name, blocks=blocks, batch=batch, sequence=None, facts=facts)


def rec_flops_per_sample(spec: RecSpec) -> float:
    """Returns three times the FLOP of the matrix products of one forward pass.

    Lookups move data and are left out; the data gradient of the first layer, which nobody needs,
    is counted, as is usual.
    """
    graph = build_rec_graph(spec, batch=1)
    return 3.0 * sum(op.total_flops for _, op in graph.ops() if op.kind == "contraction")


def table_path(table: Table) -> str:
    """Returns the path of a table's lookup in the strategy tree."""
    return f"{TABLES}.{table.name}"


def _features(spec: RecSpec, batch: int) -> tuple[Block, int]:
    b = ConvBuilder(batch=batch)
    pooled = [_embedding_bag(b, table) for table in spec.tables]
    x = b.tensor("dense", ("batch", "in"), (batch, spec.dense), "input", "fp32")
    x = _mlp(b, "bottom", x, spec.dense, spec.bottom, last_relu=True)
    width = spec.bottom[-1]
    if spec.interaction == "dot":
        out, size = _dot(b, spec, x, pooled)
    else:
        size = width + sum(table.dim for table in spec.tables)
        out = _concat(b, "interaction.concat", [x, *pooled], size)
    return b.block("features", repeat=1, input=None, output=out), size


def _embedding_bag(b: ConvBuilder, table: Table) -> str:
    """The sum of `pooling` rows per sample; indices are 64-bit."""
    name = f"tables.{table.name}"
    lookups = ceil(table.pooling)
    indices = b.tensor(f"{name}.indices", ("batch", "lookup"), (b.batch, lookups), "input", "int64")
    weight = b.weight(f"{name}.weight", ("row", "dim"), (table.rows, table.dim))
    out = b.tensor(f"{name}.out", ("batch", "dim"), (b.batch, table.dim))
    attributes: dict[str, float | str | bool] = {"pooling": table.pooling, "zipf": table.zipf}
    if table.distinct is not None:
        attributes["distinct"] = table.distinct
        for i, (rows, lookups_share) in enumerate(table.reuse):
            attributes |= {f"reuse_rows.{i}": rows, f"reuse_lookups.{i}": lookups_share}
    b.op(
        name, "gather", "embedding_bag",
        [("batch", b.batch), ("row", table.rows), ("dim", table.dim)],
        inputs=[(indices, ("batch", "lookup")), (weight, ("row", "dim"))],
        outputs=[(out, ("batch", "dim"))], reduce=("row",), grad="embedding",
        flops=1.0, density=table.pooling / table.rows, fuse=FUSED_TABLES, attributes=attributes,
    )  # fmt: skip
    return out


def _mlp(
    b: ConvBuilder, name: str, x: str, inner: int, widths: Sequence[int], *, last_relu: bool
) -> str:
    for i, width in enumerate(widths, 1):
        x = add_linear(b, f"{name}.fc{i}", x, inner, width)
        if last_relu or i < len(widths):
            x = add_row_activation(b, f"{name}.fc{i}", x, width, dropout=False)
        inner = width
    return x


def _dot(b: ConvBuilder, spec: RecSpec, x: str, pooled: Sequence[str]) -> tuple[str, int]:
    count, dim, batch = len(pooled) + 1, spec.bottom[-1], b.batch
    z = b.tensor("interaction.stack.out", ("batch", "feature", "dim"), (batch, count, dim))
    b.op(
        "interaction.stack", "pointwise", "concat",
        [("batch", batch), ("feature", count), ("dim", dim)],
        inputs=[(name, ("batch", "dim")) for name in (x, *pooled)],
        outputs=[(z, ("batch", "feature", "dim"))], grad="join", fuse=FUSED_INTERACTION,
    )  # fmt: skip
    square = b.tensor("interaction.dot.out", ("batch", "left", "right"), (batch, count, count))
    b.op(
        "interaction.dot", "contraction", "gemm",
        [("batch", batch), ("left", count), ("right", count), ("dim", dim)],
        inputs=[(z, ("batch", "left", "dim")), (z, ("batch", "right", "dim"))],
        outputs=[(square, ("batch", "left", "right"))], reduce=("dim",), grad="contraction",
        saved=(z,), flops=2.0, fuse=FUSED_INTERACTION,
    )  # fmt: skip
    pairs = count * (count - 1) // 2
    triangle = b.tensor("interaction.triangle.out", ("batch", "pair"), (batch, pairs))
    b.op(
        "interaction.triangle", "pointwise", "triangle", [("batch", batch), ("pair", pairs)],
        inputs=[(square, ("batch", "left", "right"))], outputs=[(triangle, ("batch", "pair"))],
        grad="select", fuse=FUSED_INTERACTION,
    )  # fmt: skip
    return _concat(b, "interaction.concat", [x, triangle], dim + pairs), dim + pairs


def _concat(b: ConvBuilder, name: str, parts: Sequence[str], width: int) -> str:
    out = b.tensor(f"{name}.out", ROWS, (b.batch, width))
    b.op(
        name, "pointwise", "concat", [("batch", b.batch), ("out", width)],
        inputs=[(part, ("batch", f"part{i}")) for i, part in enumerate(parts)],
        outputs=[(out, ROWS)], grad="join", fuse=FUSED_INTERACTION,
    )  # fmt: skip
    return out


def _top(spec: RecSpec, batch: int, width: int) -> Block:
    b = ConvBuilder(batch=batch)
    x = b.tensor("x_in", ROWS, (batch, width))
    if spec.interaction == "dcn":
        x = _cross(b, x, width, spec)
    logits = _mlp(b, "top", x, width, spec.top, last_relu=False)
    out = spec.top[-1]
    dims = list(zip(ROWS, (batch, out), strict=True))
    y = b.tensor("top.sigmoid.out", ROWS, (batch, out))
    b.op("top.sigmoid", "pointwise", "sigmoid", dims, inputs=[(logits, ROWS)], outputs=[(y, ROWS)],
         saved=(y,), flops=4.0)  # fmt: skip
    targets = b.tensor("top.loss.targets", ROWS, (batch, out), "input", "fp32")
    loss = b.tensor("top.loss.out", ("batch",), (batch,), dtype="fp32")
    b.op(
        "top.loss", "reduction", f"{spec.loss}_loss", dims, inputs=[(y, ROWS), (targets, ROWS)],
        outputs=[(loss, ("batch",))], reduce=("out",), grad="pair_loss", saved=(y, targets),
        flops=4.0,
    )  # fmt: skip
    return b.block("top", repeat=1, input="x_in", output=None)


def _cross(b: ConvBuilder, x0: str, width: int, spec: RecSpec) -> str:
    """Low-rank cross layers: two matrix products and one pointwise operator each."""
    rank, batch, x = spec.cross_rank, b.batch, x0
    for i in range(1, spec.cross_layers + 1):
        name = f"top.cross{i}"
        weight = b.weight(f"{name}.v.weight", ("out", "in"), (rank, width))
        v = b.tensor(f"{name}.v.out", ROWS, (batch, rank))
        b.op(
            f"{name}.v", "contraction", "gemm", [("batch", batch), ("out", rank), ("in", width)],
            inputs=[(x, ("batch", "in")), (weight, ("out", "in"))], outputs=[(v, ROWS)],
            reduce=("in",), grad="contraction", saved=(x, weight), flops=2.0,
        )  # fmt: skip
        w = add_linear(b, f"{name}.w", v, rank, width)
        out = b.tensor(f"{name}.out", ROWS, (batch, width))
        b.op(
            f"{name}.mix", "pointwise", "cross", [("batch", batch), ("out", width)],
            inputs=[(x0, ROWS), (w, ROWS), (x, ROWS)], outputs=[(out, ROWS)], grad="cross",
            saved=(x0, w), flops=2.0,
        )  # fmt: skip
        x = out
    return x
