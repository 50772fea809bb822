"""The text form of a StrategyTree: YAML that can be read, diffed and put back into a run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import yaml

from foretrain.errors import PlanError, Problem
from foretrain.mesh import AXES, Mesh
from foretrain.strategy.plan import OFFLOAD, SCHEDULES
from foretrain.strategy.presets import convert_form, node_from_mapping
from foretrain.strategy.tree import Node, Runtime, Schedule, StrategyTree

_KEYS = ("mesh", "data_axes", "schedule", "runtime", "nodes")
_WAY_OUT = "start from the output of `foretrain explain RUN --stage plan`"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TreeForm:
    """The tree as it stands in a file."""

    mesh: list[tuple[str, int]]
    data_axes: tuple[str, ...]
    schedule: Schedule
    runtime: Runtime
    nodes: list[dict[str, Any]]


def tree_mapping(tree: StrategyTree) -> dict[str, Any]:
    """Returns the tree as plain mappings and lists; `read_tree` reads them back."""
    schedule, runtime = tree.schedule, tree.runtime
    return {
        # a list: the order of the axes matters, and tools sort the keys of mappings
        "mesh": [list(pair) for pair in zip(tree.mesh.axes, tree.mesh.sizes, strict=True)],
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
    for name in ("recompute", "keep_gathered", "reshard", "owner", "sparse"):
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
    form = convert_form(value, _TreeForm, "plan.tree", way_out=_WAY_OUT)
    problems = _wrong_values(form)
    if problems:
        raise PlanError(problems)
    nodes = [
        node_from_mapping(
            str(node.get("pattern", "")), {k: v for k, v in node.items() if k != "pattern"}
        )
        for node in form.nodes
    ]
    return StrategyTree(
        mesh=Mesh(axes=tuple(a for a, _ in form.mesh), sizes=tuple(n for _, n in form.mesh)),
        nodes=tuple(nodes),
        schedule=form.schedule,
        runtime=form.runtime,
        data_axes=form.data_axes,
    )


def _wrong_values(form: _TreeForm) -> list[Problem]:
    """Values of the right type that make no tree."""
    sizes, schedule, runtime = dict(form.mesh), form.schedule, form.runtime
    buckets = (runtime.bucket_bytes, runtime.first_bucket_bytes)
    checks = (
        (sorted(sizes) == sorted(AXES) and len(form.mesh) == len(AXES), "mesh", list(sizes),
         f"each of {', '.join(AXES)} once, outermost first"),
        (all(size >= 1 for size in sizes.values()), "mesh", list(sizes.values()), "sizes >= 1"),
        (schedule.pp == sizes.get("pp"), "schedule.pp", schedule.pp, "the size of pp in the mesh"),
        (schedule.kind in SCHEDULES, "schedule.kind", schedule.kind, ", ".join(SCHEDULES)),
        (schedule.interleave >= 1, "schedule.interleave", schedule.interleave, ">= 1"),
        (schedule.accumulation >= 1, "schedule.accumulation", schedule.accumulation, ">= 1"),
        (len(schedule.stages) == schedule.pp * schedule.interleave, "schedule.stages",
         list(schedule.stages), "one number of layers for each of pp x interleave chunks"),
        (all(b is None or 0 < b < inf for b in buckets), "runtime.bucket_bytes", list(buckets),
         "a finite number > 0, or null"),
        (runtime.prefetch >= 0, "runtime.prefetch", runtime.prefetch, ">= 0"),
        (runtime.offload in OFFLOAD, "runtime.offload", runtime.offload, ", ".join(OFFLOAD)),
        (0.0 < runtime.offload_fraction <= 1.0, "runtime.offload_fraction",
         runtime.offload_fraction, "above 0, up to 1"),
        (runtime.offload_fraction == 1.0 or runtime.offload == "optimizer",
         "runtime.offload_fraction", runtime.offload_fraction, "1 unless offload is optimizer"),
        (runtime.offload_layers >= 0, "runtime.offload_layers", runtime.offload_layers, ">= 0"),
        (0.0 <= runtime.staged_buckets < inf, "runtime.staged_buckets", runtime.staged_buckets,
         "a finite number >= 0"),
        (set(form.data_axes) <= set(AXES), "data_axes", list(form.data_axes), ", ".join(AXES)),
    )  # fmt: skip
    return [
        Problem(what="wrong value", where=f"plan.tree.{key}", value=value, allowed=allowed,
                way_out=_WAY_OUT)
        for right, key, value, allowed in checks
        if not right
    ]  # fmt: skip
