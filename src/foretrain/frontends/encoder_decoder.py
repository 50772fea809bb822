"""An encoder with a decoder (T5) as blocks.

    embedding   word table and dropout of the source                                  -> x
    encoder     attention, mlp                                                        -> x_out
    bridge      norm and dropout of the encoder's output (the side tensor, which every layer of
                the decoder reads), word table (and positions) and dropout of the target -> x
    decoder     attention (causal), cross, mlp                                        -> x_out
    head        frontends/heads.py

Queries of cross attention come from the target, keys and values from the source: 4 x target x
source x heads x head_dim FLOP, nothing masked. Relative positions are a table per stack, shared by
its layers; cross attention has none. The encoder's last norm stands in the bridge, so that with
pipeline stages it runs where the decoder begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foretrain.frontends.attention import SOURCE, Core, self_core
from foretrain.frontends.embeddings import (
    POSITION_WEIGHT,
    WORD_WEIGHT,
    add_lookup,
    add_position,
    build_embedding,
)
from foretrain.frontends.heads import build_head
from foretrain.frontends.layer import add_attention, add_layer, add_mlp, add_part
from foretrain.frontends.layers import BlockBuilder, X, add_dropout, add_norm
from foretrain.frontends.spec import ModelSpec
from foretrain.graph.ir import Block

SIDE = "source_out"
SIDE_DIMS = f"batch {SOURCE} hidden"
#: Names of the blocks that repeat, in model order.
STACKS = ("encoder", "decoder")


def encoder_decoder_blocks(
    spec: ModelSpec, sizes: Mapping[str, int], target: int, *, dropout: bool, fused: bool
) -> tuple[Block, ...]:
    """Returns the blocks of a model whose `sizes` are those of its encoder.

    `target` is the length of the decoder's sequence.
    """
    source = {**sizes, SOURCE: sizes["seq"]}
    own = {**source, "seq": target, "seq_kv": target, "masked": target}
    encoder = replace(spec, causal=False)

    def first() -> BlockBuilder:
        return BlockBuilder(sizes=source, spec=encoder, dropout=dropout)

    def second() -> BlockBuilder:
        return BlockBuilder(sizes=own, spec=spec, dropout=dropout)

    return (
        build_embedding(first()),
        _encoder(first(), fused=fused),
        _bridge(second()),
        _decoder(second(), fused=fused),
        _head(second()),
    )


def _encoder(b: BlockBuilder, *, fused: bool) -> Block:
    x = b.tensor("x_in", X)
    add_layer(b, x, self_core(b.spec, block="encoder"), fused=fused)
    return b.block("encoder", repeat=b.spec.layers, input=x, output="x_out", recompute=True)


def _bridge(b: BlockBuilder) -> Block:
    """The end of the encoder and the beginning of the decoder."""
    x = b.tensor("x_in", SIDE_DIMS)
    drop = b.dropout and b.spec.dropout > 0
    normed = add_norm(b, "norm", x, dims=SIDE_DIMS, out=None if drop else SIDE)
    if drop:
        add_dropout(b, "dropout", normed, SIDE_DIMS, out=SIDE)
    learned = b.spec.positions == "learned"
    out = "word.out" if learned or drop else "x"
    y = add_lookup(b, "word", "target_tokens", "vocab", out, tied_to=f"embedding/{WORD_WEIGHT}")
    if learned:
        out = "position.out" if drop else "x"
        y = add_position(b, "position", y, out, tied_to=f"embedding/{POSITION_WEIGHT}")
    if drop:
        add_dropout(b, "target_dropout", y, X, out="x")
    block = b.block("bridge", repeat=1, input="x_in", output="x", recompute=False)
    return replace(block, side=SIDE, makes_side=True)


def _decoder(b: BlockBuilder, *, fused: bool) -> Block:
    x = b.tensor("x_in", X)
    side = b.tensor(SIDE, SIDE_DIMS)
    own = self_core(b.spec, block="decoder")
    cross = Core(part="cross", keys=SOURCE, causal=False, softcap=b.spec.softcap)
    x = add_part(b, "attention", x, lambda y: add_attention(b, y, own, fused=fused))
    x = add_part(b, "cross", x, lambda y: add_attention(b, y, cross, fused=fused, source=side))
    add_part(b, "mlp", x, lambda y: add_mlp(b, y), out="x_out")
    repeat = b.spec.decoder_layers
    block = b.block("decoder", repeat=repeat, input="x_in", output="x_out", recompute=True)
    return replace(block, side=side)


def _head(b: BlockBuilder) -> Block:
    """The usual head; the side tensor ends here, unread."""
    side = b.tensor(SIDE, SIDE_DIMS)
    return replace(build_head(b), side=side)
