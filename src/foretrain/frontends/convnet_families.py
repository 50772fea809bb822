"""Inception-v3, DenseNet, MobileNetV2 and EfficientNet, as their published code builds them."""

from __future__ import annotations

from math import ceil

from foretrain.frontends.conv_layers import (
    ConvBuilder,
    Feature,
    add_activation,
    add_batch_norm,
    add_concat,
    add_conv,
    add_conv_norm_act,
    add_pool,
    add_squeeze_excitation,
    add_sum,
)
from foretrain.frontends.convnet_build import Network

Steps = tuple[tuple[int, int | tuple[int, int]], ...]  # channels and kernel of each convolution

ROW, COLUMN = (1, 7), (7, 1)


def _chain(b: ConvBuilder, name: str, x: Feature, steps: Steps, *, last_stride: int = 1) -> Feature:
    """Returns convolutions with batch norm and relu one after the other."""
    for i, (channels, kernel) in enumerate(steps, 1):
        strided = last_stride > 1 and i == len(steps)
        x = add_conv_norm_act(
            b, f"{name}_{i}", x, channels, kernel, stride=last_stride if strided else 1,
            padding=0 if strided else None,
        )  # fmt: skip
    return x


def _average(b: ConvBuilder, x: Feature, channels: int) -> Feature:
    return _chain(
        b, "branch_pool", add_pool(b, "pool", x, 3, 1, 1, kind="average"), ((channels, 1),)
    )


def add_inception(net: Network) -> None:
    """Adds Inception-v3 (Szegedy et al. 2015), with the auxiliary classifier when asked for."""
    with net.block("stem", start=True) as b:
        x = add_conv_norm_act(b, "conv1", net.x, 32, 3, stride=2, padding=0)
        x = add_conv_norm_act(b, "conv2", x, 32, 3, padding=0)
        x = add_pool(b, "pool1", add_conv_norm_act(b, "conv3", x, 64, 3), 3, 2)
        x = add_conv_norm_act(b, "conv4", x, 80, 1)
        net.x = add_pool(b, "pool2", add_conv_norm_act(b, "conv5", x, 192, 3, padding=0), 3, 2)
    for name, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        with net.block(f"mixed_{name}") as b:
            net.x = _inception_a(b, net.x, pooled)
    with net.block("mixed_6a") as b:
        x = net.x
        parts = [
            _chain(b, "branch3", x, ((384, 3),), last_stride=2),
            _chain(b, "branch3_double", x, ((64, 1), (96, 3), (96, 3)), last_stride=2),
            add_pool(b, "pool", x, 3, 2),
        ]
        net.x = add_concat(b, "concat", parts)
    for name, c7 in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        with net.block(f"mixed_{name}") as b:
            net.x = _inception_c(b, net.x, c7)
            if name == "6e" and net.spec.auxiliary:
                _auxiliary(net, b, net.x)
    with net.block("mixed_7a") as b:
        x = net.x
        parts = [
            _chain(b, "branch3", x, ((192, 1), (320, 3)), last_stride=2),
            _chain(b, "branch7", x, ((192, 1), (192, ROW), (192, COLUMN), (192, 3)), last_stride=2),
            add_pool(b, "pool", x, 3, 2),
        ]
        net.x = add_concat(b, "concat", parts)
    for name in ("7b", "7c"):
        with net.block(f"mixed_{name}") as b:
            net.x = _inception_e(b, net.x)
    net.head()


def _auxiliary(net: Network, b: ConvBuilder, x: Feature) -> None:
    y = add_pool(b, "auxiliary.average", x, 5, 3, kind="average")
    y = add_conv_norm_act(b, "auxiliary.conv1", y, 128, 1)
    y = add_conv_norm_act(b, "auxiliary.conv2", y, 768, 5, padding=0 if y.height > 4 else 2)
    net.classifier(b, "auxiliary", y)


def _inception_a(b: ConvBuilder, x: Feature, pooled: int) -> Feature:
    parts = [
        _chain(b, "branch1", x, ((64, 1),)),
        _chain(b, "branch5", x, ((48, 1), (64, 5))),
        _chain(b, "branch3", x, ((64, 1), (96, 3), (96, 3))),
        _average(b, x, pooled),
    ]
    return add_concat(b, "concat", parts)


def _inception_c(b: ConvBuilder, x: Feature, c7: int) -> Feature:
    double: Steps = ((c7, 1), (c7, COLUMN), (c7, ROW), (c7, COLUMN), (192, ROW))
    parts = [
        _chain(b, "branch1", x, ((192, 1),)),
        _chain(b, "branch7", x, ((c7, 1), (c7, ROW), (192, COLUMN))),
        _chain(b, "branch7_double", x, double),
        _average(b, x, 192),
    ]
    return add_concat(b, "concat", parts)


def _inception_e(b: ConvBuilder, x: Feature) -> Feature:
    narrow = _chain(b, "branch3", x, ((384, 1),))
    double = _chain(b, "branch3_double", x, ((448, 1), (384, 3)))
    parts = [
        _chain(b, "branch1", x, ((320, 1),)),
        _chain(b, "branch3_a", narrow, ((384, (1, 3)),)),
        _chain(b, "branch3_b", narrow, ((384, (3, 1)),)),
        _chain(b, "branch3_double_a", double, ((384, (1, 3)),)),
        _chain(b, "branch3_double_b", double, ((384, (3, 1)),)),
        _average(b, x, 192),
    ]
    return add_concat(b, "concat", parts)


def add_densenet(net: Network) -> None:
    """Adds a DenseNet (Huang et al. 2016): every layer appends `growth` channels to its input."""
    spec = net.spec
    with net.block("stem", start=True) as b:
        x = add_conv_norm_act(b, "conv0", net.x, spec.width, 7, stride=2)
        net.x = add_pool(b, "pool0", x, 3, 2, 1)
    for stage, depth in enumerate(spec.depths, 1):
        for layer in range(1, depth + 1):
            with net.block(f"dense{stage}_{layer}") as b:
                x = add_activation(b, "act1", add_batch_norm(b, "norm1", net.x), "relu")
                x = add_conv_norm_act(b, "conv1", x, 4 * spec.growth, 1)
                x = add_conv(b, "conv2", x, spec.growth, 3)
                net.x = add_concat(b, "concat", (net.x, x))
        if stage < len(spec.depths):
            with net.block(f"transition{stage}") as b:
                x = add_activation(b, "act", add_batch_norm(b, "norm", net.x), "relu")
                x = add_conv(b, "conv", x, x.channels // 2, 1)
                net.x = add_pool(b, "pool", x, 2, 2, kind="average")
    with net.block("head", end=True) as b:
        x = add_activation(b, "head.act", add_batch_norm(b, "head.norm", net.x), "relu")
        net.classifier(b, "head", x)


def divisible(value: float) -> int:
    """Returns the multiple of 8 nearest to `value`, at most a tenth below it."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


_MOBILENET = (  # expansion, channels, blocks, stride
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
_EFFICIENTNET = (  # expansion, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
)  # fmt: skip


def add_mobilenet(net: Network) -> None:
    """Adds MobileNetV2 (Sandler et al. 2018)."""
    wide = net.spec.width_multiplier
    with net.block("stem", start=True) as b:
        net.x = add_conv_norm_act(b, "conv", net.x, divisible(32 * wide), 3, stride=2,
                                  activation="relu6")  # fmt: skip
    for stage, (expansion, channels, depth, stride) in enumerate(_MOBILENET, 1):
        _inverted_stage(net, stage, expansion, 3, stride, divisible(channels * wide), depth,
                        activation="relu6", squeeze=False)  # fmt: skip
    with net.block("head", end=True) as b:
        last = divisible(1280 * max(1.0, wide))
        x = add_conv_norm_act(b, "head.conv", net.x, last, 1, activation="relu6")
        net.classifier(b, "head", x)


def add_efficientnet(net: Network) -> None:
    """Adds an EfficientNet (Tan and Le 2019)."""
    spec = net.spec
    with net.block("stem", start=True) as b:
        net.x = add_conv_norm_act(b, "conv", net.x, divisible(32 * spec.width_multiplier), 3,
                                  stride=2, activation="silu")  # fmt: skip
    for stage, (expansion, kernel, stride, channels, depth) in enumerate(_EFFICIENTNET, 1):
        _inverted_stage(
            net, stage, expansion, kernel, stride, divisible(channels * spec.width_multiplier),
            ceil(depth * spec.depth_multiplier), activation="silu", squeeze=True,
        )  # fmt: skip
    with net.block("head", end=True) as b:
        x = add_conv_norm_act(b, "head.conv", net.x, 4 * net.x.channels, 1, activation="silu")
        net.classifier(b, "head", x)


def _inverted_stage(
    net: Network, stage: int, expansion: int, kernel: int, stride: int, channels: int, depth: int,
    *, activation: str, squeeze: bool,
) -> None:  # fmt: skip
    for part, repeat in (("_first", 1), ("", depth - 1)):
        if repeat:
            with net.block(f"stage{stage}{part}", repeat=repeat) as b:
                net.x = _inverted(b, net.x, expansion, kernel, stride if part else 1, channels,
                                  activation, squeeze)  # fmt: skip


def _inverted(
    b: ConvBuilder, x: Feature, expansion: int, kernel: int, stride: int, channels: int,
    activation: str, squeeze: bool,
) -> Feature:  # fmt: skip
    wide = divisible(x.channels * expansion)
    y = x
    if expansion != 1:
        y = add_conv_norm_act(b, "expand", y, wide, 1, activation=activation)
    y = add_conv_norm_act(b, "depthwise", y, y.channels, kernel, stride=stride, groups=y.channels,
                          activation=activation)  # fmt: skip
    if squeeze:
        y = add_squeeze_excitation(b, "se", y, max(1, x.channels // 4), activation)
    y = add_conv_norm_act(b, "project", y, channels, 1, activation=None)
    return add_sum(b, "add", y, x) if stride == 1 and x.channels == channels else y
