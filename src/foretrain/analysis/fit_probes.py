"""Plans that are worth a look only as probes of a cluster, beside those of fit_plans.py.

Few settings lean on one constant alone: context parallelism shortens kernels until launches no
longer hide behind them, ZeRO-3 over the devices of one node gathers weights over its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretrain.analysis.candidates import changed_plan
from foretrain.analysis.fit_plans import OtherPlan, gives_dp, other_plans, valid
from foretrain.frontends.spec import ModelSpec
from foretrain.run.spec import RunSpec
from foretrain.strategy.checks import divisors

#: Presets whose software splits a sequence over ranks with ring attention.
CONTEXT_PRESETS = ("megatron", "fsdp")
#: Presets whose software shards over the devices of one node (HSDP, MiCS).
NODE_SHARD_PRESETS = ("fsdp", "deepspeed")
#: A shorter sequence is this many times shorter, and no shorter than so many tokens.
SHORTER, FEWEST_TOKENS = (8, 32), 64


def probing_plans(run: RunSpec) -> list[OtherPlan]:
    """Returns the other plans of a run and those that only a probe of the cluster uses."""
    plans = other_plans(run)
    least = _least_work(plans)
    found = [_with_context(plan, cp) for cp in _context_degrees(run) for plan in least]
    found += [_within_node(plan) for plan in plans if _shards_over_nodes(plan)]
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
        for plan in _least_work(other_plans(run), any_stages=True)
        if plan.run.plan.tp <= run.cluster.devices_per_node
    ]
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

    The host shows beside the shortest kernels, split by tp, by cp or over nodes; NICs where layers
    are split over nodes or ZeRO-3 gathers weights for little work; the links of a node in its
    widest tp, or with such weights sharded inside it; operators where nothing is split.
    """
    node = plans[0].run.cluster.devices_per_node

    def work(plan: OtherPlan) -> tuple[float, bool, int]:
        training, asked = plan.run.training, plan.run.plan
        least = training.microbatch / (asked.tp * asked.cp)
        return least, asked.recompute.mode == "full", asked.zero or 0

    def tp(plan: OtherPlan) -> int:
        return plan.run.plan.tp

    inside = [p for p in plans if tp(p) * p.run.plan.cp <= node]
    across = [p for p in plans if tp(p) * p.run.plan.cp > node]
    sharded = [p for p in plans if "plan.shard" in p.changes]
    found = [
        min(inside, key=lambda p: (*work(p), -tp(p)), default=None),
        min(inside, key=lambda p: (*work(p), tp(p)), default=None),
        min(across, key=lambda p: (*work(p), -tp(p)), default=None),
        min(across, key=lambda p: (-tp(p), -work(p)[0]), default=None),
        min(plans, key=lambda p: (-work(p)[2], work(p)[0] * tp(p), tp(p))),
        min(sharded, key=lambda p: (work(p)[0] * tp(p), tp(p)), default=None),
        min(inside, key=lambda p: (-tp(p), -work(p)[0]), default=None),
        min(plans, key=lambda p: (tp(p) * p.run.plan.cp * p.run.plan.pp, -work(p)[0])),
    ]
    return [plan for plan in found if plan is not None]


def _context_degrees(run: RunSpec) -> list[int]:
    model, sequence = run.model, run.training.sequence
    decoder = isinstance(model, ModelSpec) and model.causal and not model.decoder_layers
    if not decoder or run.plan.cp > 1 or run.plan.preset not in CONTEXT_PRESETS or not sequence:
        return []
    most = min(run.cluster.world_size, 2 * run.cluster.devices_per_node)
    # every rank holds two pieces of the sequence, one early and one late
    return [cp for cp in divisors(most) if cp > 1 and sequence % (2 * cp) == 0]


def _least_work(plans: Sequence[OtherPlan], *, any_stages: bool = False) -> list[OtherPlan]:
    """Returns the plans whose kernels are shortest: the least micro-batch, all else as given."""
    given = plans[0].run.plan
    least = min(plan.run.training.microbatch for plan in plans)
    return [
        plan
        for plan in plans
        if plan.run.training.microbatch == least
        and (any_stages or plan.run.plan.pp == given.pp)
        and (plan.run.plan.zero, plan.run.plan.recompute) == (given.zero, given.recompute)
    ]


def _with_context(plan: OtherPlan, cp: int) -> OtherPlan:
    return _set(plan, "cp", cp)


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
    return _set(plan, "shard", plan.run.cluster.devices_per_node // plan.run.plan.tp)


def _set(plan: OtherPlan, key: str, value: int) -> OtherPlan:
    changed = changed_plan(plan.run, **{key: value}, dp=None)
    changes = {f"plan.{key}": value, **plan.changes}
    if gives_dp(plan.run):
        changes["plan.dp"] = changed.plan.dp
    return OtherPlan(run=changed, changes=changes)
