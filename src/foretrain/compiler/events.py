"""From a placed operator to its event: local shape, FLOP and bytes on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Literal

from foretrain.compiler.bags import BAG, INTERACTION, bag_bytes, bag_shape, table_set
from foretrain.compiler.flow import Copy, OpLaunch
from foretrain.compiler.placements import local_elements
from foretrain.graph.ir import Op, Operand, Tensor
from foretrain.graph.precision import LOW, Precision
from foretrain.mesh import Mesh
from foretrain.program import CommEvent, ComputeEvent, Event

Direction = Literal["forward", "backward", "backward_input", "backward_weight", "optimizer"]


@dataclass(slots=True)
class EventTable:
    """Unique events in order of first use."""

    events: list[Event] = field(default_factory=list[Event])
    index: dict[Event, int] = field(default_factory=dict[Event, int])

    def intern(self, event: Event) -> int:
        """Returns the id of `event`, new or known."""
        known = self.index.get(event)
        if known is None:
            known = self.index[event] = len(self.events)
            self.events.append(event)
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Representative groups of ranks: axes -> the group of the first rank of a stage."""

    mesh: Mesh
    devices_per_node: int

    def ranks(self, axes: Sequence[str], stage: int) -> tuple[int, ...]:
        """Returns the group over `axes` that holds the first rank of `stage`."""
        start = stage * self.mesh.stride("pp") if "pp" in self.mesh.axes else 0
        return self.mesh.group(start, axes)

    def sharers(self, ranks: Sequence[int]) -> int:
        """Returns how many sibling groups use the links of one node at the same time.

        All ranks of a node take part in the same step of their own groups; a group with k members
        on the node leaves devices / k groups there.
        """
        node = ranks[0] // self.devices_per_node
        here = sum(1 for rank in ranks if rank // self.devices_per_node == node)
        return max(1, min(self.devices_per_node, self.mesh.world_size) // max(1, here))

    def event(
        self,
        collective: str,
        axes: Sequence[str],
        num_bytes: float,
        dtype: str,
        stage: int,
        count: int = 1,
    ) -> CommEvent:
        """Returns the event of a collective over `axes` on `stage`."""
        ranks = self.ranks(axes, stage)
        return CommEvent(
            collective=collective,  # pyright: ignore[reportArgumentType]
            bytes=num_bytes,
            dtype=dtype,
            ranks=ranks,
            sharers=self.sharers(ranks),
            count=count,
        )


def direction(op: Op) -> Direction:
    """Returns the direction word of an operator's phase."""
    return op.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaper:
    """Turns placed operators into events for one precision on one mesh."""

    mesh: Mesh
    tensors: Mapping[str, Tensor]
    precision: Precision
    fused_accumulation: bool  # weight gradients accumulate in the GEMM's epilogue
    held_bytes: Mapping[str, float]  # bytes per element of tensors that are kept in wider copies
    #: What backward does to a table beside reading its rows' gradients, by operator.
    bag_update: Mapping[str, tuple[tuple[str, float], ...]] = field(
        default_factory=dict[str, tuple[tuple[str, float], ...]]
    )
    sparse_exchange: bool = False
    low_gather: bool = True  # what narrow products read is cast before it is gathered

    def local(self, launch: OpLaunch) -> dict[str, int]:
        """Returns the local size of every iteration dim."""
        return {
            dim.name: ceil(dim.size / self.mesh.size(launch.split.get(dim.name, ())))
            for dim in launch.op.dims
        }

    def copy_bytes(self, copy: Copy) -> float:
        """Returns the bytes one rank holds of a copy."""
        tensor = self.tensors[copy[0]]
        size = self.held_bytes.get(tensor.name, self.precision.bytes(tensor.dtype))
        return local_elements(tensor.size, copy[1], self.mesh) * size

    def event(self, launches: Sequence[OpLaunch]) -> ComputeEvent:
        """Returns the event of one operator, or of several that run as one GEMM."""
        if launches[0].op.cost == BAG:
            return self._bags(launches)
        if len(launches) == 1:
            return self._single(launches[0])
        if (launches[0].op.fuse or "").split(".")[0] == INTERACTION:
            return self._interaction(launches)
        parts = [self._single(launch) for launch in launches]
        first = dict(parts[0].shape)
        grown = {"backward_input": "k", "backward_weight": "m"}.get(parts[0].direction, "n")
        first[grown] = sum(part.get(grown) for part in parts)
        return ComputeEvent(
            op="gemm",
            direction=parts[0].direction,
            dtype=parts[0].dtype,
            shape=tuple(first.items()),
            flops=sum(part.flops for part in parts),
            bytes=sum(part.bytes for part in parts),
        )

    def _single(self, launch: OpLaunch) -> ComputeEvent:
        op, sizes = launch.op, self.local(launch)
        if op.cost == "gemm":
            shape = self._gemm(op, sizes)
        elif op.cost == "attention":
            shape = _attention_shape(op, sizes)
        elif op.cost == "conv2d":
            shape = _conv_shape(op, sizes)
        else:
            shape = self._memory_shape(op, sizes)
        return ComputeEvent(
            op=op.cost,
            direction=direction(op),
            dtype=self._dtype(op),
            shape=tuple(shape.items()),
            flops=op.flops * op.density * prod(sizes.values()),
            bytes=self._bytes(op, sizes),
        )

    def _bags(self, launches: Sequence[OpLaunch]) -> ComputeEvent:
        """Embedding bags of one kernel; equal tables are counted, others numbered."""
        tables: Counter[tuple[tuple[str, float], ...]] = Counter()
        flops = 0.0
        num_bytes = 0.0
        for launch in launches:
            sizes = self.local(launch)
            shape = bag_shape(launch.op, sizes, self.precision, sparse=self.sparse_exchange)
            shape |= dict(self.bag_update.get(launch.op.source or "", ()))
            tables[tuple(shape.items())] += 1
            flops += shape["batch"] * shape["pooling"] * shape["dim"]
            num_bytes += bag_bytes(shape, launch.op.phase)
        first = launches[0].op
        return ComputeEvent(
            op=BAG,
            direction=direction(first),
            dtype=self._dtype(first),
            shape=table_set(tables),
            flops=flops,
            bytes=num_bytes,
        )

    def _interaction(self, launches: Sequence[OpLaunch]) -> ComputeEvent:
        """One kernel for the whole interaction: it reads its inputs and writes its outputs once."""
        made = {operand.tensor for launch in launches for operand in launch.op.outputs}
        read = {operand.tensor for launch in launches for operand in launch.op.inputs}
        ends: dict[str, float] = {}
        for launch in launches:
            sizes = self.local(launch)
            for operand in launch.op.inputs:
                if operand.tensor not in made:
                    ends[operand.tensor] = self._operand_bytes(operand, sizes)
            for operand in launch.op.outputs:
                if operand.tensor not in read:
                    ends[operand.tensor] = self._operand_bytes(operand, sizes)
        first, moved = launches[0], sum(ends.values())
        rows = float(self.local(first)["batch"])
        cols = moved / rows / self.precision.bytes("compute")
        return ComputeEvent(
            op=INTERACTION,
            direction="forward" if first.op.phase == "forward" else "backward",
            dtype=self._dtype(first.op),
            shape=(("rows", rows), ("cols", cols), ("operands", 1.0)),
            flops=sum(self._single(launch).flops for launch in launches),
            bytes=moved,
        )

    def _dtype(self, op: Op) -> str:
        """GEMMs run in the compute dtype; fp8 covers nothing else (docs/explain/costs.md)."""
        dtype = self.precision.compute
        if op.cost != "gemm" and dtype in LOW:
            return "bf16"
        if op.cost == "gemm" and op.attributes.get("low_precision") is False:
            return "bf16" if dtype in LOW else dtype
        return dtype

    def _gemm(self, op: Op, sizes: Mapping[str, int]) -> dict[str, float]:
        """b, m, n, k from which operands index a dim: see docs/explain/costs.md."""
        left, right = set(op.inputs[0].dims), set(op.inputs[1].dims)
        out = set(op.outputs[0].dims)

        def size(names: set[str]) -> float:
            return float(prod(sizes[name] for name in names))

        shape = {
            "b": size(left & right & out),
            "m": size((left & out) - right),
            "n": size((right & out) - left),
            "k": size((left | right) - out),
        }
        if op.phase == "backward_weight" and self.fused_accumulation:
            shape |= {"out_bytes": self.precision.bytes("grad_accumulate"), "accumulate": 1.0}
        return shape

    def _memory_shape(self, op: Op, sizes: Mapping[str, int]) -> dict[str, float]:
        total = float(prod(sizes.values()))
        operand = op.inputs[0] if op.inputs else op.outputs[0]
        cols = float(sizes.get(operand.dims[-1], 1)) if operand.dims else 1.0
        if op.cost in ("layernorm", "rmsnorm", "softmax") or op.cost.startswith("ce_"):
            cols = float(sizes[op.dims[-1].name])
        return {
            "rows": total / max(cols, 1.0),
            "cols": cols,
            "operands": float(len(op.inputs) + len(op.outputs)),
        }

    def _operand_bytes(self, operand: Operand, sizes: Mapping[str, int]) -> float:
        tensor = self.tensors[operand.tensor]
        dtype = "compute" if tensor.role == "weight" else tensor.dtype
        elements = prod(
            min(sizes.get(dim, full), full)
            for dim, full in zip(operand.dims, tensor.shape, strict=True)
        )
        return elements * self.precision.bytes(dtype)

    def _bytes(self, op: Op, sizes: Mapping[str, int]) -> float:
        """Bytes that an ideally fused kernel reads and writes (cost_model: byte counts)."""
        if op.cost == "embedding":
            rows = sum(
                self._operand_bytes(o, sizes)
                for o in (*op.inputs, *op.outputs)
                if not {"vocab", "type"} & set(o.dims)
            )
            return 2.0 * rows
        if op.cost in ("select", "triangle"):  # reads what it writes, not the whole input
            return 2.0 * sum(self._operand_bytes(o, sizes) for o in op.outputs)
        return sum(self._operand_bytes(o, sizes) for o in (*op.inputs, *op.outputs))


def _conv_shape(op: Op, sizes: Mapping[str, int]) -> dict[str, float]:
    """The shape of a (grouped) convolution; a split of the output channels splits the groups."""
    given = {key: float(value) for key, value in op.attributes.items()}
    groups = max(1.0, given["groups"] * sizes["out"] / given["channels"])
    return {
        "n": float(sizes["batch"]),
        "c": groups * sizes["in"],
        "h": given["h"],
        "w": given["w"],
        "k": float(sizes["out"]),
        "r": float(sizes["r"]),
        "s": float(sizes["s"]),
        "stride": given["stride"],
        "padding": given["padding"],
        "groups": groups,
        "oh": float(sizes["height"]),
        "ow": float(sizes["width"]),
    }


def _attention_shape(op: Op, sizes: Mapping[str, int]) -> dict[str, float]:
    heads = float(sizes["kv_head"] * sizes["group"])
    return {
        "batch": float(sizes["batch"]),
        "seq_q": float(sizes["seq"]),
        "seq_kv": float(sizes["source" if "source" in sizes else "seq_kv"]),
        "heads": heads,
        "kv_heads": float(sizes["kv_head"]),
        "head_dim": float(sizes["head_dim"]),
        "head_dim_v": float(sizes["head_dim"]),
        "causal": float(bool(op.attributes.get("causal", True))),
        "window": float(op.attributes.get("window") or 0),
    }
