"""The text form of a StrategyTree: YAML that can be read, diffed and put back into a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import yaml

from foretrain.errors import PlanError, Problem
from foretrain.mesh import Mesh
from foretrain.strategy.presets import node_from_mapping
from foretrain.strategy.tree import Node, Runtime, Schedule, StrategyTree

_KEYS = ("mesh", "data_axes", "schedule", "runtime", "nodes")


def tree_mapping(tree: StrategyTree) -> dict[str, Any]:
    """Returns the tree as plain mappings and lists; `read_tree` reads them back."""
    schedule, runtime = tree.schedule, tree.runtime
    return {
        "mesh": dict(zip(tree.mesh.axes, tree.mesh.sizes, strict=True)),
        "data_axes": list(tree.data_axes),
        "schedule": {
            "kind": schedule.kind,
            "accumulation": schedule.accumulation,
            "pp": schedule.pp,
            "interleave": schedule.interleave,
            "stages": list(schedule.stages),
            "in_flight": None if schedule.in_flight is None else list(schedule.in_flight),
        },
        "runtime": {name: getattr(runtime, name) for name in Runtime.__slots__},
        "nodes": [_node_mapping(node) for node in tree.nodes],
    }


def tree_text(tree: StrategyTree) -> str:
    """Returns the tree as YAML under `tree:`, ready to stand under `plan:` of a run file."""
    return yaml.safe_dump({"tree": tree_mapping(tree)}, sort_keys=False, default_flow_style=None)


def _node_mapping(node: Node) -> dict[str, Any]:
    value: dict[str, Any] = {"pattern": node.pattern}
    if node.computation:
        value["computation"] = {dim: list(axes) for dim, axes in node.computation.items()}
    if node.memory:
        value["memory"] = {
            role: {dim: list(axes) for dim, axes in split.items()}
            for role, split in node.memory.items()
        }
    for name in ("recompute", "keep_gathered", "reshard"):
        if getattr(node, name) is not None:
            value[name] = getattr(node, name)
    return value


def read_tree(value: Mapping[str, Any]) -> StrategyTree:
    """Returns the tree of a mapping made by `tree_mapping`. Raises PlanError with every problem."""
    problems = [
        Problem(what="missing key", where="plan.tree", value=key, allowed=", ".join(_KEYS))
        for key in _KEYS
        if key not in value
    ] + [
        Problem(what="unknown key", where="plan.tree", value=key, allowed=", ".join(_KEYS))
        for key in value
        if key not in _KEYS
    ]
    if problems:
        raise PlanError(problems)
    try:
        return _read(value)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise PlanError(
            Problem(
                what=f"a value of the tree has the wrong form ({error})",
                where="plan.tree",
                way_out="start from the output of `foretrain explain RUN --stage plan`",
            )
        ) from error


def _read(value: Mapping[str, Any]) -> StrategyTree:
    mesh = cast("Mapping[str, int]", value["mesh"])
    schedule = dict(cast("Mapping[str, Any]", value["schedule"]))
    in_flight = schedule.get("in_flight")
    schedule["stages"] = tuple(int(n) for n in schedule["stages"])
    schedule["in_flight"] = None if in_flight is None else tuple(int(n) for n in in_flight)
    nodes = [
        node_from_mapping(
            str(node["pattern"]), {key: item for key, item in node.items() if key != "pattern"}
        )
        for node in cast("list[Mapping[str, Any]]", value["nodes"])
    ]
    return StrategyTree(
        mesh=Mesh(axes=tuple(mesh), sizes=tuple(int(size) for size in mesh.values())),
        nodes=tuple(nodes),
        schedule=Schedule(**schedule),
        runtime=Runtime(**value["runtime"]),
        data_axes=tuple(value["data_axes"]),
    )
