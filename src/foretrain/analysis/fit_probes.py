"""Plans that are worth a look only as probes of a cluster, beside those of fit_plans.py.

ZeRO-3 over the devices of one node gathers weights over its links. A shorter sequence is no plan of
the job any more, but shortens kernels until launches cannot hide behind them, which on large models
no setting does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretrain.analysis.candidate import changed_plan
from foretrain.analysis.fit_plans import OtherPlan, other_plans, valid
from foretrain.frontends.spec import ModelSpec
from foretrain.run.spec import RunSpec

#: Presets whose software shards over the devices of one node (HSDP, MiCS).
NODE_SHARD_PRESETS = ("fsdp", "deepspeed")
#: A shorter sequence is this many times shorter, and no shorter than so many tokens.
SHORTER, FEWEST_TOKENS = (8, 32), 64


def probing_plans(run: RunSpec) -> list[OtherPlan]:
    """Returns the other plans of a run and those that only a probe of the cluster uses."""
    plans = other_plans(run)
    found = [_within_node(plan) for plan in plans if _shards_over_nodes(plan)]
    return plans + [plan for plan in found if valid(plan.run)]


def shorter_plans(run: RunSpec) -> list[OtherPlan]:
    """Returns plans with a shorter sequence, whose kernels hide no launch; none where it is fixed.

    The largest tp inside a node, none, and many stages.
    """
    training, model = run.training, run.model
    fixed = not isinstance(model, ModelSpec) or model.image is not None
    if fixed or training.sequence is None or training.target_sequence is not None:
        return []
    plans = [
        plan
        for plan in _least_work(other_plans(run))
        if plan.run.plan.tp <= run.cluster.devices_per_node
    ]
    if not plans:
        return []
    ends = [
        max(plans, key=lambda p: (p.run.plan.tp, -p.run.plan.pp)),
        max(plans, key=lambda p: (p.run.plan.tp * p.run.plan.pp, -p.run.plan.pp)),
        max(plans, key=lambda p: (p.run.plan.pp, -p.run.plan.tp)),
        min(plans, key=lambda p: (p.run.plan.tp, p.run.plan.pp)),
    ]
    found: list[OtherPlan] = []
    for times in SHORTER:
        for plan in {id(plan): plan for plan in ends}.values():
            shorter = training.sequence // times
            changed = replace(plan.run.training, sequence=shorter)
            changes = {**plan.changes, "training.sequence": shorter}
            found.append(OtherPlan(run=replace(plan.run, training=changed), changes=changes))
    few = max(FEWEST_TOKENS, run.cluster.devices_per_node)
    return [p for p in found if (p.run.training.sequence or 0) >= few and valid(p.run)]


def extremes(plans: Sequence[OtherPlan]) -> list[OtherPlan]:
    """Returns the plans that lean on one constant as far as settings go.

    The host shows beside the shortest kernels, split inside a node or over nodes; NICs where layers
    are split over nodes or ZeRO-3 gathers weights for little work; the links of a node in its
    widest tp, or with such weights sharded inside it; operators where nothing is split.
    """
    node = plans[0].run.cluster.devices_per_node

    def work(plan: OtherPlan) -> tuple[float, bool, int]:
        training, asked = plan.run.training, plan.run.plan
        least = training.microbatch / asked.tp
        return least, asked.recompute.mode == "full", asked.zero or 0

    def tp(plan: OtherPlan) -> int:
        return plan.run.plan.tp

    inside = [p for p in plans if tp(p) <= node]
    across = [p for p in plans if tp(p) > node]
    sharded = [p for p in plans if "plan.shard" in p.changes]
    found = [
        min(inside, key=work, default=None),
        min(across, key=lambda p: (*work(p), -tp(p)), default=None),
        min(across, key=lambda p: (-tp(p), -work(p)[0]), default=None),
        min(plans, key=lambda p: (-work(p)[2], work(p)[0] * tp(p), tp(p))),
        min(sharded, key=lambda p: (work(p)[0] * tp(p), tp(p)), default=None),
        min(inside, key=lambda p: (-tp(p), -work(p)[0]), default=None),
        min(plans, key=lambda p: (tp(p) * p.run.plan.pp, -work(p)[0])),
    ]
    return [plan for plan in found if plan is not None]


def _least_work(plans: Sequence[OtherPlan]) -> list[OtherPlan]:
    """Returns the plans with the least micro-batch, ZeRO and recompute as given."""
    given = plans[0].run.plan
    least = min(plan.run.training.microbatch for plan in plans)
    return [
        plan
        for plan in plans
        if plan.run.training.microbatch == least
        and (plan.run.plan.zero, plan.run.plan.recompute) == (given.zero, given.recompute)
    ]


def _shards_over_nodes(plan: OtherPlan) -> bool:
    run = plan.run
    node = run.cluster.devices_per_node
    return (
        run.plan.preset in NODE_SHARD_PRESETS
        and (run.plan.zero or 0) >= 3
        and run.plan.shard is None
        and run.plan.pp * run.plan.cp == 1
        and run.cluster.nodes > 1
        and run.plan.tp < node
        and node % run.plan.tp == 0
        and run.training.microbatch <= 2
    )


def _within_node(plan: OtherPlan) -> OtherPlan:
    shard = plan.run.cluster.devices_per_node // plan.run.plan.tp
    changed = changed_plan(plan.run, shard=shard, dp=None)
    return OtherPlan(run=changed, changes={"plan.shard": shard, **plan.changes})
