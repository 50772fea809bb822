"""The attention core, fused (one kernel, nothing of size seq x seq is stored) or unfused.

FLOP per query, key and head: 2 head_dim for the scores and 2 head_dim for the weighted values.
A causal mask hides half of the square; kernels that are not fused compute all of it.

What is added to the scores: a *bias* of ALiBi (no weights; a line per head) or of a relative
position table (`buckets` rows, one column per head, shared by the layers of a stack). Unfused it is
an operator of its own that reads and writes the scores; the gradient of a table sums those of the
scores over the samples. A *soft cap* is cap x tanh(scores / cap). Fused kernels that can do either
do it in registers (`Stack.fused_scores` names what the stack's kernel can do).
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.frontends.layers import BlockBuilder, Q, add_dropout
from foretrain.frontends.spec import ModelSpec

#: The dim of the keys: of the queries' own sequence, and of an encoder's output.
OWN, SOURCE = "seq_kv", "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One attention core: its name, what its queries see, what is added to the scores.

    `table` is the name "block/weight" of the relative position table.
    """

    part: str = "attention"
    keys: str = OWN
    causal: bool = True
    window: int | None = None
    bias: str = ""  # alibi, relative
    softcap: bool = False
    table: str = ""

    @property
    def reads(self) -> str:
        """Returns the dims of keys and values as a query sees them."""
        return f"batch {self.keys} kv_head head_dim"

    @property
    def keys_made(self) -> str:
        """Returns the dims of keys and values as their linear layers leave them."""
        return f"batch {SOURCE if self.keys == SOURCE else 'seq'} kv_head head_dim"

    @property
    def square(self) -> str:
        """Returns the dims of the scores."""
        return f"batch kv_head group seq {self.keys}"

    def name(self, word: str) -> str:
        """Returns the name of an operator or tensor of this core."""
        return f"{self.part}.{word}"


def self_core(spec: ModelSpec, *, block: str = "layers", window: int | None = None) -> Core:
    """Returns the core of the self-attention of a model's layers."""
    bias = spec.positions if spec.positions in ("alibi", "relative") else ""
    return Core(
        causal=spec.causal,
        window=window,
        bias=bias,
        softcap=spec.softcap,
        table=f"{block}/attention.relative.weight",
    )


def scores_need(spec: ModelSpec) -> frozenset[str]:
    """Returns what a fused kernel must be able to do with the scores of a model."""
    needs = {"alibi": spec.positions == "alibi", "relative": spec.positions == "relative"}
    needs["softcap"] = spec.softcap
    return frozenset(name for name, needed in needs.items() if needed)


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


def add_fused_core(b: BlockBuilder, core: Core, q: str, k: str, v: str) -> str:
    """Returns the output of a fused attention kernel, which keeps one log-sum-exp per query."""
    name = core.name("core")
    out = b.tensor(f"{name}.out", Q)
    lse = b.tensor(f"{name}.lse", "batch seq kv_head group", dtype="fp32")
    table = [_table(b, core)] if core.bias == "relative" else []
    bucket = " bucket" if table else ""
    density = attention_density(b.sizes["seq"], core.window, causal=core.causal)
    b.op(
        name,
        "contraction",
        "attention",
        f"batch seq {core.keys} kv_head group head_dim{bucket}",
        reduce=f"{core.keys}{bucket}",
        inputs=[(q, Q), (k, core.reads), (v, core.reads), *table],
        outputs=[(out, Q), (lse, "batch seq kv_head group")],
        grad="attention",
        saved=(q, k, v, out, lse),
        flops=4.0,
        density=density / b.sizes["bucket"] if table else density,
        attributes={
            "causal": core.causal,
            "window": float(core.window or 0),
            "dropout": b.spec.attention_dropout if b.dropout else 0.0,
            "softmax": True,
            "selective": True,
        },
    )
    return out


def add_unfused_core(b: BlockBuilder, core: Core, q: str, k: str, v: str) -> str:
    """Returns the output of attention as separate kernels: scores, softmax, dropout, context."""
    scores = _add_scores(b, core, q, k)
    if core.softcap:
        scores = _add_softcap(b, core, scores)
    if core.bias:
        scores = _add_bias(b, core, scores)
    probabilities = _add_softmax(b, core, scores)
    if b.dropout and b.spec.attention_dropout > 0:
        probabilities = add_dropout(
            b, core.name("dropout"), probabilities, core.square, attributes={"selective": True}
        )
    out = b.tensor(f"{core.part}.context.out", Q)
    b.op(
        core.name("context"),
        "contraction",
        "gemm",
        f"batch seq {core.keys} kv_head group head_dim",
        reduce=core.keys,
        inputs=[(probabilities, core.square), (v, core.reads)],
        outputs=[(out, Q)],
        grad="contraction",
        saved=(probabilities, v),
        flops=2.0,
        attributes={"selective": True},
    )
    return out


def _add_scores(b: BlockBuilder, core: Core, q: str, k: str) -> str:
    scores = b.tensor(core.name("scores.out"), core.square)
    b.op(
        core.name("scores"),
        "contraction",
        "gemm",
        f"batch seq {core.keys} kv_head group head_dim",
        reduce="head_dim",
        inputs=[(q, Q), (k, core.reads)],
        outputs=[(scores, core.square)],
        grad="contraction",
        saved=(q, k),
        flops=2.0,
        attributes={"selective": True},
    )
    return scores


def _add_softcap(b: BlockBuilder, core: Core, scores: str) -> str:
    """Returns cap x tanh(scores / cap); backward needs its result only."""
    out = b.tensor(core.name("softcap.out"), core.square)
    b.op(
        core.name("softcap"),
        "pointwise",
        "softcap",
        core.square,
        inputs=[(scores, core.square)],
        outputs=[(out, core.square)],
        saved=(out,),
        attributes={"selective": True},
    )
    return out


def _add_bias(b: BlockBuilder, core: Core, scores: str) -> str:
    """Returns scores + bias, where the bias of a table is as large as the scores of one sample."""
    name = core.name("bias")
    out = b.tensor(f"{name}.out", core.square)
    inputs = [(scores, core.square)]
    dims, reduce = core.square, ""
    if core.bias == "relative":
        rows = f"kv_head group seq {core.keys}"
        inputs += [(b.tensor(f"{name}.rows", rows, role="buffer"), rows), _table(b, core)]
        dims, reduce = f"{dims} bucket", "bucket"
    b.op(
        name,
        "pointwise",
        "score_bias",
        dims,
        reduce=reduce,
        inputs=inputs,
        outputs=[(out, core.square)],
        grad="bias",
        density=1.0 / b.sizes["bucket"] if reduce else 1.0,
        attributes={"selective": True},
    )
    return out


def _table(b: BlockBuilder, core: Core) -> tuple[str, str]:
    """The relative position table, which the layers of a stack share, and its dims."""
    dims = "bucket kv_head group"
    return b.weight(core.table.partition("/")[2], dims, tied_to=core.table), dims


def _add_softmax(b: BlockBuilder, core: Core, scores: str) -> str:
    out = b.tensor(core.name("softmax.out"), core.square)
    b.op(
        core.name("softmax"),
        "pointwise",
        "softmax",
        core.square,
        inputs=[(scores, core.square)],
        outputs=[(out, core.square)],
        grad="softmax",
        saved=(out,),
        attributes={
            "causal": core.causal,
            "window": float(core.window or 0),
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
