"""A transformer as a Graph: embedding, layers x L, head with the loss.

    embedding   frontends/embeddings.py                                               -> x
    layers      frontends/layer.py: attention and mlp                                 -> x_out
    head        frontends/heads.py

An encoder with a decoder has more blocks: frontends/encoder_decoder.py. Layers of two kinds in turn
are two blocks "layers", each with the numbers of its layers.

Sizes are global (see graph/ir.py). An operator's output is called like the operator, with ".out".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from foretrain.errors import InputError, Problem
from foretrain.frontends.attention import self_core
from foretrain.frontends.embeddings import build_embedding
from foretrain.frontends.encoder_decoder import encoder_decoder_blocks
from foretrain.frontends.heads import build_head
from foretrain.frontends.layer import add_layer
from foretrain.frontends.layers import BlockBuilder, X
from foretrain.frontends.spec import ModelSpec
from foretrain.graph.ir import Block, Graph

ATTENTION = ("fused", "unfused")


def build_graph(
    spec: ModelSpec,
    *,
    batch: int,
    sequence: int,
    target_sequence: int | None = None,
    attention: str = "fused",
    dropout: bool = True,
    vocab_multiple: int = 1,
) -> Graph:
    """Returns the forward graph of one micro-step of `batch` samples of `sequence` tokens.

    A decoder beside an encoder works on `target_sequence` tokens (as many as `sequence` if None).
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
        "bucket": spec.buckets,
        "table": spec.table_width,
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

    fused = attention == "fused"
    if spec.decoder_layers:
        target = target_sequence or sequence
        blocks = encoder_decoder_blocks(spec, sizes, target, dropout=dropout, fused=fused)
    else:
        blocks = (
            build_embedding(builder()),
            *_layer_blocks(builder, fused=fused),
            build_head(builder()),
        )
    return Graph(
        name=spec.name,
        blocks=blocks,
        batch=batch,
        sequence=sequence,
        facts=_facts(spec, vocab, attention),
    )


def _facts(spec: ModelSpec, vocab: int, attention: str) -> Mapping[str, float | str | bool]:
    return {
        "family": spec.family,
        "hidden": spec.hidden,
        "layers": spec.layers,
        **({"decoder_layers": spec.decoder_layers} if spec.decoder_layers else {}),
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


def _layers(b: BlockBuilder, numbers: tuple[int, ...], *, window: int | None, fused: bool) -> Block:
    """The layers that attend within `window`; `numbers` says which when others do not."""
    x = b.tensor("x_in", X)
    spec = b.spec
    add_layer(b, x, self_core(spec, window=window), fused=fused)
    repeat = len(numbers) or spec.layers
    block = b.block("layers", repeat=repeat, input="x_in", output="x_out", recompute=True)
    return replace(block, numbers=numbers)


def _layer_blocks(make: Callable[[], BlockBuilder], *, fused: bool) -> list[Block]:
    """One kind of layers, or two in turn: with a window first, then without."""
    spec = make().spec
    if spec.window is None or not spec.window_alternates or spec.layers == 1:
        return [_layers(make(), (), window=spec.window, fused=fused)]
    every = range(spec.layers)
    return [
        _layers(make(), tuple(every[0::2]), window=spec.window, fused=fused),
        _layers(make(), tuple(every[1::2]), window=None, fused=fused),
    ]
