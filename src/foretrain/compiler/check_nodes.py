"""Checks of strategy nodes against the graph and the mesh: nothing given is ignored silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, cast

from foretrain.compiler.block import op_path, owner_axes
from foretrain.compiler.placements import FLAT
from foretrain.errors import Problem, nearest
from foretrain.graph.ir import Graph, Op
from foretrain.mesh import Mesh
from foretrain.strategy.plan import RECOMPUTE, RECOMPUTE_MODULES, recompute_modules
from foretrain.strategy.tree import MEMORY_ROLES, Node

#: Dims of feature maps that are not split: neighbours would have to exchange halos.
SPATIAL = ("height", "width", "in_height", "in_width", "r", "s")
RESIDUAL_DIMS = ("batch", "seq", "source", "hidden")


def check_nodes(graph: Graph, nodes: Sequence[Node], mesh: Mesh) -> list[Problem]:
    """Returns a problem for every setting that has no effect or no meaning.

    Patterns that match nothing, unknown dims, axes, roles and words, an axis used twice.
    """
    ops = _all_paths(graph)
    return [problem for node in nodes for problem in _check_node(node, ops, mesh)]


def _all_paths(graph: Graph) -> list[tuple[tuple[str, ...], Op]]:
    return [
        (tuple(op_path(block, layer, op.name).split(".")), op)
        for block in graph.blocks
        for layer in block.layers
        for op in block.ops
    ]


def _check_node(node: Node, ops: Sequence[tuple[tuple[str, ...], Op]], mesh: Mesh) -> list[Problem]:
    where = f"strategy node {node.pattern!r}"
    below = _below(node, ops)
    if not below:
        return [_matches_nothing(node, ops, where)]
    problems: list[Problem] = []
    known = node.recompute in RECOMPUTE or recompute_modules(node.recompute or "")
    if node.recompute is not None and not known:
        words = (*RECOMPUTE, "+".join(RECOMPUTE_MODULES))
        problems.append(_unknown("recompute", node.recompute, words, where))
    elif node.recompute is not None and node.depth > 2:
        problems.append(
            Problem(
                what="recompute is a setting of whole layers",
                where=where,
                value=node.pattern,
                allowed="a pattern of one or two parts, such as layers or layers.3",
            )
        )
    problems += _check_owner(node, below, mesh, where)
    dims = {name for op in below for name in (*(d.name for d in op.dims), *op.groups)}
    spatial = [dim for dim in node.computation if dim in SPATIAL and _on_maps(below)]
    problems += [
        Problem(
            what="a spatial split needs an exchange of halos, which is not modelled",
            where=f"{where}, computation",
            value=dim,
            allowed="batch and channel dims (batch, channel, in, out)",
        )
        for dim in spatial
    ]
    if node.pattern:
        problems += [
            _unknown("dim", dim, sorted(dims), f"{where}, computation")
            for dim in node.computation
            if dim not in dims and dim not in spatial
        ]
    problems += _check_axes(node.computation, mesh, f"{where}, computation")
    for role, split in node.memory.items():
        if role not in MEMORY_ROLES:
            problems.append(_unknown("memory role", role, MEMORY_ROLES, where))
            continue
        allowed = RESIDUAL_DIMS if role == "residual" else (FLAT,)
        inside = f"{where}, memory.{role}"
        problems += [_unknown("dim", dim, allowed, inside) for dim in split if dim not in allowed]
        # no tensor has both a seq and a source, so they may share axes
        own = {dim: axes for dim, axes in split.items() if dim != "source"}
        source = {dim: axes for dim, axes in split.items() if dim == "source"}
        problems += [*_check_axes(own, mesh, inside), *_check_axes(source, mesh, inside)]
    return problems


def _check_owner(node: Node, below: Sequence[Op], mesh: Mesh, where: str) -> list[Problem]:
    """An owner holds embedding tables only, and is a rank of the data-parallel group."""
    problems: list[Problem] = []
    for key, given in (("owner", node.owner is not None), ("sparse", bool(node.sparse))):
        if given and any(op.cost != "embedding_bag" for op in below):
            problems.append(
                Problem(what=f"{key} is a setting of embedding tables", where=where,
                        value=node.pattern, allowed="a pattern below features.tables")
            )  # fmt: skip
    size = mesh.size(owner_axes(mesh))
    if node.owner is not None and not 0 <= node.owner < size:
        problems.append(Problem(what="no such rank in the data-parallel group", where=where,
                                value=node.owner, allowed=f"0 to {size - 1}"))  # fmt: skip
    return problems


def _on_maps(ops: Sequence[Op]) -> bool:
    return any(dim.name == "height" for op in ops for dim in op.dims)


def _below(node: Node, ops: Sequence[tuple[tuple[str, ...], Op]]) -> list[Op]:
    """The distinct operators that a node reaches."""
    if not node.pattern:
        return list({op.name: op for _, op in ops}.values())
    parts = node.pattern.split(".")
    found: dict[str, Op] = {}
    for path, op in ops:
        if op.name in found or len(parts) > len(path):
            continue
        for name, part in zip(path, parts, strict=False):
            if not _matches(name, part):
                break
        else:
            found[op.name] = op
    return list(found.values())


#: The same few names and parts meet in every layer.
_matches = lru_cache(maxsize=65536)(fnmatchcase)


def _matches_nothing(node: Node, ops: Sequence[tuple[tuple[str, ...], Op]], where: str) -> Problem:
    general = {
        ".".join("*" if part.isdigit() else part for part in path[:length])
        for path, _ in ops
        for length in range(1, len(path) + 1)
    }
    return Problem(
        what="the pattern matches no module and no operator",
        where=where,
        value=node.pattern,
        allowed="a path such as layers.*.mlp.down, layers.0.attention or head.logits",
        way_out=nearest(node.pattern, general),
    )


def _check_axes(split: Mapping[str, object], mesh: Mesh, where: str) -> list[Problem]:
    problems: list[Problem] = []
    used: list[str] = []
    allowed = [axis for axis in mesh.axes if axis != "pp"]
    for dim, axes in split.items():
        if not isinstance(axes, list | tuple):
            problems.append(Problem(what="wants an axis or a list of axes", where=f"{where}.{dim}",
                                    value=axes, allowed=", ".join(allowed)))  # fmt: skip
            continue
        for axis in cast("Iterable[Any]", axes):
            if axis not in (*allowed, "dp"):
                problems.append(_unknown("mesh axis", str(axis), allowed, f"{where}.{dim}"))
            elif axis in used:
                problems.append(
                    Problem(what="a mesh axis is used twice", where=f"{where}.{dim}", value=axis)
                )
            used.append(str(axis))
    return problems


def _unknown(what: str, value: str, allowed: Iterable[str], where: str) -> Problem:
    names = list(allowed)
    return Problem(
        what=f"unknown {what}",
        where=where,
        value=value,
        allowed=", ".join(names),
        way_out=nearest(value, names),
    )
