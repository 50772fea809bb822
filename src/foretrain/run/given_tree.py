"""A strategy tree in the run file (`plan.tree`): its degrees become the plan's, and are checked."""

from __future__ import annotations

from dataclasses import replace

from foretrain.errors import PlanError, Problem
from foretrain.frontends.encoder_decoder import STACKS
from foretrain.run.fields import Fields
from foretrain.strategy.plan import Plan, Recompute
from foretrain.strategy.text import read_tree
from foretrain.strategy.tree import StrategyTree, resolve

#: What ZeRO-1, 2 and 3 shard, in that order.
ZERO_ROLES = ("master", "grad_accumulator", "weight")
#: Knobs that a tree spells out in a form of its own.
DECIDED = ("shard", "bucket_mib", "prefetch", "overlap", "order", "overrides", "reshard",
           "tables", "assignment")  # fmt: skip


def adopt_tree(fields: Fields, plan: Plan, given: set[str]) -> tuple[Plan, StrategyTree | None]:
    """Returns the plan with the degrees and the schedule of its tree, and the tree (None: none).

    What the plan states as well, with another value or where the tree decides it node by node, is
    a problem. What the tree decides counts as `given` from here on.
    """
    if plan.tree is None:
        return plan, None
    try:
        tree = read_tree(plan.tree)
    except PlanError as error:
        fields.refuse(error.problems, PlanError)
        return plan, None
    for key in sorted(given & set(DECIDED)):
        what = f"plan.tree decides {key} already"
        way_out = f"leave {key} out, or leave the tree out"
        fields.refuse([Problem(what=what, where=f"plan.{key}", way_out=way_out)], PlanError)
    stack = STACKS[0] if any(n.pattern.startswith(STACKS[0]) for n in tree.nodes) else "layers"
    settings = resolve(tree.nodes, f"{stack}.0")
    sharded = [bool(settings.memory.get(role, {}).get("*")) for role in ZERO_ROLES]
    found = {
        "zero": max((i for i, flat in enumerate(sharded, start=1) if flat), default=0),
        "no_sync": (sharded[2] and not sharded[1]) or None,
        "sequence_parallel": "tp" in settings.memory.get("residual", {}).get("seq", ()),
        "recompute": Recompute(mode=settings.recompute),
        "tp": tree.mesh.size("tp"),
        "pp": tree.mesh.size("pp"),
        "cp": tree.mesh.size("cp"),
        "interleave": tree.schedule.interleave,
        "schedule": tree.schedule.kind,
        "stages": tree.schedule.stages,
        "in_flight": tree.schedule.in_flight,
        "offload": tree.runtime.offload,
        "optimizer_offload_fraction": tree.runtime.offload_fraction,
        "cpu_offloading_num_layers": tree.runtime.offload_layers,
    }
    for key, value in found.items():
        stated = getattr(plan, key)
        if key in given and stated != value and value is not None:
            what = f"plan.tree says {key} {value}"
            way_out = f"leave {key} out, or leave the tree out"
            problem = Problem(what=what, where=f"plan.{key}", value=stated, way_out=way_out)
            fields.refuse([problem], PlanError)
    given |= {"no_sync"} if found["no_sync"] else set()
    given |= {"zero", "sequence_parallel", "recompute", "schedule"}
    return replace(plan, **found), tree


def check_tree(tree: StrategyTree, *, num_devices: int, accumulation: int) -> list[Problem]:
    """Returns what does not agree between a tree and the cluster or the batch."""
    problems: list[Problem] = []
    repeated = [n for n in tree.nodes if n.recompute not in (None, "none")]
    if tree.runtime.offload_layers and repeated:
        what = "activations on the host do not go with recompute"
        way_out = "take recompute out of the node, or set runtime.offload_layers to 0"
        where, value = "plan.tree", repeated[0].pattern
        problems.append(Problem(what=what, where=where, value=value, way_out=way_out))
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
