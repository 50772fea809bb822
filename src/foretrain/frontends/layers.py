"""The layer library: small functions that add operators to a block under construction.

Sizes are global: what the whole job computes for one micro-step, before any split over ranks.
Dims are written as one text, "batch seq hidden", in storage order. The dims of a weight matrix
are those of its output and the dim "hidden"; an operator names the same extent "in" where it sums
over it and "out" where it produces it, because one operator may do both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foretrain.frontends.spec import ModelSpec
from foretrain.graph.ir import Block, Dim, Kind, Op, Operand, Role, Tensor

Use = tuple[str, str]  # a tensor and the operator dims that index it
Groups = Mapping[str, tuple[str, ...]]

X = "batch seq hidden"
Q = "batch seq kv_head group head_dim"
KV = "batch seq kv_head head_dim"


@dataclass(slots=True, kw_only=True)
class BlockBuilder:
    """Collects the tensors and operators of one block; `sizes` gives the extent of every dim."""

    sizes: Mapping[str, int]
    spec: ModelSpec
    dropout: bool  # whether dropout operators are built at all
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    ops: list[Op] = field(default_factory=list[Op])

    def tensor(
        self,
        name: str,
        dims: str,
        *,
        role: Role = "activation",
        dtype: str = "compute",
        tied_to: str | None = None,
    ) -> str:
        """Returns the name of a new tensor."""
        names = tuple(dims.split())
        shape = tuple(self.sizes[dim] for dim in names)
        self.tensors.append(
            Tensor(name=name, dims=names, shape=shape, role=role, dtype=dtype, tied_to=tied_to)
        )
        return name

    def weight(self, name: str, dims: str, *, tied_to: str | None = None) -> str:
        """Returns the name of a new weight."""
        return self.tensor(name, dims, role="weight", dtype="weight", tied_to=tied_to)

    def op(
        self,
        name: str,
        kind: Kind,
        cost: str,
        dims: str,
        *,
        inputs: Sequence[Use],
        outputs: Sequence[Use],
        reduce: str = "",
        grad: str = "pointwise",
        linear: tuple[int, ...] = (),
        saved: tuple[str, ...] = (),
        groups: Groups | None = None,
        flops: float = 0.0,
        density: float = 1.0,
        combiner: Literal["sum", "max"] = "sum",
        fuse: str | None = None,
        attributes: Mapping[str, float | str | bool] | None = None,
    ) -> None:
        """Appends an operator; dims named in `reduce` are summed away."""
        reductions = reduce.split()
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                cost=cost,
                dims=tuple(
                    Dim(name=dim, size=self.sizes[dim], reduction=dim in reductions)
                    for dim in dims.split()
                ),
                inputs=tuple(Operand(tensor=t, dims=tuple(d.split())) for t, d in inputs),
                outputs=tuple(Operand(tensor=t, dims=tuple(d.split())) for t, d in outputs),
                linear=linear,
                saved=saved,
                groups=groups or {},
                flops=flops,
                density=density,
                combiner=combiner,
                grad=grad,
                fuse=fuse,
                attributes=attributes or {},
            )
        )

    def block(
        self, name: str, *, repeat: int, input: str | None, output: str | None, recompute: bool
    ) -> Block:
        """Returns the finished block."""
        return Block(
            name=name,
            repeat=repeat,
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            input=input,
            output=output,
            recompute=recompute,
        )


def add_norm(b: BlockBuilder, name: str, x: str, *, dims: str = X, out: str | None = None) -> str:
    """Returns the output of a LayerNorm or RMSNorm over the last of `dims`."""
    width = dims.split()[-1]
    inputs = [(x, dims), (b.weight(f"{name}.weight", width), width)]
    if b.spec.norm == "layernorm" and b.spec.norm_bias:
        inputs.append((b.weight(f"{name}.bias", width), width))
    out = b.tensor(out or f"{name}.out", dims)
    b.op(
        name,
        "pointwise",
        b.spec.norm,
        dims,
        inputs=inputs,
        outputs=[(out, dims)],
        grad="norm",
        saved=(x,),
    )
    return out


def add_column_linear(
    b: BlockBuilder,
    name: str,
    x: str,
    width: str,
    *,
    bias: bool,
    groups: Groups | None = None,
    fuse: str | None = None,
    out: str | None = None,
    tied_to: str | None = None,
    rows: str = "batch seq",
    depth: str = "hidden",
) -> str:
    """Returns the output of a linear layer from `depth` to the dims `width`, for each of `rows`.

    Its output dims may be split freely: a bias is split with them and rides along as an operand.
    A layer from hidden to hidden has the width "out"; its output is indexed by hidden again.
    """
    weight = b.weight(f"{name}.weight", f"{width} {depth}", tied_to=tied_to)
    summed = "in" if depth == "hidden" else depth
    inputs = [(x, f"{rows} {summed}"), (weight, f"{width} {summed}")]
    if bias:
        inputs.append((b.weight(f"{name}.bias", width), width))
    dims = f"{rows} {width}"
    out = b.tensor(out or f"{name}.out", f"{rows} hidden" if width == "out" else dims)
    b.op(
        name,
        "contraction",
        "gemm",
        f"{dims} {summed}",
        reduce=summed,
        inputs=inputs,
        outputs=[(out, dims)],
        grad="contraction",
        saved=(x, weight),
        groups=groups,
        flops=2.0,
        fuse=fuse,
    )
    return out


def add_row_linear(b: BlockBuilder, name: str, x: str, width: str, *, groups: Groups) -> str:
    """Returns the output of a linear layer from the dims `width` to hidden, bias left out.

    Its input dims may be split, which leaves partial sums; a bias is added after they are summed,
    so it belongs to the residual operator that follows (`add_residual`).
    """
    weight = b.weight(f"{name}.weight", f"hidden {width}")
    out = b.tensor(f"{name}.out", X)
    b.op(
        name,
        "contraction",
        "gemm",
        f"batch seq out {width}",
        reduce=width,
        inputs=[(x, f"batch seq {width}"), (weight, f"out {width}")],
        outputs=[(out, "batch seq out")],
        grad="contraction",
        saved=(x, weight),
        groups=groups,
        flops=2.0,
    )
    return out


def add_residual(
    b: BlockBuilder, name: str, x: str, skip: str, *, biases: Sequence[str], out: str
) -> str:
    """Returns skip + dropout(x + biases): those of the linear layers that x was made of."""
    inputs = [(x, X), *((b.weight(bias, "hidden"), "hidden") for bias in biases), (skip, X)]
    outputs = [(b.tensor(out, X), X)]
    saved: tuple[str, ...] = ()
    drop = b.dropout and b.spec.dropout > 0
    if drop:
        mask = b.tensor(f"{name}.mask", X, dtype="uint8")
        outputs.append((mask, X))
        saved = (mask,)
    b.op(
        name,
        "pointwise",
        "bias_dropout_add" if drop or biases else "residual",
        X,
        inputs=inputs,
        outputs=outputs,
        grad="residual",
        saved=saved,
    )
    return out


def add_sum(b: BlockBuilder, name: str, x: str, y: str, *, out: str | None = None) -> str:
    """Returns x + y; partial sums on the same axes pass, so two of them are reduced once."""
    out = b.tensor(out or f"{name}.out", X)
    b.op(
        name,
        "pointwise",
        "residual",
        X,
        inputs=[(x, X), (y, X)],
        outputs=[(out, X)],
        grad="sum",
        linear=(0, 1),
    )
    return out


def add_activation(b: BlockBuilder, name: str, cost: str, inputs: Sequence[str], dims: str) -> str:
    """Returns an activation of `inputs` (two when gated), which are kept for backward."""
    out = b.tensor(f"{name}.out", dims)
    b.op(
        name,
        "pointwise",
        cost,
        dims,
        inputs=[(tensor, dims) for tensor in inputs],
        outputs=[(out, dims)],
        saved=tuple(inputs),
    )
    return out


def add_select(b: BlockBuilder, name: str, x: str, rows: str) -> str:
    """Returns chosen positions of x: one for each of `rows` ("batch": one per sample)."""
    dims = f"{rows} hidden"
    out = b.tensor(f"{name}.out", dims)
    b.op(
        name,
        "gather",
        "select",
        f"{rows} seq hidden",
        reduce="seq",
        inputs=[(x, X)],
        outputs=[(out, dims)],
        grad="select",
        linear=(0,),
        density=1.0 / b.sizes["seq"],
    )
    return out


def add_dropout(
    b: BlockBuilder,
    name: str,
    x: str,
    dims: str,
    *,
    out: str | None = None,
    attributes: Mapping[str, float | str | bool] | None = None,
) -> str:
    """Returns dropout(x); the mask, one byte per element, is kept for backward."""
    out = b.tensor(out or f"{name}.out", dims)
    mask = b.tensor(f"{name}.mask", dims, dtype="uint8")
    b.op(
        name,
        "pointwise",
        "dropout",
        dims,
        inputs=[(x, dims)],
        outputs=[(out, dims), (mask, dims)],
        grad="dropout",
        saved=(mask,),
        attributes=attributes,
    )
    return out
