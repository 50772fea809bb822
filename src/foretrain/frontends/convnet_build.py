"""A network under construction: its blocks so far and the map that the next one reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretrain.frontends.conv_layers import (
    MAP,
    ConvBuilder,
    Feature,
    add_adaptive_pool,
    add_class_loss,
    add_flat_linear,
    add_row_dropout,
)
from foretrain.frontends.spec import ConvSpec
from foretrain.graph.ir import Block


@dataclass(slots=True, kw_only=True)
class Network:
    """`x` is the output of the last block; the first block reads the images."""

    spec: ConvSpec
    batch: int
    image: int
    dropout: bool
    blocks: list[Block] = field(default_factory=list[Block])
    x: Feature = field(init=False)

    def __post_init__(self) -> None:
        self.x = Feature(name="images", channels=3, height=self.image, width=self.image)

    @contextmanager
    def block(
        self, name: str, *, repeat: int = 1, start: bool = False, end: bool = False
    ) -> Generator[ConvBuilder]:
        """Yields the builder of a new block; `self.x` holds its input, then its output."""
        b = ConvBuilder(batch=self.batch)
        x = self.x
        if start:
            shape = (self.batch, x.channels, x.height, x.width)
            b.tensor(x.name, MAP, shape, "input")
        else:
            self.x = b.map("x_in", x.channels, x.height, x.width)
        yield b
        into, out = (None if start else "x_in"), (None if end else self.x.name)
        self.blocks.append(b.block(name, repeat=repeat, input=into, output=out))

    def map_dropout(self, b: ConvBuilder, name: str, x: Feature) -> Feature:
        """Returns dropout of a feature map."""
        shape = (self.batch, x.channels, x.height, x.width)
        out = add_row_dropout(b, name, x.name, MAP, shape)
        return Feature(name=out, channels=x.channels, height=x.height, width=x.width)

    def head(self) -> None:
        """Adds global pooling, one linear layer and the loss."""
        with self.block("head", end=True) as b:
            self.classifier(b, "head", self.x)

    def classifier(self, b: ConvBuilder, name: str, x: Feature) -> None:
        """Adds global pooling, dropout where the network has it, a linear layer and the loss."""
        x = add_adaptive_pool(b, f"{name}.pool", x)
        if self.spec.dropout > 0 and self.dropout:
            x = self.map_dropout(b, f"{name}.dropout", x)
        logits = add_flat_linear(b, f"{name}.fc", x, self.spec.classes)
        add_class_loss(b, f"{name}.loss", logits, self.spec.classes)


Blocks = Mapping[str, Callable[[Network], None]]
