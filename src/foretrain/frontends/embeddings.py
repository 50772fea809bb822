"""The first block of a transformer: from tokens, or from the pixels of patches, to x.

text     word, project (from a narrower table), scale, position (learned), token_type and type_sum,
         norm, dropout
images   patch, class_token, position, dropout
"""

from __future__ import annotations

from foretrain.frontends.layers import BlockBuilder, X, add_dropout, add_norm, add_sum
from foretrain.graph.ir import Block

WORD_WEIGHT = "embedding.word.weight"
POSITION_WEIGHT = "embedding.position.weight"


def build_embedding(b: BlockBuilder) -> Block:
    """Returns the embedding block; its output is called "x"."""
    parts = _parts(b)
    x = ""
    for part in parts:
        x = _add(b, part, x, "x" if part == parts[-1] else f"embedding.{part}.out")
    return b.block("embedding", repeat=1, input=None, output="x", recompute=False)


def _parts(b: BlockBuilder) -> list[str]:
    spec = b.spec
    present = {
        "word": spec.image is None,
        "project": spec.projection is not None,
        "patch": spec.image is not None,
        "class_token": spec.class_token,
        "scale": spec.scaled_embedding,
        "position": spec.positions == "learned",
        "type_sum": spec.token_types > 0,
        "norm": spec.embedding_norm,
        "dropout": b.dropout and spec.dropout > 0,
    }
    return [part for part, there in present.items() if there]


def _add(b: BlockBuilder, part: str, x: str, out: str) -> str:
    name = f"embedding.{part}"
    if part == "word":
        return add_lookup(
            b, name, "tokens", "vocab", out, width="table" if b.spec.projection else "hidden"
        )
    if part == "project":
        return _project(b, name, x, out)
    if part == "scale":
        return _scale(b, name, x, out)
    if part == "patch":
        return _patch(b, name, out)
    if part == "class_token":
        return _class_token(b, name, x, out)
    if part == "position":
        return add_position(b, name, x, out)
    if part == "type_sum":
        kind = "embedding.token_type"
        types = add_lookup(b, kind, "token_types", "type", f"{kind}.out")
        return add_sum(b, name, x, types, out=out)
    if part == "norm":
        return add_norm(b, name, x, out=out)
    return add_dropout(b, name, x, X, out=out)


def add_lookup(
    b: BlockBuilder,
    name: str,
    indices: str,
    rows: str,
    out: str,
    *,
    width: str = "hidden",
    tied_to: str | None = None,
) -> str:
    """Returns one row of a table for each token."""
    dims = f"batch seq {width}"
    b.tensor(indices, "batch seq", role="input", dtype="int64")
    weight = b.weight(f"{name}.weight", f"{rows} {width}", tied_to=tied_to)
    b.tensor(out, dims)
    b.op(
        name,
        "gather",
        "embedding",
        f"{dims} {rows}",
        reduce=rows,
        inputs=[(indices, "batch seq"), (weight, f"{rows} {width}")],
        outputs=[(out, dims)],
        grad="embedding",
        linear=(1,),
        saved=(indices,),
        density=1.0 / b.sizes[rows],
    )
    return out


def _project(b: BlockBuilder, name: str, x: str, out: str) -> str:
    """Returns the vectors of a narrow table as wide as the layers: a linear layer without bias."""
    weight = b.weight(f"{name}.weight", "hidden table")
    b.tensor(out, X)
    b.op(
        name,
        "contraction",
        "gemm",
        f"{X} table",
        reduce="table",
        inputs=[(x, "batch seq table"), (weight, "hidden table")],
        outputs=[(out, X)],
        grad="contraction",
        saved=(x, weight),
        groups={"out": ("hidden",)},
        flops=2.0,
    )
    return out


def _scale(b: BlockBuilder, name: str, x: str, out: str) -> str:
    """Returns x times a constant."""
    b.tensor(out, X)
    b.op(
        name,
        "pointwise",
        "elementwise",
        X,
        inputs=[(x, X)],
        outputs=[(out, X)],
        grad="linear",
        linear=(0,),
    )
    return out


def add_position(
    b: BlockBuilder, name: str, x: str, out: str, *, tied_to: str | None = None
) -> str:
    """Returns x plus the learned vector of every position."""
    table = b.weight(f"{name}.weight", "position hidden", tied_to=tied_to)
    b.tensor(out, X)
    b.op(
        name,
        "pointwise",
        "elementwise",
        X,
        inputs=[(x, X), (table, "seq hidden")],
        outputs=[(out, X)],
        grad="bias",
    )
    return out


def _patch(b: BlockBuilder, name: str, out: str) -> str:
    """Returns a vector for each patch: a convolution whose stride is its kernel, as a product."""
    rows = "batch patch" if b.spec.class_token else "batch seq"
    pixels = b.tensor("pixels", f"{rows} pixel", role="input")
    weight = b.weight(f"{name}.weight", "hidden pixel")
    bias = b.weight(f"{name}.bias", "hidden")
    b.tensor(out, f"{rows} hidden")
    b.op(
        name,
        "contraction",
        "gemm",
        f"{rows} hidden pixel",
        reduce="pixel",
        inputs=[(pixels, f"{rows} pixel"), (weight, "hidden pixel"), (bias, "hidden")],
        outputs=[(out, f"{rows} hidden")],
        grad="contraction",
        saved=(pixels, weight),
        groups={"out": ("hidden",)},
        flops=2.0,
    )
    return out


def _class_token(b: BlockBuilder, name: str, x: str, out: str) -> str:
    """Returns the patches with one more vector in front of each image."""
    token = b.weight(f"{name}.weight", "hidden")
    b.tensor(out, X)
    b.op(
        name,
        "pointwise",
        "copy",
        f"{X} patch",
        reduce="patch",
        inputs=[(x, "batch patch hidden"), (token, "hidden")],
        outputs=[(out, X)],
        grad="concat",
    )
    return out
