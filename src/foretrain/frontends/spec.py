"""ModelSpec: the shape of a model, before batch and length are known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer: a decoder, an encoder of text or of images, or an encoder with a decoder.

    `ffn` is the width of the MLP's hidden layer (of each of the two halves when gated).
    With `decoder_layers` the `layers` are those of an encoder, and the decoder's layers read its
    output by cross attention.
    `positions`: learned (a table of `max_positions` rows), rotary, alibi, relative (a table of
    `buckets` rows per stack, added to the scores) or none.
    `norm_order` pre: norms stand before attention and MLP; post: after their residual sums; both:
    before them and on their outputs.
    `window` limits attention to that many keys, in every second layer (the first one included)
    with `window_alternates`. `softcap`: attention scores go through a hyperbolic tangent,
    `head_softcap`: the logits do. `projection` is the width of the word table where it differs
    from `hidden`. `inner_dropout` stands inside the MLP.
    `parallel`: attention and MLP stand beside each other and their outputs are added, with one
    norm for both when `shared_norm`. `position_padding` counts rows of the position table that no
    token uses. `masked` is how many positions of a sample a masked-language head works on (None:
    all). `image`, `patch` and `channels` make an encoder of images, whose length they fix.
    `num_parameters` is the published exact count when the catalog knows one.
    """

    name: str
    family: str  # see frontends/families.py
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int | None
    norm: str = "layernorm"  # layernorm, rmsnorm
    activation: str = "gelu"  # gelu, relu, silu; gated: swiglu, geglu
    gated: bool = False
    positions: str = "learned"
    buckets: int = 32
    rotary_fraction: float = 1.0
    tied: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head_bias: bool = False
    final_norm: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    inner_dropout: float = 0.0
    window: int | None = None
    window_alternates: bool = False
    softcap: bool = False
    head_softcap: bool = False
    projection: int | None = None
    scaled_embedding: bool = False
    decoder_layers: int = 0
    causal: bool = True
    norm_order: str = "pre"  # pre, post, both
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    position_padding: int = 0
    token_types: int = 0
    embedding_norm: bool = False
    head: str = "lm"  # lm, mlm, pretraining (mlm and sentence pairs), classification, none
    masked: int | None = None
    pooler: bool = False
    classes: int = 2
    image: int | None = None
    patch: int | None = None
    channels: int = 3
    class_token: bool = False
    num_parameters: int | None = None
    vocab_unpadded: int | None = None  # the model's own vocabulary when `vocab` was padded
    source: str = ""
    assumed: tuple[str, ...] = ()  # defaults taken for what the user left out

    @property
    def depth(self) -> int:
        """Returns the number of layers of all stacks."""
        return self.layers + self.decoder_layers

    @property
    def table_width(self) -> int:
        """Returns the width of the word table."""
        return self.projection or self.hidden

    @property
    def image_sequence(self) -> int | None:
        """Returns the length that image and patch fix (class token included), None for text."""
        if self.image is None or self.patch is None:
            return None
        return (self.image // self.patch) ** 2 + int(self.class_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A convolutional network for classification, as the numbers of its family.

    `layers` counts the blocks between stem and head. `image` is the usual height and width in
    pixels. What a field means in a family stands in frontends/convnet.py.
    """

    name: str
    family: str  # alexnet, vgg, resnet, inception-v3, densenet, mobilenet-v2, efficientnet
    layers: int
    image: int
    classes: int = 1000
    depths: tuple[int, ...] = ()  # blocks (or convolutions) of every stage
    bottleneck: bool = True
    groups: int = 1
    width: int = 64  # channels per group of a bottleneck; first channels of a DenseNet
    growth: int = 32
    batch_norm: bool = True
    squeeze: bool = False  # squeeze and excitation in every residual block
    width_multiplier: float = 1.0
    depth_multiplier: float = 1.0
    auxiliary: bool = False  # a second classifier in training
    dropout: float = 0.0
    num_parameters: int | None = None
    source: str = ""
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table of `rows` x `dim` numbers.

    `pooling` is the mean number of rows that one sample sums up (lookups per sample). `zipf` is
    the exponent of the popularity of its rows (0: uniform); `reuse` lists measured reuse instead,
    hottest rows first, as (share of the rows that are read, share of the lookups) per bin, with
    `distinct` = rows that are read over lookups.
    """

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    zipf: float = 0.0
    distinct: float | None = None
    reuse: tuple[tuple[float, float], ...] = ()

    @property
    def num_parameters(self) -> int:
        """Returns rows x dim."""
        return self.rows * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RecSpec:
    """A recommendation model: tables and a bottom MLP meet in an interaction, a top MLP follows.

    `dense` counts the numbers of a sample that the bottom MLP reads; `bottom` and `top` are the
    widths of their layers. What an interaction does stands in frontends/recsys.py.
    """

    name: str
    family: str  # dlrm
    tables: tuple[Table, ...]
    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: str = "dot"  # dot, cat, dcn
    cross_layers: int = 3  # of dcn
    cross_rank: int = 512  # of dcn
    loss: str = "bce"  # bce, mse
    layers: int = 0  # no block repeats
    num_parameters: int | None = None
    source: str = ""
    assumed: tuple[str, ...] = ()


Model = ModelSpec | ConvSpec | RecSpec


def num_layers(spec: Model) -> int:
    """Returns the number of layers that pipeline stages divide, those of all stacks."""
    return spec.depth if isinstance(spec, ModelSpec) else spec.layers
