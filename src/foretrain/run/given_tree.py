"""A strategy tree in the run file (`plan.tree`): its degrees become the plan's, and are checked."""

from __future__ import annotations

from dataclasses import replace

from foretrain.errors import PlanError, Problem
from foretrain.run.fields import Fields
from foretrain.strategy.plan import Plan
from foretrain.strategy.text import read_tree
from foretrain.strategy.tree import StrategyTree


def adopt_tree(fields: Fields, plan: Plan, given: set[str]) -> tuple[Plan, StrategyTree | None]:
    """Returns the plan with the degrees and the schedule of its tree, and the tree (None: none).

    A degree that the plan states as well, with another value, is a problem.
    """
    if plan.tree is None:
        return plan, None
    try:
        tree = read_tree(plan.tree)
    except PlanError as error:
        fields.refuse(error.problems, PlanError)
        return plan, None
    found = {
        "tp": tree.mesh.size("tp"),
        "pp": tree.mesh.size("pp"),
        "interleave": tree.schedule.interleave,
        "schedule": tree.schedule.kind,
        "stages": tree.schedule.stages,
        "in_flight": tree.schedule.in_flight,
    }
    for key, value in found.items():
        stated = getattr(plan, key)
        if key in given and stated != value and value is not None:
            what = f"plan.tree says {key} {value}"
            way_out = f"leave {key} out, or leave the tree out"
            problem = Problem(what=what, where=f"plan.{key}", value=stated, way_out=way_out)
            fields.refuse([problem], PlanError)
    return replace(plan, **found), tree


def check_tree(tree: StrategyTree, *, num_devices: int, accumulation: int) -> list[Problem]:
    """Returns what does not agree between a tree and the cluster or the batch."""
    problems: list[Problem] = []
    if tree.mesh.world_size != num_devices:
        what = f"the mesh has {tree.mesh.world_size} ranks, the cluster {num_devices} devices"
        problems.append(Problem(what=what, where="plan.tree"))
    if tree.schedule.accumulation != accumulation:
        what = (
            f"the tree was made for {tree.schedule.accumulation} micro-batches per step, the batch "
            f"gives {accumulation}"
        )
        way_out = "change schedule.accumulation of the tree"
        problems.append(Problem(what=what, where="plan.tree", way_out=way_out))
    return problems
