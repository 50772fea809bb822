"""The StrategyTree: one general form for every parallel strategy.

A node is a path pattern with settings that flow down to everything below it:

- `computation`: operator dim -> mesh axes that split it (any dim; a reduction dim leaves partial
  sums). "heads" or "out" may name a group of dims, split in order.
- `memory`: role -> layout (tensor dim -> axes; "*" splits the flat buffer), apart from the
  computation. Roles: weight, grad_accumulator, master (with moments and the gradient that the
  optimizer reads), saved_activation ("used" keeps the gathered copy), residual (the tensor that
  flows from block to block).
- `recompute`: none, selective, full, or modules of a layer joined by +.
- `owner`: the rank of the data-parallel group that alone holds and computes it (embedding tables).
- `sparse`: backward updates the rows of the table that the batch read: no dense gradient.

ZeRO, FSDP, tensor and sequence parallelism are nothing but such settings (strategy/presets.py).
A pattern with more parts is more specific and wins; of equals the later one wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from foretrain.mesh import Mesh

Axes = tuple[str, ...]
DimSplit = Mapping[str, Axes]
#: More buckets than gradients fill: all of them are copied. A number, so that JSON can hold it.
ALL_BUCKETS = 1e9
MEMORY_ROLES = ("weight", "grad_accumulator", "master", "saved_activation", "residual")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Settings of all paths that match `pattern` or lie below a match ("" is the root)."""

    pattern: str
    computation: DimSplit = field(default_factory=dict[str, Axes])
    memory: Mapping[str, DimSplit] = field(default_factory=dict[str, DimSplit])
    recompute: str | None = None
    keep_gathered: bool | None = None  # saved activations keep the gathered copy
    reshard: bool | None = None  # gathered weights are dropped after forward
    owner: int | None = None
    sparse: bool | None = None

    @property
    def depth(self) -> int:
        """Returns the number of path parts of the pattern."""
        return len(self.pattern.split(".")) if self.pattern else 0

    def matches(self, path: Sequence[str]) -> bool:
        """Returns whether the node's settings reach `path`."""
        if not self.pattern:
            return True
        parts = self.pattern.split(".")
        return len(parts) <= len(path) and all(
            fnmatchcase(name, part) for name, part in zip(path, parts, strict=False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How micro-batches flow: `stages` lists the layers of every chunk, chunk-major per stage.

    Chunk c of stage s is the virtual stage c * pp + s.
    """

    kind: str
    accumulation: int
    pp: int
    interleave: int
    stages: tuple[int, ...]  # layers of each virtual stage, in model order
    in_flight: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the framework does beside layouts: buckets, prefetch, what may overlap."""

    bucket_bytes: float | None
    first_bucket_bytes: float | None
    prefetch: int
    overlap_grad: bool
    overlap_param: bool
    overlap_tp: bool
    overlap_p2p: bool
    offload: str = "none"  # what lives on the host: none, optimizer, parameters (and optimizer)
    offload_fraction: float = 1.0  # of what `offload` moves, in parameters
    offload_layers: int = 0  # the first layers whose activations wait on the host
    staged_buckets: float = 0.0  # buckets that gradients are copied to
    overlap_tables: bool = True  # the exchange of embeddings hides behind the bottom MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTree:
    """Mesh, nodes, schedule and runtime choices."""

    mesh: Mesh
    nodes: tuple[Node, ...]
    schedule: Schedule
    runtime: Runtime
    data_axes: Axes = ("dp_replicate", "dp_shard", "cp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds at one path after all nodes flowed down.

    `own` are computation settings of nodes below the root, `inherited` those of the root.
    """

    own: DimSplit
    inherited: DimSplit
    memory: Mapping[str, DimSplit]
    recompute: str
    keep_gathered: bool
    reshard: bool
    owner: int | None
    sparse: bool


def resolve(nodes: Sequence[Node], path: str) -> Settings:
    """Returns the settings at `path` (e.g. layers.3.attention.q): deeper nodes win dim by dim."""
    parts = path.split(".")
    reached = [node for node in nodes if node.matches(parts)]
    reached.sort(key=lambda node: node.depth)  # stable: of equals the later one wins
    own: dict[str, Axes] = {}
    inherited: dict[str, Axes] = {}
    memory: dict[str, DimSplit] = {}
    recompute, keep_gathered, reshard = "none", False, True
    owner: int | None = None
    sparse = False
    for node in reached:
        settings = own if node.pattern else inherited
        for dim, axes in node.computation.items():
            settings.pop(dim, None)  # the order of keys is the order of precedence
            settings[dim] = axes
        memory.update(node.memory)
        recompute = node.recompute or recompute
        keep_gathered = keep_gathered if node.keep_gathered is None else node.keep_gathered
        reshard = reshard if node.reshard is None else node.reshard
        owner = owner if node.owner is None else node.owner
        sparse = sparse if node.sparse is None else node.sparse
    return Settings(
        own=own,
        inherited=inherited,
        memory=memory,
        recompute=recompute,
        keep_gathered=keep_gathered,
        reshard=reshard,
        owner=owner,
        sparse=sparse,
    )


def layer_classes(
    nodes: Sequence[Node], block: str, layers: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns for each of `layers` of a block the nodes that reach into it, as a class key.

    Layers with equal keys resolve equally, so they are lowered once.
    """
    keys: list[tuple[int, ...]] = []
    patterns = [node.pattern.split(".") if node.pattern else [] for node in nodes]
    for layer in layers:
        path = (block, str(layer))
        key = tuple(
            i
            for i, parts in enumerate(patterns)
            if all(fnmatchcase(n, p) for n, p in zip(path, parts, strict=False))
        )
        keys.append(key)
    return keys
