"""A transformer's layer, and the parts that it is made of.

    attention   norm, q, k, v, norm_q, norm_k, rotary_q, rotary_k, core | scores, softcap, bias,
                softmax, dropout, context, out, norm_after, residual
    cross       the same between a decoder's layer (q) and an encoder's output (k, v)
    mlp         norm, up, gate, act, dropout, down, norm_after, residual

Post-norm layers have their norms after the residuals, layers with both a second one before them;
parallel ones join attention and MLP (mlp.join) before the one residual.
"""

from __future__ import annotations

from collections.abc import Callable

from foretrain.frontends.attention import (
    SOURCE,
    Core,
    add_fused_core,
    add_rotary,
    add_unfused_core,
)
from foretrain.frontends.layers import (
    BlockBuilder,
    Q,
    add_activation,
    add_column_linear,
    add_dropout,
    add_norm,
    add_residual,
    add_row_linear,
    add_sum,
)

HEADS = "kv_head group head_dim"


def add_attention(
    b: BlockBuilder, x: str, core: Core, *, fused: bool, source: str | None = None
) -> str:
    """Returns attention from x to x, or to the `source` that cross attention reads."""
    q = _add_queries(b, x, core, fuse="qkv" if source is None else None)
    k, v = (_add_keys(b, name, source or x, core) for name in ("k", "v"))
    spec = b.spec
    if spec.qk_norm:
        q = add_norm(b, core.name("norm_q"), q, dims=Q)
        k = add_norm(b, core.name("norm_k"), k, dims=core.keys_made)
    if spec.positions == "rotary":
        q = add_rotary(b, core.name("rotary_q"), q, Q)
        k = add_rotary(b, core.name("rotary_k"), k, core.keys_made)
    attended = (add_fused_core if fused else add_unfused_core)(b, core, q, k, v)
    return add_row_linear(
        b,
        core.name("out"),
        attended,
        HEADS,
        groups={"heads": ("kv_head", "group"), "in": ("kv_head", "group", "head_dim")},
    )


def _add_queries(b: BlockBuilder, x: str, core: Core, *, fuse: str | None) -> str:
    return add_column_linear(
        b,
        core.name("q"),
        x,
        HEADS,
        bias=b.spec.qkv_bias,
        groups={"heads": ("kv_head", "group"), "out": ("kv_head", "group", "head_dim")},
        fuse=fuse,
    )


def _add_keys(b: BlockBuilder, name: str, x: str, core: Core) -> str:
    cross = core.keys == SOURCE
    return add_column_linear(
        b,
        core.name(name),
        x,
        "kv_head head_dim",
        bias=b.spec.qkv_bias,
        groups={"heads": ("kv_head",), "out": ("kv_head", "head_dim")},
        fuse="kv" if cross else "qkv",
        rows=f"batch {SOURCE}" if cross else "batch seq",
    )


def add_mlp(b: BlockBuilder, x: str) -> str:
    """Returns the MLP of x, its last bias left out (it belongs to the residual)."""
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
    if b.dropout and spec.inner_dropout > 0:
        activated = add_dropout(b, "mlp.dropout", activated, "batch seq ffn")
    return add_row_linear(b, "mlp.down", activated, "ffn", groups={"in": ("ffn",)})


def bias_names(b: BlockBuilder, part: str) -> list[str]:
    """Returns the bias of the row linear layer of a part: it is added after partial sums are."""
    if part == "mlp":
        return ["mlp.down.bias"] if b.spec.mlp_bias else []
    return [f"{part}.out.bias"] if b.spec.out_bias else []


def add_layer(b: BlockBuilder, x: str, core: Core, *, fused: bool) -> None:
    """Adds a layer of attention and MLP, whose output is called "x_out"."""
    if b.spec.parallel:
        _add_parallel(b, x, core, fused=fused)
        return
    x = add_part(b, "attention", x, lambda y: add_attention(b, y, core, fused=fused))
    add_part(b, "mlp", x, lambda y: add_mlp(b, y), out="x_out")


def add_part(
    b: BlockBuilder, part: str, x: str, inner: Callable[[str], str], *, out: str | None = None
) -> str:
    """Returns x + inner(x) with the norms where the model has them."""
    order = b.spec.norm_order
    out = out or f"{part}.residual.out"
    y = inner(x if order == "post" else add_norm(b, f"{part}.norm", x))
    if order == "both":
        y = add_norm(b, f"{part}.norm_after", y)
    name, biases = f"{part}.residual", bias_names(b, part)
    if order != "post":
        return add_residual(b, name, y, x, biases=biases, out=out)
    x = add_residual(b, name, y, x, biases=biases, out=f"{name}.out")
    return add_norm(b, f"{part}.norm", x, out=None if out == f"{name}.out" else out)


def _add_parallel(b: BlockBuilder, x: str, core: Core, *, fused: bool) -> None:
    """Attention and MLP beside each other: their partial sums are added, then reduced once."""
    normed = add_norm(b, "attention.norm", x)
    attended = add_attention(b, normed, core, fused=fused)
    other = normed if b.spec.shared_norm else add_norm(b, "mlp.norm", x)
    both = add_sum(b, "mlp.join", attended, add_mlp(b, other))
    biases = [*bias_names(b, "attention"), *bias_names(b, "mlp")]
    add_residual(b, "mlp.residual", both, x, biases=biases, out="x_out")
