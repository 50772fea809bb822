"""Which mesh axes split which dim of an operator: own settings, then inherited, then propagated.

Propagation follows the data: an operator without settings of its own takes over how its
activations lie. So a handful of key nodes settles a whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from foretrain.compiler.placements import FLAT, Layout, layout
from foretrain.errors import InternalError, Problem
from foretrain.graph.ir import Op, Operand, Tensor
from foretrain.mesh import Mesh
from foretrain.strategy.tree import Settings

Split = dict[str, tuple[str, ...]]
#: Key for axes that a setting spends on replication: no dim of the operator may take them.
REPLICATED_OVER = ""
#: Dims along which these operators need the whole row: they cannot be split.
ROW_DIMS = {
    "layernorm": ("hidden",),
    "rmsnorm": ("hidden",),
    "softmax": ("seq_kv", "source"),
    "class_loss": ("class",),
}


def atomic(axes: Iterable[str], mesh: Mesh) -> list[str]:
    """Returns axis names with split axes replaced by their parts (names are checked before)."""
    result: list[str] = []
    for axis in axes:
        if axis in mesh.axes:
            result.append(axis)
        elif f"{axis}.0" in mesh.axes:
            result += [f"{axis}.0", f"{axis}.1"]
        elif axis == "dp":
            result += ["dp_replicate", "dp_shard"]
        else:
            raise InternalError(f"unknown mesh axis {axis!r}")
    return result


def refine_mesh(mesh: Mesh, ops: Iterable[tuple[Op, Settings]]) -> Mesh:
    """Returns the mesh with an axis split where a group of dims needs it.

    Heads over tp with fewer KV heads than ranks: tp becomes tp.0 (KV heads) x tp.1 (queries of
    one KV head), and what has no query dim is replicated over tp.1.
    """
    for op, settings in ops:
        for name, axes in settings.own.items():
            parts = op.groups.get(name)
            if not parts or len(axes) != 1 or axes[0] not in mesh.axes:
                continue
            first, n = op.dim(parts[0]).size, mesh.size(axes[0])
            if first < n and n % first == 0 and first > 1:
                mesh = mesh.split_axis(axes[0], n // first)
    return mesh


def own_split(op: Op, settings: Mapping[str, Sequence[str]], mesh: Mesh) -> Split:
    """Returns the split that explicit settings ask for; groups of dims are filled in order.

    A later setting wins: it replaces earlier ones of the same dims, and takes its axes from
    other dims.
    """
    split: dict[str, list[str]] = {}
    for name, axes in settings.items():
        parts = op.groups.get(name) or ((name,) if _has(op, name) else ())
        if not parts:
            continue
        wanted = atomic(axes, mesh)
        for dim, taken in split.items():
            split[dim] = [axis for axis in taken if axis not in wanted]
        split |= _fill(op, parts, wanted, mesh, group=name in op.groups)
    return {dim: tuple(axes) for dim, axes in split.items()}


def _fill(
    op: Op, parts: Sequence[str], axes: Sequence[str], mesh: Mesh, *, group: bool
) -> dict[str, list[str]]:
    """Deals axes to the dims of a group: to the next dim where the one before is used up."""
    rest = {part: op.dim(part).size for part in parts}
    filled: dict[str, list[str]] = {part: [] for part in parts}
    index = 0
    for axis in axes:
        size = mesh.size(axis)
        while index < len(parts) - 1 and rest[parts[index]] % size:
            index += 1
        part = parts[index]
        if group and len(parts) == 1 and rest[part] < size:
            filled.setdefault(REPLICATED_OVER, []).append(axis)  # more ranks than KV heads
            continue
        rest[part] //= size
        filled[part].append(axis)
    return filled


def _has(op: Op, dim: str) -> bool:
    return any(d.name == dim for d in op.dims)


def full_split(
    op: Op,
    own: Split,
    inherited: Split,
    sources: Sequence[tuple[Operand, Tensor, Layout]],
    mesh: Mesh,
) -> Split:
    """Returns the split of `op`.

    Own settings claim their axes first; the layouts of the activations in `sources` extend every
    dim that has no own setting.
    """
    split = {dim: list(axes) for dim, axes in own.items()}
    claimed = {axis for axes in split.values() for axis in axes}
    fixed = set(own) | set(ROW_DIMS.get(op.cost, ()))
    for dim, axes in inherited.items():
        if dim not in fixed and _has(op, dim):
            free = [axis for axis in axes if axis not in claimed]
            split.setdefault(dim, []).extend(free)
            claimed |= set(free)
    for operand, tensor, placed in sources:
        for name, axes in placed.shards:
            if name == FLAT:
                continue
            dim = operand.dims[tensor.dims.index(name)]
            if dim in fixed:
                continue
            free = [axis for axis in axes if axis not in claimed]
            split.setdefault(dim, []).extend(free)
            claimed |= set(free)
    return {d.name: tuple(split.get(d.name, ())) for d in op.dims}


def wanted_layout(operand: Operand, tensor: Tensor, split: Split) -> Layout:
    """Returns how an operator with `split` wants (or leaves) an operand."""
    return layout(
        {name: split.get(dim, ()) for name, dim in zip(tensor.dims, operand.dims, strict=True)}
    )


def check_split(op: Op, split: Split, mesh: Mesh, path: str) -> list[Problem]:
    """Returns a problem for each dim that its axes do not divide."""
    problems: list[Problem] = []
    for dim, axes in split.items():
        size, ways = op.dim(dim).size, mesh.size(axes)
        if size % ways and dim != "row":  # the last rows of a table are padded
            problems.append(
                Problem(
                    what=f"dim {dim!r} of size {size} cannot be split {ways} ways",
                    where=path,
                    value=", ".join(axes),
                    allowed=f"a divisor of {size}",
                )
            )
    return problems
