"""The attention core, fused (one kernel, nothing of size seq x seq is stored) or unfused.

FLOP per query, key and head: 2 head_dim for the scores and 2 head_dim for the weighted values.
A causal mask hides half of the square; kernels that are not fused compute all of it.
The bias of ALiBi has no weights and is added where the mask is: no operator of its own.
"""

from __future__ import annotations

from foretrain.frontends.layers import BlockBuilder, Q, add_dropout

KV_READ = "batch seq_kv kv_head head_dim"  # keys and values, indexed by what a query sees
SQUARE = "batch kv_head group seq seq_kv"


def attention_density(sequence: int, window: int | None, *, causal: bool = True) -> float:
    """Returns the visible share of the seq x seq square: all of it without a causal mask.

    Causal, without a window 1/2. With a window of w keys the first w queries see a triangle and the
    others w keys each: (w s - w^2/2) / s^2, which is 1/2 again at w = s.
    """
    if not causal:
        return 1.0
    if window is None or window >= sequence:
        return 0.5
    share = window / sequence
    return share - share * share / 2


def add_fused_core(b: BlockBuilder, q: str, k: str, v: str) -> str:
    """Returns the output of a fused attention kernel, which keeps one log-sum-exp per query."""
    out = b.tensor("attention.core.out", Q)
    lse = b.tensor("attention.core.lse", "batch seq kv_head group", dtype="fp32")
    b.op(
        "attention.core",
        "contraction",
        "attention",
        "batch seq seq_kv kv_head group head_dim",
        reduce="seq_kv",
        inputs=[(q, Q), (k, KV_READ), (v, KV_READ)],
        outputs=[(out, Q), (lse, "batch seq kv_head group")],
        grad="attention",
        saved=(q, k, v, out, lse),
        flops=4.0,
        density=attention_density(b.sizes["seq"], b.spec.window, causal=b.spec.causal),
        attributes={
            "causal": b.spec.causal,
            "window": float(b.spec.window or 0),
            "dropout": b.spec.attention_dropout if b.dropout else 0.0,
            "softmax": True,
            "selective": True,
        },
    )
    return out


def add_unfused_core(b: BlockBuilder, q: str, k: str, v: str) -> str:
    """Returns the output of attention as separate kernels: scores, softmax, dropout, context."""
    probabilities = _add_softmax(b, _add_scores(b, q, k))
    if b.dropout and b.spec.attention_dropout > 0:
        probabilities = add_dropout(
            b, "attention.dropout", probabilities, SQUARE, attributes={"selective": True}
        )
    out = b.tensor("attention.context.out", Q)
    b.op(
        "attention.context",
        "contraction",
        "gemm",
        "batch seq seq_kv kv_head group head_dim",
        reduce="seq_kv",
        inputs=[(probabilities, SQUARE), (v, KV_READ)],
        outputs=[(out, Q)],
        grad="contraction",
        saved=(probabilities, v),
        flops=2.0,
        attributes={"selective": True},
    )
    return out


def _add_scores(b: BlockBuilder, q: str, k: str) -> str:
    scores = b.tensor("attention.scores.out", SQUARE)
    b.op(
        "attention.scores",
        "contraction",
        "gemm",
        "batch seq seq_kv kv_head group head_dim",
        reduce="head_dim",
        inputs=[(q, Q), (k, KV_READ)],
        outputs=[(scores, SQUARE)],
        grad="contraction",
        saved=(q, k),
        flops=2.0,
        attributes={"selective": True},
    )
    return scores


def _add_softmax(b: BlockBuilder, scores: str) -> str:
    out = b.tensor("attention.softmax.out", SQUARE)
    b.op(
        "attention.softmax",
        "pointwise",
        "softmax",
        SQUARE,
        inputs=[(scores, SQUARE)],
        outputs=[(out, SQUARE)],
        grad="softmax",
        saved=(out,),
        attributes={
            "causal": b.spec.causal,
            "window": float(b.spec.window or 0),
            "softmax": True,
            "selective": True,
        },
    )
    return out


def add_rotary(b: BlockBuilder, name: str, x: str, dims: str) -> str:
    """Returns rotary position encoding of queries or keys: linear in x, with constant factors."""
    out = b.tensor(f"{name}.out", dims)
    b.op(
        name,
        "pointwise",
        "rotary",
        dims,
        inputs=[(x, dims)],
        outputs=[(out, dims)],
        grad="linear",
        linear=(0,),
        attributes={"fraction": b.spec.rotary_fraction},
    )
    return out
