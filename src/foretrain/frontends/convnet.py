"""Convolutional networks as Graphs: stem, blocks, head with the classifier and the loss.

    alexnet        five convolutions, three linear layers
    vgg            `depths` 3x3 convolutions per stage; `batch_norm`
    resnet         `depths` blocks per stage; bottleneck or basic; `groups` x `width` (ResNeXt);
                   `squeeze`; the stride stands in the 3x3 convolution (v1.5)
    inception-v3, densenet, mobilenet-v2, efficientnet: frontends/convnet_families.py

Each block has one input and one output map, so that a stage of equal blocks folds into one.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.errors import InputError, Problem
from foretrain.frontends.conv_layers import (
    ConvBuilder,
    Feature,
    add_activation,
    add_adaptive_pool,
    add_batch_norm,
    add_class_loss,
    add_conv,
    add_conv_norm_act,
    add_flat_linear,
    add_linear,
    add_pool,
    add_row_activation,
    add_squeeze_excitation,
    add_sum,
)
from foretrain.frontends.convnet_build import Blocks, Network
from foretrain.frontends.convnet_families import (
    add_densenet,
    add_efficientnet,
    add_inception,
    add_mobilenet,
)
from foretrain.frontends.spec import ConvSpec
from foretrain.graph.ir import Graph

#: Images below this size leave nothing to convolve in the last stages.
MIN_IMAGE = 32


def build_conv_graph(
    spec: ConvSpec, *, batch: int, image: int | None = None, dropout: bool = True
) -> Graph:
    """Returns the forward graph of one micro-step of `batch` square images of `image` pixels.

    Raises InputError for a batch below 1 and an image that the network shrinks to nothing.
    """
    image = spec.image if image is None else image
    smallest = 75 if spec.family == "inception-v3" else MIN_IMAGE
    problems = [
        Problem(what=f"must be at least {least}", where=where, value=value)
        for where, value, least in (("batch", batch, 1), ("training.image", image, smallest))
        if value < least
    ]
    if problems:
        raise InputError(problems)
    network = Network(spec=spec, batch=batch, image=image, dropout=dropout)
    FAMILIES[spec.family](network)
    facts: Mapping[str, float | str | bool] = {
        "family": spec.family, "image": image, "classes": spec.classes,
    }  # fmt: skip
    return Graph(
        name=spec.name, blocks=tuple(network.blocks), batch=batch, sequence=None, facts=facts
    )


def _resnet(net: Network) -> None:
    with net.block("stem", start=True) as b:
        x = add_conv_norm_act(b, "conv1", net.x, 64, 7, stride=2)
        net.x = add_pool(b, "pool", x, 3, 2, 1)
    for stage, depth in enumerate(net.spec.depths):
        planes = 64 * 2**stage
        stride = 1 if stage == 0 else 2
        with net.block(f"stage{stage + 1}_first") as b:
            net.x = _residual(b, net.x, net.spec, planes, stride)
        if depth > 1:
            with net.block(f"stage{stage + 1}", repeat=depth - 1) as b:
                net.x = _residual(b, net.x, net.spec, planes, 1)
    net.head()


def _residual(b: ConvBuilder, x: Feature, spec: ConvSpec, planes: int, stride: int) -> Feature:
    out = planes * (4 if spec.bottleneck else 1)
    if spec.bottleneck:
        wide = planes * spec.width // 64 * spec.groups
        y = add_conv_norm_act(b, "conv1", x, wide, 1)
        y = add_conv_norm_act(b, "conv2", y, wide, 3, stride=stride, groups=spec.groups)
        y = add_conv_norm_act(b, "conv3", y, out, 1, activation=None)
    else:
        y = add_conv_norm_act(b, "conv1", x, planes, 3, stride=stride)
        y = add_conv_norm_act(b, "conv2", y, planes, 3, activation=None)
    if spec.squeeze:
        y = add_squeeze_excitation(b, "se", y, out // 16, "relu")
    if stride != 1 or x.channels != out:
        x = add_conv_norm_act(b, "downsample", x, out, 1, stride=stride, activation=None)
    return add_activation(b, "act", add_sum(b, "add", y, x), "relu")


def _vgg(net: Network) -> None:
    channels = (64, 128, 256, 512, 512)
    for stage, depth in enumerate(net.spec.depths):
        name = "stem" if stage == 0 else f"stage{stage + 1}"
        with net.block(name, start=stage == 0) as b:
            for i in range(depth):
                net.x = _vgg_conv(b, f"conv{i + 1}", net, channels[stage])
            net.x = add_pool(b, "pool", net.x, 2, 2)
    _mlp_head(net, size=7, drop_first=False)


def _vgg_conv(b: ConvBuilder, name: str, net: Network, channels: int) -> Feature:
    x = add_conv(b, f"{name}.conv", net.x, channels, 3, bias=True)  # kept beside a batch norm
    if net.spec.batch_norm:
        x = add_batch_norm(b, f"{name}.norm", x)
    return add_activation(b, f"{name}.act", x, "relu")


def _alexnet(net: Network) -> None:
    with net.block("stem", start=True) as b:
        x = add_conv(b, "conv1", net.x, 64, 11, stride=4, padding=2, bias=True)
        net.x = add_pool(b, "pool1", add_activation(b, "act1", x, "relu"), 3, 2)
    with net.block("features") as b:
        x = net.x
        for i, (channels, kernel) in enumerate(((192, 5), (384, 3), (256, 3), (256, 3)), 2):
            x = add_conv(b, f"conv{i}", x, channels, kernel, bias=True)
            x = add_activation(b, f"act{i}", x, "relu")
            if i == 2:
                x = add_pool(b, "pool2", x, 3, 2)
        net.x = add_pool(b, "pool5", x, 3, 2)
    _mlp_head(net, size=6, drop_first=True)


def _mlp_head(net: Network, *, size: int, drop_first: bool) -> None:
    """Three linear layers: paths head.fc1, head.fc2, head.fc3 with what follows each below it."""
    spec = net.spec
    with net.block("head", end=True) as b:
        x = add_adaptive_pool(b, "head.pool", net.x, size)
        if drop_first and net.dropout:
            x = net.map_dropout(b, "head.dropout", x)
        y = add_flat_linear(b, "head.fc1", x, 4096)
        y = add_row_activation(b, "head.fc1", y, 4096, dropout=net.dropout)
        y = add_linear(b, "head.fc2", y, 4096, 4096)
        y = add_row_activation(b, "head.fc2", y, 4096, dropout=net.dropout and not drop_first)
        y = add_linear(b, "head.fc3", y, 4096, spec.classes)
        add_class_loss(b, "head.loss", y, spec.classes)


FAMILIES: Blocks = {
    "alexnet": _alexnet,
    "vgg": _vgg,
    "resnet": _resnet,
    "inception-v3": add_inception,
    "densenet": add_densenet,
    "mobilenet-v2": add_mobilenet,
    "efficientnet": add_efficientnet,
}
