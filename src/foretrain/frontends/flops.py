"""Model FLOP of a training step: what a model needs, whatever a run spends on it.

Per token and forward pass, with multiply-add = 2:

    L (2 h (2 a d + 2 k d) + 2 h f g + 4 s a d c) + 2 h V

L layers, h hidden, a heads, k KV heads, d head size, f MLP width, g = 3 (gated) or 2 matrices,
s sequence, c = share of the attention square that is visible, V vocabulary. Heads differ: 2 h V
counts for the positions a loss is computed at (all, or the masked ones, with a dense layer of
2 h h before it); a pooler adds 2 h h per sample, a classifier 2 h classes, and an encoder of
images 2 h channels patch^2 per patch in place of a lookup. Backward costs twice the forward pass.
A decoder beside an encoder adds cross attention to its layers: queries and output per target token,
keys and values per source token, and 4 a d per pair of both. With a window in every second layer c
is the mean of both kinds. Norms, softmax, rotary and lookups are left out, as is usual.
Published Megatron figures count the full square (c = 1); we print c = 1/2 for causal attention.
Worked numbers: docs/explain/flops.md.
"""

from __future__ import annotations

from foretrain.frontends.attention import attention_density
from foretrain.frontends.convnet import build_conv_graph
from foretrain.frontends.spec import ConvSpec, ModelSpec


def model_flops_per_sample(
    spec: ModelSpec, sequence: int, causal_half: bool = True, target_sequence: int | None = None
) -> float:
    """Returns the forward and backward FLOP of one sample of `sequence` tokens, no recompute.

    With `causal_half` only visible pairs of tokens count (1/2, less with a window), without it the
    full square. A decoder beside an encoder works on `target_sequence` tokens, `sequence` if None.
    """
    visible = _visible(spec, sequence) if causal_half else 1.0
    if not spec.decoder_layers:
        layers = spec.layers * _layer(spec, sequence, visible)
        return 3.0 * (layers + _ends(spec, sequence))
    target = target_sequence or sequence
    half = attention_density(target, None, causal=spec.causal) if causal_half else 1.0
    encoder = spec.layers * _layer(spec, sequence, 1.0)
    decoder = spec.decoder_layers * (_layer(spec, target, half) + _cross(spec, sequence, target))
    return 3.0 * (encoder + decoder + _ends(spec, target))


def _visible(spec: ModelSpec, sequence: int) -> float:
    """The visible share of the attention square, the mean over the layers."""
    inside = attention_density(sequence, spec.window, causal=spec.causal)
    if not spec.window_alternates:
        return inside
    windowed = (spec.layers + 1) // 2 / spec.layers
    everywhere = attention_density(sequence, None, causal=spec.causal)
    return windowed * inside + (1 - windowed) * everywhere


def _layer(spec: ModelSpec, sequence: int, visible: float) -> float:
    """Forward FLOP of self-attention and MLP of one layer and sample."""
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    projections = 2 * spec.hidden * (2 * heads + 2 * kv_heads)
    mlp = 2 * spec.hidden * spec.ffn * (3 if spec.gated else 2)
    attention = 4 * sequence * heads * visible
    return (projections + mlp + attention) * sequence


def _cross(spec: ModelSpec, source: int, target: int) -> float:
    """Forward FLOP of cross attention of one layer and sample."""
    heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    products = 4.0 * spec.hidden * (heads * target + kv_heads * source)
    return products + 4.0 * heads * source * target


def _ends(spec: ModelSpec, sequence: int) -> float:
    """Forward FLOP of one sample in the embedding and the head."""
    vocab = spec.vocab_unpadded or spec.vocab  # padding rows are no part of the model
    hidden = spec.hidden
    total = 0.0
    if spec.patch is not None:
        pixels = spec.channels * spec.patch**2
        total += 2.0 * hidden * pixels * (sequence - int(spec.class_token))
    table = 2.0 * (spec.table_width * vocab + hidden * (spec.projection or 0))
    total += 2.0 * hidden * (spec.projection or 0) * sequence
    if spec.head == "lm":
        total += table * sequence
    if spec.head in ("mlm", "pretraining"):
        total += (table + 2.0 * hidden * hidden) * min(spec.masked or sequence, sequence)
    if spec.pooler and spec.head in ("pretraining", "classification", "none"):
        total += 2.0 * hidden * hidden
    if spec.head in ("pretraining", "classification"):
        total += 2.0 * hidden * spec.classes
    return total


def conv_flops_per_sample(spec: ConvSpec, image: int | None = None) -> float:
    """Returns three times the FLOP of the convolutions and linear layers of one forward pass.

    The data gradient of the first layer, which nobody needs, is counted, as is usual.
    """
    graph = build_conv_graph(spec, batch=1, image=image)
    return 3.0 * sum(
        op.total_flops * block.repeat for block, op in graph.ops() if op.kind == "contraction"
    )
