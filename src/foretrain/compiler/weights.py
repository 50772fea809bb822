"""Traffic of weights and gradients of a stage: gathers before use, reductions, publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from foretrain.compiler.launches import LaunchList
from foretrain.compiler.offload import copy, moves_gradients
from foretrain.compiler.parameters import Unit, WeightGroup, merge
from foretrain.compiler.placements import Redistribution, family
from foretrain.compiler.quantized import by_weight_dtype, gather_dtype, weight_dtype
from foretrain.compiler.schedule import Slot
from foretrain.units import dtype_bytes


@dataclass(slots=True)
class WeightTraffic:
    """Launches what the layouts of weights and gradients ask for.

    `gathered` holds the gathers of (chunk, position) whose weights are there; `ready` the handles
    that the first forward of a unit waits for; `reductions` all gradient reductions so far.
    """

    launches: LaunchList
    pending: list[tuple[WeightGroup, ...]] = field(default_factory=list[tuple[WeightGroup, ...]])
    reductions: list[int] = field(default_factory=list[int])
    ready: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    gathered: dict[tuple[int, int], list[int]] = field(
        default_factory=dict[tuple[int, int], list[int]]
    )
    first_bucket_done: bool = False

    def gathered_bytes(self, unit: Unit) -> float:
        """Returns the bytes of the gathered weights of a unit."""
        gathered = sum(g.elements for g in unit.groups if g.signature.stored)
        return gathered * dtype_bytes(gather_dtype(unit, self.launches.context.precision))

    def gather(self, slot: Slot, i: int) -> None:
        """Launches the gather of a unit's weights unless they are there."""
        unit = self.launches.context.chunks[slot.chunk][i].unit
        if not unit.gathered or (slot.chunk, i) in self.gathered:
            return
        dtype = gather_dtype(unit, self.launches.context.precision)
        size = dtype_bytes(dtype)
        up: tuple[int, ...] = ()
        if self.launches.context.tree.runtime.offload == "parameters":
            mesh = self.launches.context.mesh
            shard = sum(g.share(g.signature.stored, mesh) for g in unit.groups) * size
            up = (copy(self.launches, shard, label=f"{unit.path} shard", down=False),)
        self.gathered[slot.chunk, i] = [
            self.launches.collective(
                step,
                dtype,
                size,
                label=f"{unit.path} weights",
                stream="gather",
                after=up,
                delta_start={"gathered weights": step.elements * size},
                microbatch=slot.microbatch,
                chunk=slot.chunk,
            )
            for group in unit.groups
            for step in group.gather(self.launches.context.mesh)
        ]

    def whole_grad_bytes(self, unit: Unit) -> float:
        """Returns the bytes of gradients that live until their reduction ends."""
        return unit.microstep_elements * self.launches.context.precision.bytes("grad")

    def reduce_unit(self, unit: Unit, slot: Slot, *, final: bool) -> None:
        """Reduces what may not stay partial; buckets the rest when this is the last micro-step."""
        c = self.launches.context
        freed = self.whole_grad_bytes(unit)
        for group in unit.groups:
            steps = group.reduce_microstep(c.mesh)
            for step in steps:
                share = group.elements * c.precision.bytes("grad")
                self.reductions.append(
                    self.launches.collective(
                        step,
                        c.precision.grad_reduce,
                        c.precision.bytes("grad_reduce"),
                        label=f"{unit.path} gradients",
                        stream="reduce",
                        delta_end={"gradients": -min(share, freed)} if step == steps[-1] else None,
                        microbatch=slot.microbatch,
                        chunk=slot.chunk,
                    )
                )
        if moves_gradients(c) and unit.microstep and self.reductions:
            shard = sum(g.share(g.signature.accumulated, c.mesh) for g in unit.groups)
            size = shard * c.precision.bytes("grad_reduce")
            last = (self.reductions[-1],)
            if slot.microbatch:  # the sum of those before comes up and this one is added to it
                label = f"{unit.path} earlier gradients"
                last = (copy(self.launches, size, label=label, down=False, after=last),)
            down = copy(self.launches, size, label=f"{unit.path} gradients", down=True, after=last)
            self.reductions.append(down)
        if not final:
            return
        self.pending.append(unit.groups)
        if c.tree.runtime.overlap_grad:
            self.flush(everything=False)

    def flush(self, *, everything: bool) -> None:
        """Launches the step's reduction of pending gradients in buckets."""
        c = self.launches.context
        runtime = c.tree.runtime
        groups = merge(group for unit in self.pending for group in unit)
        size = c.precision.bytes("grad_reduce")
        data = sum(g.elements * size for g in groups if self._reduces_data(g))
        limit = runtime.bucket_bytes or 0.0
        if runtime.first_bucket_bytes is not None and not self.first_bucket_done:
            limit = runtime.first_bucket_bytes
        if not everything and (data < limit or not data):
            return
        self.first_bucket_done = True
        self.pending = []
        for group in groups:
            for step in self._reduce_step(group):
                self.reductions.append(
                    self.launches.collective(
                        step,
                        c.precision.grad_reduce,
                        size,
                        label="gradients",
                        stream="reduce",
                        count=self._buckets(step, group.elements * size),
                    )
                )

    def _buckets(self, step: Redistribution, num_bytes: float) -> int:
        """In how many buckets a reduction runs; only data-parallel ones are bucketed."""
        limit = self.launches.context.tree.runtime.bucket_bytes
        if limit is None or family(step.axes[0]) != "data":
            return 1
        return max(1, ceil(num_bytes / limit - 1e-9))

    def _reduce_step(self, group: WeightGroup) -> tuple[Redistribution, ...]:
        c = self.launches.context
        if c.stack.whole_gradients and not group.signature.accumulated:
            return group.reduce_whole(c.mesh)
        return group.reduce_step(c.mesh)

    def _reduces_data(self, group: WeightGroup) -> bool:
        return any(family(step.axes[0]) == "data" for step in self._reduce_step(group))

    def publish_before(self) -> None:
        """With overlapped parameter gathering: last step's updated weights arrive per unit."""
        c = self.launches.context
        if not c.tree.runtime.overlap_param or c.optimizer == "none":
            return
        for unit in c.units():
            handles = [
                self._publish(step, unit.path, weight_dtype(unit, c.precision), unit=unit)
                for group in unit.groups
                for step in group.publish(c.mesh)
            ]
            if handles:
                self.ready[id(unit)] = handles

    def publish_after(self, updates: Sequence[int]) -> list[int]:
        """Gathers the updated weights once the update is done, unless that overlaps.

        Returns the gathers.
        """
        c = self.launches.context
        if c.tree.runtime.overlap_param:
            return []
        copies = 2.0 if c.stack.flat_gather else 0.0
        return [
            self._publish(
                step, "all", dtype, after=updates, size=copies * dtype_bytes(dtype) * step.elements
            )
            for dtype, step in self._gathers_after()
        ]

    def flat_gather_bytes(self) -> float:
        """Returns the bytes of the one buffer that all new weights of a rank are gathered in.

        The other copy is a buffer for each rank of the group, which freed activations make room
        for.
        """
        c = self.launches.context
        if not c.stack.flat_gather or c.tree.runtime.overlap_param:
            return 0.0
        return sum(step.elements * dtype_bytes(dtype) for dtype, step in self._gathers_after())

    def _gathers_after(self) -> list[tuple[str, Redistribution]]:
        c = self.launches.context
        return [
            (dtype, step)
            for dtype, groups in by_weight_dtype(c.units(), c.precision).items()
            for group in groups
            for step in group.publish(c.mesh)
        ]

    def _publish(
        self,
        step: Redistribution,
        path: str,
        dtype: str,
        after: Sequence[int] = (),
        size: float = 0.0,
        unit: Unit | None = None,
    ) -> int:
        """Gathers updated weights of one unit or of all.

        `size` bytes are copies of them that live that long.
        """
        step, count = self._handed_out(step, unit)
        return self.launches.collective(
            step,
            dtype,
            dtype_bytes(dtype),
            label=f"{path} updated weights",
            stream="gather",
            after=after,
            count=count,
            delta_start={"optimizer step": size} if size else None,
            delta_end={"optimizer step": -size} if size else None,
        )

    def _handed_out(self, step: Redistribution, unit: Unit | None) -> tuple[Redistribution, int]:
        """Returns the collective that hands out new weights, and how many calls it takes.

        Where a weight has one owner there are no more owners than weights, each with a call.
        """
        c = self.launches.context
        if not c.stack.owner_broadcasts or step.collective != "all_gather":
            return step, 1
        instances = [i for chunk in c.chunks for i in chunk if unit in (None, i.unit)]
        weights = sum(len(instance.lowered.weights) for instance in instances)
        return replace(step, collective="broadcast"), min(c.mesh.size(step.axes), weights)
