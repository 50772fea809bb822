"""One door to all front ends: the Graph of a model, and the FLOP that it needs per sample."""

from __future__ import annotations

from foretrain.frontends import transformer
from foretrain.frontends.convnet import build_conv_graph
from foretrain.frontends.flops import conv_flops_per_sample, model_flops_per_sample
from foretrain.frontends.recsys import build_rec_graph, rec_flops_per_sample
from foretrain.frontends.spec import ConvSpec, Model, RecSpec
from foretrain.graph.ir import Graph


def build_graph(
    spec: Model,
    *,
    batch: int,
    sequence: int | None = None,
    image: int | None = None,
    attention: str = "fused",
) -> Graph:
    """Returns the forward graph of one micro-step of `batch` samples.

    A transformer reads `sequence` tokens per sample, a convolutional network square images of
    `image` pixels, a recommendation model samples that its tables size. Raises InputError for
    sizes that the model cannot take.
    """
    if isinstance(spec, ConvSpec):
        return build_conv_graph(spec, batch=batch, image=image)
    if isinstance(spec, RecSpec):
        return build_rec_graph(spec, batch=batch)
    return transformer.build_graph(spec, batch=batch, sequence=sequence or 1, attention=attention)


def flops_per_sample(
    spec: Model, *, sequence: int | None = None, image: int | None = None, causal_half: bool = True
) -> float:
    """Returns the model FLOP of one sample: forward and backward, no recompute."""
    if isinstance(spec, ConvSpec):
        return conv_flops_per_sample(spec, image)
    if isinstance(spec, RecSpec):
        return rec_flops_per_sample(spec)
    return model_flops_per_sample(spec, sequence or 1, causal_half)
