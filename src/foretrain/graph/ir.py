"""The graph: operators in program order, described by named iteration dims.

A `Graph` is the mathematics of one micro-step of the whole job: its `batch` dim counts the
samples of one micro-step over *all* data-parallel ranks (micro-batch x dp). How dims are split
over ranks is not known here; that is the strategy's business.

Words: *dims* belong to operators and tensors, *axes* to the mesh of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

Role = Literal["weight", "activation", "input", "buffer"]
Kind = Literal["contraction", "gather", "pointwise", "reduction", "random_access"]
Phase = Literal["forward", "backward_input", "backward_weight", "backward", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One named, sized iteration dim of an operator; a reduction dim is summed away."""

    name: str
    size: int
    reduction: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a block: `dims` name its own dims in storage order, `shape` sizes them.

    `dtype` is a role of `Precision` (compute, weight, ...) or a concrete dtype (fp32, int64).
    `tied_to` names the weight "block/tensor" that this weight shares its values with; the weight
    itself is named where all repeats of a block share one.
    """

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    role: Role = "activation"
    dtype: str = "compute"
    tied_to: str | None = None

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A use of a tensor by an operator: the operator dim that indexes each tensor dim."""

    tensor: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator of a block.

    `flops` counts FLOP per point of the iteration space, times `density` (1/2 for causal
    attention). `linear` lists the inputs through which partial sums may pass. `saved` names the
    tensors that backward needs. `groups` are composite dims: splitting "heads" splits its parts
    in order. `grad` names the rule that derives its backward operators (see graph/backward.py).
    `fuse` marks operators that read the same input and may run as one kernel (q, k, v).
    """

    name: str
    kind: Kind
    cost: str
    dims: tuple[Dim, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    linear: tuple[int, ...] = ()
    saved: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    flops: float = 0.0
    density: float = 1.0
    combiner: Literal["sum", "max"] = "sum"
    grad: str = "pointwise"
    fuse: str | None = None
    attributes: Mapping[str, float | str | bool] = field(
        default_factory=dict[str, float | str | bool]
    )
    phase: Phase = "forward"
    source: str | None = None

    def dim(self, name: str) -> Dim:
        """Returns the iteration dim called `name`; KeyError if there is none."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise KeyError(name)

    @property
    def points(self) -> int:
        """Returns the number of points of the iteration space."""
        return prod(dim.size for dim in self.dims)

    @property
    def total_flops(self) -> float:
        """Returns the FLOP of the whole, unsplit operator."""
        return self.flops * self.density * self.points


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A template of operators that repeats; layer i of block "layers" has the path "layers.i".

    `input` and `output` are the tensors that arrive from the previous and leave to the next block
    (or the next repeat); None at the ends of the model. `side` is a second tensor that goes along:
    the output of an encoder, which every layer of the decoder reads and passes on. One block
    `makes_side`; it belongs to the layer that follows. `numbers` are the layers that the block
    stands for where layers of several kinds alternate (blocks of one name), else 0, 1, ...
    `recompute` says whether full recompute restarts from the block.
    """

    name: str
    repeat: int
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    input: str | None
    output: str | None
    recompute: bool = True
    side: str | None = None
    makes_side: bool = False
    numbers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Returns the number of the layer that each repeat is."""
        return self.numbers or tuple(range(self.repeat))

    @property
    def arrivals(self) -> tuple[str, ...]:
        """Returns the tensors that come from earlier blocks."""
        side = None if self.makes_side else self.side
        return tuple(name for name in (self.input, side) if name is not None)

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor called `name`; KeyError if there is none."""
        return self.by_name()[name]

    def by_name(self) -> dict[str, Tensor]:
        """Returns all tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Returns the weights of one repeat, tied ones included."""
        return tuple(t for t in self.tensors if t.role == "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model as blocks in program order, for `batch` samples of `sequence` tokens."""

    name: str
    blocks: tuple[Block, ...]
    batch: int
    sequence: int | None
    facts: Mapping[str, float | str | bool] = field(default_factory=dict[str, float | str | bool])

    @property
    def num_parameters(self) -> int:
        """Returns the number of distinct parameters (tied weights count once)."""
        return sum(
            tensor.size * (block.repeat if tensor.tied_to is None else 1)
            for block in self.blocks
            for tensor in block.weights
            if tensor.tied_to in (None, f"{block.name}/{tensor.name}")
        )

    @property
    def num_layers(self) -> int:
        """Returns how many repeats of repeated blocks there are."""
        return sum(block.repeat for block in self.blocks if block.repeat > 1)

    def block(self, name: str) -> Block:
        """Returns the block called `name`; KeyError if there is none."""
        for block in self.blocks:
            if block.name == name:
                return block
        raise KeyError(name)

    def forward_flops(self) -> float:
        """Returns the FLOP of one forward pass over the whole batch."""
        return sum(op.total_flops * block.repeat for block, op in self.ops())

    def ops(self) -> Iterator[tuple[Block, Op]]:
        """Yields every operator of every block template."""
        for block in self.blocks:
            for op in block.ops:
                yield block, op
