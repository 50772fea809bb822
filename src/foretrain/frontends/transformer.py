"""A decoder transformer as a Graph: embedding, layers x L, head with the loss.

    embedding   word, position (learned), dropout                                     -> x
    layers      attention: norm, q, k, v, rotary_q, rotary_k, core | scores, softmax, dropout,
                context, out, residual; mlp: norm, up, gate, act, down, residual      -> x_out
    head        norm, logits; loss: max, sum_exp, target, loss

Sizes are global (see graph/ir.py). An operator's output is called like the operator, with ".out".
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.errors import InputError, Problem
from foretrain.frontends.attention import add_fused_core, add_rotary, add_unfused_core
from foretrain.frontends.layers import (
    KV,
    BlockBuilder,
    Q,
    X,
    add_column_linear,
    add_dropout,
    add_norm,
    add_residual,
    add_row_linear,
)
from foretrain.frontends.spec import ModelSpec
from foretrain.graph.ir import Block, Graph

ATTENTION = ("fused", "unfused")
WORD_WEIGHT = "embedding.word.weight"


def build_graph(
    spec: ModelSpec,
    *,
    batch: int,
    sequence: int,
    attention: str = "fused",
    dropout: bool = True,
    vocab_multiple: int = 1,
) -> Graph:
    """Returns the forward graph of one micro-step of `batch` samples of `sequence` tokens.

    `attention` is "fused" or "unfused"; without `dropout` no dropout operator and no mask is built
    whatever the spec says. `vocab_multiple` rounds the vocabulary up (Megatron pads its table to
    a multiple of 128 x tp). Raises InputError for sizes below 1, an unknown `attention`, and a
    sequence longer than a learned position table.
    """
    _check(spec, batch, sequence, attention, vocab_multiple)
    vocab = -(-spec.vocab // vocab_multiple) * vocab_multiple
    sizes = {
        "batch": batch,
        "seq": sequence,
        "seq_kv": sequence,
        "position": spec.max_positions or sequence,
        "hidden": spec.hidden,
        "in": spec.hidden,
        "out": spec.hidden,
        "kv_head": spec.kv_heads,
        "group": spec.heads // spec.kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": vocab,
    }

    def builder() -> BlockBuilder:
        return BlockBuilder(sizes=sizes, spec=spec, dropout=dropout)

    return Graph(
        name=spec.name,
        blocks=(
            _embedding(builder()),
            _layers(builder(), fused=attention == "fused"),
            _head(builder()),
        ),
        batch=batch,
        sequence=sequence,
        facts=_facts(spec, vocab, attention),
    )


def _facts(spec: ModelSpec, vocab: int, attention: str) -> Mapping[str, float | str | bool]:
    return {
        "family": spec.family,
        "hidden": spec.hidden,
        "layers": spec.layers,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": vocab,
        "gated": spec.gated,
        "causal": True,
        "window": spec.window or 0,
        "attention": attention,
    }


def _check(spec: ModelSpec, batch: int, sequence: int, attention: str, vocab_multiple: int) -> None:
    problems = [
        Problem(what="must be at least 1", where=where, value=value)
        for where, value in (
            ("batch", batch),
            ("sequence", sequence),
            ("vocab_multiple", vocab_multiple),
        )
        if value < 1
    ]
    if attention not in ATTENTION:
        problems.append(
            Problem(
                what="unknown attention implementation",
                where="attention",
                value=attention,
                allowed=", ".join(ATTENTION),
            )
        )
    limit = spec.max_positions
    if spec.positions == "learned" and limit is not None and sequence > limit:
        problems.append(
            Problem(
                what=f"{spec.name} has a table of {limit} learned positions",
                where="training.sequence",
                value=sequence,
                allowed=f"1 to {limit}",
                way_out="set model.max_positions to train a longer table",
            )
        )
    if problems:
        raise InputError(problems)


def _embedding(b: BlockBuilder) -> Block:
    drop = b.dropout and b.spec.dropout > 0
    learned = b.spec.positions == "learned"
    b.tensor("tokens", "batch seq", role="input", dtype="int64")
    b.weight(WORD_WEIGHT, "vocab hidden")
    x = b.tensor("embedding.word.out" if learned or drop else "x", X)
    b.op(
        "embedding.word",
        "gather",
        "embedding",
        f"{X} vocab",
        reduce="vocab",
        inputs=[("tokens", "batch seq"), (WORD_WEIGHT, "vocab hidden")],
        outputs=[(x, X)],
        grad="embedding",
        linear=(1,),
        saved=("tokens",),
        density=1.0 / b.sizes["vocab"],
    )
    if learned:
        table = b.weight("embedding.position.weight", "position hidden")
        summed = b.tensor("embedding.position.out" if drop else "x", X)
        b.op(
            "embedding.position",
            "pointwise",
            "elementwise",
            X,
            inputs=[(x, X), (table, "seq hidden")],
            outputs=[(summed, X)],
            grad="bias",
        )
        x = summed
    if drop:
        add_dropout(b, "embedding.dropout", x, X, out="x")
    return b.block("embedding", repeat=1, input=None, output="x", recompute=False)


def _layers(b: BlockBuilder, *, fused: bool) -> Block:
    x = b.tensor("x_in", X)
    x = _attention(b, x, fused=fused)
    _mlp(b, x)
    return b.block("layers", repeat=b.spec.layers, input="x_in", output="x_out", recompute=True)


def _attention(b: BlockBuilder, x: str, *, fused: bool) -> str:
    spec = b.spec
    heads = "kv_head group head_dim"
    normed = add_norm(b, "attention.norm", x)
    q = add_column_linear(
        b,
        "attention.q",
        normed,
        heads,
        bias=spec.qkv_bias,
        groups={"heads": ("kv_head", "group"), "out": ("kv_head", "group", "head_dim")},
        fuse="qkv",
    )
    k, v = (
        add_column_linear(
            b,
            f"attention.{name}",
            normed,
            "kv_head head_dim",
            bias=spec.qkv_bias,
            groups={"heads": ("kv_head",), "out": ("kv_head", "head_dim")},
            fuse="qkv",
        )
        for name in ("k", "v")
    )
    if spec.positions == "rotary":
        q = add_rotary(b, "attention.rotary_q", q, Q)
        k = add_rotary(b, "attention.rotary_k", k, KV)
    core = (add_fused_core if fused else add_unfused_core)(b, q, k, v)
    projected = add_row_linear(
        b,
        "attention.out",
        core,
        heads,
        groups={"heads": ("kv_head", "group"), "in": ("kv_head", "group", "head_dim")},
    )
    bias = "attention.out.bias" if spec.out_bias else None
    return add_residual(
        b, "attention.residual", projected, x, bias=bias, out="attention.residual.out"
    )


def _mlp(b: BlockBuilder, x: str) -> str:
    spec = b.spec
    normed = add_norm(b, "mlp.norm", x)
    names = ("mlp.up", "mlp.gate") if spec.gated else ("mlp.up",)
    wide = [
        add_column_linear(
            b,
            name,
            normed,
            "ffn",
            bias=spec.mlp_bias,
            groups={"out": ("ffn",)},
            fuse="gate_up" if spec.gated else None,
        )
        for name in names
    ]
    wide.reverse()  # act(gate) x up
    dims = "batch seq ffn"
    activated = b.tensor("mlp.act.out", dims)
    b.op(
        "mlp.act",
        "pointwise",
        spec.activation,
        dims,
        inputs=[(tensor, dims) for tensor in wide],
        outputs=[(activated, dims)],
        saved=tuple(wide),
    )
    down = add_row_linear(b, "mlp.down", activated, "ffn", groups={"in": ("ffn",)})
    bias = "mlp.down.bias" if spec.mlp_bias else None
    return add_residual(b, "mlp.residual", down, x, bias=bias, out="x_out")


def _head(b: BlockBuilder) -> Block:
    spec = b.spec
    x = b.tensor("x_in", X)
    if spec.final_norm:
        x = add_norm(b, "head.norm", x)
    logits = add_column_linear(
        b,
        "head.logits",
        x,
        "vocab",
        bias=spec.head_bias,
        groups={"out": ("vocab",)},
        out="logits",
        tied_to=f"embedding/{WORD_WEIGHT}" if spec.tied else None,
    )
    _loss(b, logits)
    return b.block("head", repeat=1, input="x_in", output=None, recompute=False)


def _loss(b: BlockBuilder, logits: str) -> None:
    """Cross-entropy as three reductions over the vocabulary and one operator that joins them.

    loss = log(sum exp(logit - max)) + max - logit[target]; on a split vocabulary each reduction
    leaves a partial of batch x seq values.
    """
    rows, wide = "batch seq", "batch seq vocab"
    b.tensor("targets", rows, role="input", dtype="int64")
    peak, total, picked = (
        b.tensor(f"loss.{name}.out", rows, dtype="fp32") for name in ("max", "sum_exp", "target")
    )
    b.op(
        "loss.max",
        "reduction",
        "ce_max",
        wide,
        reduce="vocab",
        inputs=[(logits, wide)],
        outputs=[(peak, rows)],
        grad="none",
        combiner="max",
    )
    b.op(
        "loss.sum_exp",
        "reduction",
        "ce_sum",
        wide,
        reduce="vocab",
        inputs=[(logits, wide), (peak, rows)],
        outputs=[(total, rows)],
        grad="none",
    )
    b.op(
        "loss.target",
        "gather",
        "ce_gather",
        wide,
        reduce="vocab",
        inputs=[(logits, wide), ("targets", rows)],
        outputs=[(picked, rows)],
        grad="none",
        density=1.0 / b.sizes["vocab"],
        attributes={"density": 1.0 / b.sizes["vocab"]},
    )
    b.op(
        "loss.loss",
        "pointwise",
        "elementwise",
        rows,
        inputs=[(peak, rows), (total, rows), (picked, rows)],
        outputs=[(b.tensor("loss", rows, dtype="fp32"), rows)],
        grad="cross_entropy",
        saved=(logits, peak, total),
    )
