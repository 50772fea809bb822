"""A transformer as a Graph: embedding, layers x L, head with the loss.

    embedding   frontends/embeddings.py                                               -> x
    layers      attention: norm, q, k, v, norm_q, norm_k, rotary_q, rotary_k, core | scores,
                softmax, dropout, context, out, residual;
                mlp: norm, up, gate, act, down, residual                              -> x_out
    head        frontends/heads.py

Post-norm layers have their norms after the residuals; parallel ones join attention and MLP
(mlp.join) before the one residual.

Sizes are global (see graph/ir.py). An operator's output is called like the operator, with ".out".
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.errors import InputError, Problem
from foretrain.frontends.attention import add_fused_core, add_rotary, add_unfused_core
from foretrain.frontends.embeddings import build_embedding
from foretrain.frontends.heads import build_head
from foretrain.frontends.layers import (
    KV,
    BlockBuilder,
    Q,
    X,
    add_activation,
    add_column_linear,
    add_norm,
    add_residual,
    add_row_linear,
    add_sum,
)
from foretrain.frontends.spec import ModelSpec
from foretrain.graph.ir import Block, Graph

ATTENTION = ("fused", "unfused")


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
        "position": (spec.image_sequence or spec.max_positions or sequence) + spec.position_padding,
        "type": spec.token_types,
        "masked": min(spec.masked or sequence, sequence),
        "class": spec.classes,
        "patch": sequence - int(spec.class_token),
        "pixel": spec.channels * (spec.patch or 0) ** 2,
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
            build_embedding(builder()),
            _layers(builder(), fused=attention == "fused"),
            build_head(builder()),
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
        "causal": spec.causal,
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
    limit, fixed = spec.max_positions, spec.image_sequence
    if fixed is not None and sequence != fixed:
        problems.append(
            Problem(
                what=f"{spec.name} cuts an image of {spec.image} pixels into {fixed} positions",
                where="training.sequence",
                value=sequence,
                allowed=f"{fixed}",
                way_out="leave sequence out, or set model.image",
            )
        )
    elif spec.positions == "learned" and limit is not None and sequence > limit:
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


def _layers(b: BlockBuilder, *, fused: bool) -> Block:
    x = b.tensor("x_in", X)
    if b.spec.parallel:
        _parallel(b, x, fused=fused)
    elif b.spec.norm_order == "post":
        x = _residual(b, "attention", _attention(b, x, fused=fused), x, "attention.residual.out")
        x = add_norm(b, "attention.norm", x)
        x = _residual(b, "mlp", _mlp(b, x), x, "mlp.residual.out")
        add_norm(b, "mlp.norm", x, out="x_out")
    else:
        attended = _attention(b, add_norm(b, "attention.norm", x), fused=fused)
        x = _residual(b, "attention", attended, x, "attention.residual.out")
        _residual(b, "mlp", _mlp(b, add_norm(b, "mlp.norm", x)), x, "x_out")
    return b.block("layers", repeat=b.spec.layers, input="x_in", output="x_out", recompute=True)


def _parallel(b: BlockBuilder, x: str, *, fused: bool) -> None:
    """Attention and MLP beside each other: their partial sums are added, then reduced once."""
    normed = add_norm(b, "attention.norm", x)
    attended = _attention(b, normed, fused=fused)
    other = normed if b.spec.shared_norm else add_norm(b, "mlp.norm", x)
    both = add_sum(b, "mlp.join", attended, _mlp(b, other))
    biases = [*_bias_names(b, "attention"), *_bias_names(b, "mlp")]
    add_residual(b, "mlp.residual", both, x, biases=biases, out="x_out")


def _residual(b: BlockBuilder, part: str, x: str, skip: str, out: str) -> str:
    return add_residual(b, f"{part}.residual", x, skip, biases=_bias_names(b, part), out=out)


def _bias_names(b: BlockBuilder, part: str) -> list[str]:
    """The bias of the row linear layer of a part: it is added after the partial sums are."""
    if part == "attention":
        return ["attention.out.bias"] if b.spec.out_bias else []
    return ["mlp.down.bias"] if b.spec.mlp_bias else []


def _attention(b: BlockBuilder, x: str, *, fused: bool) -> str:
    spec = b.spec
    heads = "kv_head group head_dim"
    q = add_column_linear(
        b,
        "attention.q",
        x,
        heads,
        bias=spec.qkv_bias,
        groups={"heads": ("kv_head", "group"), "out": ("kv_head", "group", "head_dim")},
        fuse="qkv",
    )
    k, v = (
        add_column_linear(
            b,
            f"attention.{name}",
            x,
            "kv_head head_dim",
            bias=spec.qkv_bias,
            groups={"heads": ("kv_head",), "out": ("kv_head", "head_dim")},
            fuse="qkv",
        )
        for name in ("k", "v")
    )
    if spec.qk_norm:
        q = add_norm(b, "attention.norm_q", q, dims=Q)
        k = add_norm(b, "attention.norm_k", k, dims=KV)
    if spec.positions == "rotary":
        q = add_rotary(b, "attention.rotary_q", q, Q)
        k = add_rotary(b, "attention.rotary_k", k, KV)
    core = (add_fused_core if fused else add_unfused_core)(b, q, k, v)
    return add_row_linear(
        b,
        "attention.out",
        core,
        heads,
        groups={"heads": ("kv_head", "group"), "in": ("kv_head", "group", "head_dim")},
    )


def _mlp(b: BlockBuilder, x: str) -> str:
    spec = b.spec
    names = ("mlp.up", "mlp.gate") if spec.gated else ("mlp.up",)
    wide = [
        add_column_linear(
            b,
            name,
            x,
            "ffn",
            bias=spec.mlp_bias,
            groups={"out": ("ffn",)},
            fuse="gate_up" if spec.gated else None,
        )
        for name in names
    ]
    wide.reverse()  # act(gate) x up
    activated = add_activation(b, "mlp.act", spec.activation, wide, "batch seq ffn")
    return add_row_linear(b, "mlp.down", activated, "ffn", groups={"in": ("ffn",)})
