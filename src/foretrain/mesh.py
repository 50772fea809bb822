"""The mesh: an ordered factorisation of the ranks into named axes, outermost first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Axis names and sizes, outermost first; the last axis joins neighbouring ranks."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return prod(self.sizes)

    def size(self, axes: str | Sequence[str]) -> int:
        """Returns the product of the sizes of one or several axes (absent axes count 1)."""
        names = (axes,) if isinstance(axes, str) else axes
        table = dict(zip(self.axes, self.sizes, strict=True))
        return prod(table.get(name, 1) for name in names)

    def stride(self, axis: str) -> int:
        """Returns the distance in ranks between neighbours along `axis`."""
        return prod(self.sizes[self.axes.index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on every axis."""
        return {a: rank // self.stride(a) % s for a, s in zip(self.axes, self.sizes, strict=True)}

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` only on `axes`, sorted."""
        present = [axis for axis in axes if axis in self.axes]
        place = self.coordinates(rank)
        base = rank - sum(place[axis] * self.stride(axis) for axis in present)
        steps = [[i * self.stride(axis) for i in range(self.size(axis))] for axis in present]
        return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))

    def split_axis(self, axis: str, inner: int) -> Mesh:
        """Returns a mesh with `axis` as `axis.0` and, inside it, `axis.1` of size `inner`."""
        i = self.axes.index(axis)
        outer = self.sizes[i] // inner
        return Mesh(
            axes=(*self.axes[:i], f"{axis}.0", f"{axis}.1", *self.axes[i + 1 :]),
            sizes=(*self.sizes[:i], outer, inner, *self.sizes[i + 1 :]),
        )
