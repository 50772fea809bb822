"""The last block of a transformer: what its loss is computed from.

lm              norm, dropout (of a decoder beside an encoder), project (to a narrower table),
                logits, softcap, loss
mlm             select (with a fixed number of masked positions), dense, act, mlm_norm, logits
                (tied to the word table, with a bias of their own), loss
classification  norm, first (the vector of the first position), pooler, tanh, classes, loss
pretraining     mlm, and beside it first, pooler, tanh, pair_classes, pair_loss
none            the pooled vector, or all of them, are the output; their mean is the loss
"""

from __future__ import annotations

from foretrain.frontends.embeddings import WORD_WEIGHT
from foretrain.frontends.layers import (
    BlockBuilder,
    X,
    add_activation,
    add_column_linear,
    add_dropout,
    add_norm,
    add_select,
)
from foretrain.graph.ir import Block


def build_head(b: BlockBuilder) -> Block:
    """Returns the head of the kind that the model names, with its loss."""
    spec = b.spec
    x = b.tensor("x_in", X)
    if spec.final_norm:
        x = add_norm(b, "head.norm", x)
    if spec.decoder_layers and b.dropout and spec.dropout > 0:
        x = add_dropout(b, "head.dropout", x, X)
    if spec.head == "lm":
        _vocabulary(b, x, "batch seq", bias=spec.head_bias)
    elif spec.head == "mlm":
        _masked(b, x)
    elif spec.head == "pretraining":
        _masked(b, x)
        _classify(b, x, "pair_")
    elif spec.head == "classification":
        _classify(b, x, "")
    elif spec.pooler:
        _mean(b, _first(b, x), "batch")
    else:
        _mean(b, x, "batch seq")
    return b.block("head", repeat=1, input="x_in", output=None, recompute=False)


def _vocabulary(b: BlockBuilder, x: str, rows: str, *, bias: bool) -> None:
    spec = b.spec
    if spec.projection is not None:
        x = add_column_linear(b, "head.project", x, "table", bias=False, rows=rows)
    logits = add_column_linear(
        b,
        "head.logits",
        x,
        "vocab",
        bias=bias,
        groups={"out": ("vocab",)},
        out=None if spec.head_softcap else "logits",
        tied_to=f"embedding/{WORD_WEIGHT}" if spec.tied else None,
        rows=rows,
        depth="hidden" if spec.projection is None else "table",
    )
    if spec.head_softcap:
        logits = _softcap(b, logits, f"{rows} vocab")
    _loss(b, logits, "", rows, "vocab")


def _softcap(b: BlockBuilder, logits: str, dims: str) -> str:
    """Returns cap x tanh(logits / cap); backward needs its result only."""
    out = b.tensor("logits", dims)
    b.op(
        "head.softcap",
        "pointwise",
        "softcap",
        dims,
        inputs=[(logits, dims)],
        outputs=[(out, dims)],
        saved=(out,),
    )
    return out


def _masked(b: BlockBuilder, x: str) -> None:
    rows = "batch seq"
    if b.spec.masked is not None:
        rows = "batch masked"
        x = add_select(b, "head.select", x, rows)
    dims = f"{rows} hidden"
    x = add_column_linear(b, "head.dense", x, "out", bias=True, rows=rows)
    x = add_activation(b, "head.act", b.spec.activation, [x], dims)
    x = add_norm(b, "head.mlm_norm", x, dims=dims)
    _vocabulary(b, x, rows, bias=True)


def _first(b: BlockBuilder, x: str) -> str:
    """Returns the first position of every sample, through the pooler where there is one."""
    x = add_select(b, "head.first", x, "batch")
    if not b.spec.pooler:
        return x
    x = add_column_linear(b, "head.pooler", x, "out", bias=True, rows="batch")
    return add_activation(b, "head.tanh", "elementwise", [x], "batch hidden")


def _classify(b: BlockBuilder, x: str, prefix: str) -> None:
    logits = add_column_linear(
        b,
        f"head.{prefix}classes",
        _first(b, x),
        "class",
        bias=True,
        groups={"out": ("class",)},
        rows="batch",
    )
    _loss(b, logits, prefix, "batch", "class")


def _mean(b: BlockBuilder, x: str, rows: str) -> None:
    """A number to differentiate where the model has no head."""
    b.op(
        "loss.mean",
        "reduction",
        "reduction",
        f"{rows} hidden",
        reduce="hidden",
        inputs=[(x, f"{rows} hidden")],
        outputs=[(b.tensor("loss", rows, dtype="fp32"), rows)],
        grad="mean",
    )


def _loss(b: BlockBuilder, logits: str, prefix: str, rows: str, width: str) -> None:
    """Cross-entropy as three reductions over `width` and one operator that joins them.

    loss = log(sum exp(logit - max)) + max - logit[target]; on a split vocabulary each reduction
    leaves a partial of one value for each of `rows`.
    """
    name, wide = f"{prefix}loss", f"{rows} {width}"
    targets = b.tensor(f"{prefix}targets", rows, role="input", dtype="int64")
    peak, total, picked = (
        b.tensor(f"{name}.{part}.out", rows, dtype="fp32") for part in ("max", "sum_exp", "target")
    )
    b.op(
        f"{name}.max",
        "reduction",
        "ce_max",
        wide,
        reduce=width,
        inputs=[(logits, wide)],
        outputs=[(peak, rows)],
        grad="none",
        combiner="max",
    )
    b.op(
        f"{name}.sum_exp",
        "reduction",
        "ce_sum",
        wide,
        reduce=width,
        inputs=[(logits, wide), (peak, rows)],
        outputs=[(total, rows)],
        grad="none",
    )
    b.op(
        f"{name}.target",
        "gather",
        "ce_gather",
        wide,
        reduce=width,
        inputs=[(logits, wide), (targets, rows)],
        outputs=[(picked, rows)],
        grad="none",
        density=1.0 / b.sizes[width],
        attributes={"density": 1.0 / b.sizes[width]},
    )
    b.op(
        f"{name}.loss",
        "pointwise",
        "elementwise",
        rows,
        inputs=[(peak, rows), (total, rows), (picked, rows)],
        outputs=[(b.tensor(name, rows, dtype="fp32"), rows)],
        grad="cross_entropy",
        saved=(logits, peak, total),
    )
