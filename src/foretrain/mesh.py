"""The mesh: an ordered factorisation of the ranks into named axes, outermost first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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
        if not axes:
            return 1
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return _size(self.axes, self.sizes, names)

    def stride(self, axis: str) -> int:
        """Returns the distance in ranks between neighbours along `axis`."""
        return prod(self.sizes[self.axes.index(axis) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on every axis."""
        place: dict[str, int] = {}
        stride = self.world_size
        for axis, size in zip(self.axes, self.sizes, strict=True):
            stride //= size
            place[axis] = rank // stride % size
        return place

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the ranks that differ from `rank` only on `axes`, sorted."""
        return _group(self, rank, tuple(axes))

    def split_axis(self, axis: str, inner: int) -> Mesh:
        """Returns a mesh with `axis` as `axis.0` and, inside it, `axis.1` of size `inner`."""
        i = self.axes.index(axis)
        outer = self.sizes[i] // inner
        return Mesh(
            axes=(*self.axes[:i], f"{axis}.0", f"{axis}.1", *self.axes[i + 1 :]),
            sizes=(*self.sizes[:i], outer, inner, *self.sizes[i + 1 :]),
        )


@lru_cache(maxsize=4096)  # asked for every operand of every operator
def _size(axes: tuple[str, ...], sizes: tuple[int, ...], names: tuple[str, ...]) -> int:
    table = dict(zip(axes, sizes, strict=True))
    return prod(table.get(name, 1) for name in names)


@lru_cache(maxsize=256)  # asked for every collective, and long for a large job
def _group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    present = [axis for axis in axes if axis in mesh.axes]
    place = mesh.coordinates(rank)
    base = rank - sum(place[axis] * mesh.stride(axis) for axis in present)
    steps = [[i * mesh.stride(axis) for i in range(mesh.size(axis))] for axis in present]
    return tuple(sorted(base + sum(offsets) for offsets in product(*steps)))
