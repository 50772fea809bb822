"""Activations of the first layers wait for their backward in the memory of the host.

Transformer Engine copies one layer at a time (cpu_offload.py, the asynchronous double buffer):

    layers          0   1   2   3   4   5   6   7        L = 8 layers, n = 3 of them offloaded
    copied down     ----0---|---1---|---2-------|        windows end after layers 2, 5 and 7

The windows share the layers out evenly. At the end of one, computation waits for its copy, the
device memory is free, and the next copy starts. Backward walks the same windows: when it comes to
the layer that ends one, it waits for what is on its way up and starts the next copy.
See docs/explain/memory.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foretrain.compiler.launches import Instance, LaunchList
from foretrain.compiler.offload import copy
from foretrain.program import Segment

#: Parts of a forward's live bytes that no backward of the layer reads.
_STAY = ("weight copies", "new gradients", "gathered weights")


def window_ends(layers: int, offloaded: int) -> tuple[int, ...]:
    """Returns for each of the first `offloaded` layers the layer after which its copy is done.

    Windows of layers // offloaded; the first ones take the layers that are left over.
    """
    size, more = divmod(layers, offloaded)
    return tuple(size * (i + 1) - 1 + min(i + 1, more) for i in range(offloaded))


def kept_bytes(instance: Instance, segments: Sequence[Segment]) -> dict[str, float]:
    """Returns what the forward of a block leaves for its backward, by part."""
    kept: dict[str, float] = {}
    for piece in instance.forward:
        if piece.segment is not None:
            for part, value in segments[piece.segment].delta().items():
                kept[part] = kept.get(part, 0.0) + value
    return {part: value for part, value in kept.items() if value > 0 and part not in _STAY}


@dataclass(slots=True)
class ActivationTraffic:
    """Copies of a chunk's saved activations; `down` and `up` hold the handles of one micro-batch.

    `ends` maps a place in the chunk to the layer (a place too) whose window ends there.
    """

    launches: LaunchList
    chunk: Sequence[Instance]
    ends: dict[int, int] = field(default_factory=dict[int, int])
    moved: list[int] = field(default_factory=list[int])
    down: int | None = None
    up: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        places = [i for i, instance in enumerate(self.chunk) if instance.unit.repeated]
        count = min(self.launches.context.tree.runtime.offload_layers, len(places) - 1)
        if count > 0:
            self.moved = places[:count]
            ends = window_ends(len(places), count)
            self.ends = {places[end]: place for place, end in zip(self.moved, ends, strict=True)}

    def host_bytes(self) -> float:
        """Returns what waits on the host at the end of a forward."""
        return sum(sum(self._bytes(place).values()) for place in self.moved)

    def after_forward(self, place: int, run: int) -> list[int]:
        """Starts the copy that is due after a layer; returns what computation waits for."""
        if not self.moved:
            return []
        if place == self.moved[0]:
            self._start_down(self.moved[0], run)
        layer = self.ends.get(place)
        if layer is None or self.down is None:
            return []
        waits = [self.down]
        following = self.moved.index(layer) + 1
        if following < len(self.moved):
            self._start_down(self.moved[following], run)
        return waits

    def before_backward(self, place: int, previous: Sequence[int]) -> list[int]:
        """Starts the copy that is due before a layer; returns what its backward waits for."""
        waits: list[int] = []
        layer = self.ends.get(place)
        if layer is not None:
            waits += list(self.up.values())[-1:]
            self._start_up(layer, tuple(previous))
        if place in self.up:
            waits.append(self.up.pop(place))
        return waits

    def _bytes(self, place: int) -> Mapping[str, float]:
        return kept_bytes(self.chunk[place], self.launches.context.segments)

    def _start_down(self, place: int, run: int) -> None:
        kept = self._bytes(place)
        self.down = copy(
            self.launches,
            sum(kept.values()),
            label=f"{self.chunk[place].unit.path} activations",
            down=True,
            after=(run,),
            freed=kept,
        )

    def _start_up(self, place: int, previous: tuple[int, ...]) -> None:
        kept = self._bytes(place)
        self.up[place] = copy(
            self.launches,
            sum(kept.values()),
            label=f"{self.chunk[place].unit.path} activations",
            down=False,
            after=previous,
            taken=kept,
        )
