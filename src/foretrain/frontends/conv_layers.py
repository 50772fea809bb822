"""The layer library of convolutional networks: operators over batch x channel x height x width.

Dims of an operator are those of its output. An input whose height and width differ from the
output's is indexed by "in_height" and "in_width", which no operator iterates over: only batch and
channels can be split, because a spatial split needs an exchange of halos. A weight of a
convolution is (out, in, r, s) with `in` = input channels per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretrain.graph.ir import Block, Dim, Kind, Op, Operand, Role, Tensor

Axes = tuple[str, ...]
MAP: Axes = ("batch", "channel", "height", "width")
IN_MAP: Axes = ("batch", "channel", "in_height", "in_width")
ROWS: Axes = ("batch", "out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature map under construction: the tensor and its channels, height and width."""

    name: str
    channels: int
    height: int
    width: int


@dataclass(slots=True, kw_only=True)
class ConvBuilder:
    """Collects the tensors and operators of one block of a network on `batch` images."""

    batch: int
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    ops: list[Op] = field(default_factory=list[Op])

    def tensor(
        self, name: str, dims: Axes, shape: Sequence[int], role: Role = "activation",
        dtype: str = "compute",
    ) -> str:  # fmt: skip
        """Returns the name of a new tensor."""
        self.tensors.append(
            Tensor(name=name, dims=dims, shape=tuple(shape), role=role, dtype=dtype)
        )
        return name

    def weight(self, name: str, dims: Axes, shape: Sequence[int]) -> str:
        """Returns the name of a new weight."""
        return self.tensor(name, dims, shape, "weight", "weight")

    def map(self, name: str, channels: int, height: int, width: int) -> Feature:
        """Returns a new feature map."""
        self.tensor(name, MAP, (self.batch, channels, height, width))
        return Feature(name=name, channels=channels, height=height, width=width)

    def op(
        self,
        name: str,
        kind: Kind,
        cost: str,
        dims: Sequence[tuple[str, int]],
        *,
        inputs: Sequence[tuple[str, Axes]],
        outputs: Sequence[tuple[str, Axes]],
        reduce: Axes = (),
        **more: Any,
    ) -> None:
        """Appends an operator; dims named in `reduce` are summed away."""
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                cost=cost,
                dims=tuple(Dim(name=d, size=n, reduction=d in reduce) for d, n in dims),
                inputs=tuple(Operand(tensor=t, dims=d) for t, d in inputs),
                outputs=tuple(Operand(tensor=t, dims=d) for t, d in outputs),
                **more,
            )
        )

    def sizes(self, x: Feature) -> list[tuple[str, int]]:
        """Returns the dims of a feature map with their sizes."""
        return list(zip(MAP, (self.batch, x.channels, x.height, x.width), strict=True))

    def block(self, name: str, *, repeat: int, input: str | None, output: str | None) -> Block:
        """Returns the finished block."""
        return Block(
            name=name, repeat=repeat, tensors=tuple(self.tensors), ops=tuple(self.ops),
            input=input, output=output, recompute=input is not None and output is not None,
        )  # fmt: skip


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def add_conv(
    b: ConvBuilder,
    name: str,
    x: Feature,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
    bias: bool = False,
) -> Feature:
    """Returns the output of a convolution; without `padding` the map keeps its size at stride 1.

    FLOP: 2 n k oh ow (c / groups) r s. A depthwise convolution has as many groups as channels.
    """
    r, s = _pair(kernel)
    pad_r, pad_s = ((r - 1) // 2, (s - 1) // 2) if padding is None else _pair(padding)
    height = (x.height + 2 * pad_r - r) // stride + 1
    width = (x.width + 2 * pad_s - s) // stride + 1
    per_group = x.channels // groups
    weight = b.weight(f"{name}.weight", ("out", "in", "r", "s"), (channels, per_group, r, s))
    # the input channels of one group are a part of the tensor that no single dim indexes
    channel = "in" if groups == 1 else "out" if groups == x.channels == channels else "in_channel"
    inputs = [(x.name, ("batch", channel, "in_height", "in_width")), (weight, b.tensors[-1].dims)]
    if bias:
        inputs.append((b.weight(f"{name}.bias", ("out",), (channels,)), ("out",)))
    y = b.map(f"{name}.out", channels, height, width)
    b.op(
        name,
        "contraction",
        "conv2d",
        [
            ("batch", b.batch), ("out", channels), ("height", height), ("width", width),
            ("in", per_group), ("r", r), ("s", s),
        ],
        inputs=inputs,
        outputs=[(y.name, ("batch", "out", "height", "width"))],
        reduce=("in", "r", "s"),
        grad="conv2d",
        saved=(x.name, weight),
        flops=2.0,
        attributes={
            "h": float(x.height), "w": float(x.width), "stride": float(stride),
            "padding": float(max(pad_r, pad_s)), "groups": float(groups),
            "channels": float(channels),
        },
    )  # fmt: skip
    return y


def add_batch_norm(b: ConvBuilder, name: str, x: Feature) -> Feature:
    """Returns the output of batch normalisation in training: statistics of this rank's samples."""
    weights = [b.weight(f"{name}.{w}", ("channel",), (x.channels,)) for w in ("weight", "bias")]
    y = b.map(f"{name}.out", x.channels, x.height, x.width)
    b.op(
        name,
        "pointwise",
        "batchnorm",
        b.sizes(x),
        inputs=[(x.name, MAP), *((w, ("channel",)) for w in weights)],
        outputs=[(y.name, MAP)],
        grad="norm",
        saved=(x.name,),
    )
    return y


def add_activation(b: ConvBuilder, name: str, x: Feature, cost: str) -> Feature:
    """Returns relu, relu6, silu (swish), hardswish or sigmoid of x.

    What backward reads is the output for those that work in place, the input for the others.
    """
    y = b.map(f"{name}.out", x.channels, x.height, x.width)
    kept = x.name if cost in ("silu", "hardswish") else y.name
    b.op(
        name, "pointwise", cost, b.sizes(x), inputs=[(x.name, MAP)], outputs=[(y.name, MAP)],
        saved=(kept,), flops=1.0,
    )  # fmt: skip
    return y


def add_pool(
    b: ConvBuilder, name: str, x: Feature, kernel: int, stride: int, padding: int = 0, *,
    kind: str = "max", ceil: bool = False,
) -> Feature:  # fmt: skip
    """Returns max or average pooling; max keeps its input and the chosen positions (int64)."""
    up = stride - 1 if ceil else 0
    height = (x.height + 2 * padding - kernel + up) // stride + 1
    width = (x.width + 2 * padding - kernel + up) // stride + 1
    y = b.map(f"{name}.out", x.channels, height, width)
    outputs, saved = [(y.name, MAP)], ()
    if kind == "max":
        where = b.tensor(f"{name}.indices", MAP, (b.batch, x.channels, height, width),
                         dtype="int64")  # fmt: skip
        outputs.append((where, MAP))
        saved = (x.name, where)
    b.op(
        name, "pointwise", "pool", b.sizes(y), inputs=[(x.name, IN_MAP)], outputs=outputs,
        saved=saved, flops=float(kernel * kernel),
    )  # fmt: skip
    return y


def add_adaptive_pool(b: ConvBuilder, name: str, x: Feature, size: int = 1) -> Feature:
    """Returns average pooling to size x size, global pooling by default; nothing if it is so."""
    if (x.height, x.width) == (size, size):
        return x
    y = b.map(f"{name}.out", x.channels, size, size)
    b.op(
        name, "pointwise", "pool", b.sizes(y), inputs=[(x.name, IN_MAP)], outputs=[(y.name, MAP)],
        flops=float(x.height * x.width) / (size * size),
    )  # fmt: skip
    return y


def add_sum(b: ConvBuilder, name: str, x: Feature, skip: Feature) -> Feature:
    """Returns x + skip."""
    y = b.map(f"{name}.out", x.channels, x.height, x.width)
    b.op(
        name, "pointwise", "residual", b.sizes(x), inputs=[(x.name, MAP), (skip.name, MAP)],
        outputs=[(y.name, MAP)], grad="residual", flops=1.0,
    )  # fmt: skip
    return y


def add_concat(b: ConvBuilder, name: str, parts: Sequence[Feature]) -> Feature:
    """Returns the parts joined along channels; a split of channels is gathered before."""
    y = b.map(f"{name}.out", sum(p.channels for p in parts), parts[0].height, parts[0].width)
    part: Axes = ("batch", "part", "height", "width")
    b.op(
        name, "pointwise", "concat", b.sizes(y), inputs=[(p.name, part) for p in parts],
        outputs=[(y.name, MAP)],
    )  # fmt: skip
    return y


def add_squeeze_excitation(
    b: ConvBuilder, name: str, x: Feature, squeezed: int, activation: str
) -> Feature:
    """Returns x scaled per channel: pool, two 1x1 convolutions with bias, sigmoid, product."""
    s = add_adaptive_pool(b, f"{name}.pool", x)
    s = add_conv(b, f"{name}.reduce", s, squeezed, 1, bias=True)
    s = add_activation(b, f"{name}.act", s, activation)
    s = add_conv(b, f"{name}.expand", s, x.channels, 1, bias=True)
    s = add_activation(b, f"{name}.gate", s, "sigmoid")
    y = b.map(f"{name}.out", x.channels, x.height, x.width)
    b.op(
        f"{name}.scale", "pointwise", "scale", b.sizes(x),
        inputs=[(x.name, MAP), (s.name, IN_MAP)], outputs=[(y.name, MAP)],
        saved=(x.name, s.name), flops=1.0,
    )  # fmt: skip
    return y


def add_conv_norm_act(
    b: ConvBuilder, name: str, x: Feature, channels: int, kernel: int | tuple[int, int], *,
    stride: int = 1, padding: int | tuple[int, int] | None = None, groups: int = 1,
    activation: str | None = "relu",
) -> Feature:  # fmt: skip
    """Returns convolution, batch norm and activation (None: without)."""
    x = add_conv(b, f"{name}.conv", x, channels, kernel, stride=stride, padding=padding,
                 groups=groups)  # fmt: skip
    x = add_batch_norm(b, f"{name}.norm", x)
    return x if activation is None else add_activation(b, f"{name}.act", x, activation)


def add_flat_linear(b: ConvBuilder, name: str, x: Feature, width: int) -> str:
    """Returns the output (batch, out) of a linear layer on the flattened map, without its bias.

    Flattening is a view: the weight is indexed by channel, height and width; "in" means them all.
    """
    inner: Axes = ("channel", "height", "width")
    return _linear(b, name, x.name, inner, (x.channels, x.height, x.width), width)


def add_linear(b: ConvBuilder, name: str, x: str, inner: int, width: int) -> str:
    """Returns the output (batch, out) of a linear layer on (batch, in)."""
    return _linear(b, name, x, ("in",), (inner,), width)


def _linear(
    b: ConvBuilder, name: str, x: str, inner: Axes, sizes: Sequence[int], width: int
) -> str:
    """The product, and the bias as an operator of its own: it follows a reduction of sums."""
    weight = b.weight(f"{name}.weight", ("out", *inner), (width, *sizes))
    shape = (b.batch, width)
    product = b.tensor(f"{name}.product", ROWS, shape)
    b.op(
        name, "contraction", "gemm", [("batch", b.batch), ("out", width),
        *zip(inner, sizes, strict=True)], inputs=[(x, ("batch", *inner)),
        (weight, ("out", *inner))], outputs=[(product, ROWS)], reduce=inner, grad="contraction",
        saved=(x, weight), flops=2.0, groups={} if inner == ("in",) else {"in": inner},
    )  # fmt: skip
    bias = b.weight(f"{name}.bias", ("out",), (width,))
    out = b.tensor(f"{name}.out", ROWS, shape)
    b.op(
        f"{name}.bias", "pointwise", "bias", list(zip(ROWS, shape, strict=True)),
        inputs=[(product, ROWS), (bias, ("out",))], outputs=[(out, ROWS)], grad="bias",
    )  # fmt: skip
    return out


def add_row_activation(b: ConvBuilder, name: str, x: str, width: int, *, dropout: bool) -> str:
    """Returns relu (and dropout) of the output of a linear layer, below the layer's path."""
    shape = (b.batch, width)
    dims = list(zip(ROWS, shape, strict=True))
    y = b.tensor(f"{name}.relu.out", ROWS, shape)
    b.op(f"{name}.relu", "pointwise", "relu", dims, inputs=[(x, ROWS)], outputs=[(y, ROWS)],
         saved=(y,), flops=1.0)  # fmt: skip
    return add_row_dropout(b, f"{name}.dropout", y, ROWS, shape) if dropout else y


def add_row_dropout(b: ConvBuilder, name: str, x: str, dims: Axes, shape: Sequence[int]) -> str:
    """Returns dropout(x); the mask, one byte per element, is kept for backward."""
    y = b.tensor(f"{name}.out", dims, shape)
    mask = b.tensor(f"{name}.mask", dims, shape, dtype="uint8")
    b.op(name, "pointwise", "dropout", list(zip(dims, shape, strict=True)), inputs=[(x, dims)],
         outputs=[(y, dims), (mask, dims)], grad="dropout", saved=(mask,))  # fmt: skip
    return y


def add_class_loss(b: ConvBuilder, name: str, logits: str, classes: int) -> None:
    """Adds softmax cross-entropy on classes; every rank needs all classes of its samples."""
    targets = b.tensor(f"{name}.targets", ("batch",), (b.batch,), "input", "int64")
    loss = b.tensor(f"{name}.out", ("batch",), (b.batch,), dtype="fp32")
    b.op(
        name, "reduction", "class_loss", [("batch", b.batch), ("class", classes)],
        inputs=[(logits, ("batch", "class")), (targets, ("batch",))],
        outputs=[(loss, ("batch",))], reduce=("class",), grad="cross_entropy", saved=(logits,),
        flops=4.0,
    )  # fmt: skip
