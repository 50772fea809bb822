"""Other plans of the same job: same model, batch, sequence, cluster and stack.

The plans differ in what moves work between operators, links and host: tensor- and pipeline-parallel
degree, micro-batch, ZeRO stage and recompute. They serve to find runs that tell constants apart, so
tp may leave the node here: a short run of it says what the NICs do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from foretrain.analysis.candidate import changed_plan
from foretrain.analysis.candidates import gives_dp
from foretrain.frontends.spec import ConvSpec
from foretrain.run.spec import RunSpec
from foretrain.strategy.checks import ZERO_STAGES, Numbers, check_plan, tensor_degrees
from foretrain.strategy.choices import divisors
from foretrain.strategy.plan import Recompute

#: Larger micro-batches than this are not tried.
MOST_MICROBATCH = 16
#: Plans this many times slower than the fastest are not worth measuring.
SLOWEST = 4.0
#: More micro-steps x stages than this take too long to simulate dozens of times.
MOST_SLOTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlan:
    """A run with another plan; `changes` are the `--set` paths that lead to it, none: as given."""

    run: RunSpec
    changes: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Returns the changes as people type them, e.g. 'plan.tp=8 training.microbatch=1'."""
        return " ".join(f"{path}={_typed(value)}" for path, value in self.changes.items())


def other_plans(run: RunSpec) -> list[OtherPlan]:
    """Returns the valid plans, the given one first; whether they fit in memory is not checked.

    A run whose plan gives a whole strategy tree has no others.
    """
    plans = [OtherPlan(run=run, changes={})]
    if run.plan.tree is not None:
        return plans
    for tp in _tensor_degrees(run):
        for pp in _stage_counts(run):
            for zero in _zero_stages(run, tp, pp):
                for mode in _recompute_modes(run):
                    for microbatch in _microbatches(run, tp, pp):
                        found = _changed(run, tp, pp, zero, mode, microbatch)
                        if found.changes and valid(found.run):
                            plans.append(found)
    return plans


def spread(plans: Sequence[OtherPlan], count: int) -> list[OtherPlan]:
    """Returns the first plan and those that differ most from one another, up to `count`.

    Each next plan is the one farthest from all taken (its distance to the nearest of them).
    """
    left = list(plans)
    taken = [left.pop(0)]
    apart = [distance(plan, taken[0]) for plan in left]
    while left and len(taken) < count:
        index = max(range(len(left)), key=lambda i: (apart[i], -i))
        taken.append(left.pop(index))
        apart.pop(index)
        apart = [min(d, distance(p, taken[-1])) for d, p in zip(apart, left, strict=True)]
    return taken


def distance(one: OtherPlan, other: OtherPlan) -> float:
    """Returns how differently two plans use links and host: doublings, in one sum."""
    a, b = one.run, other.run
    doublings = sum(
        abs(log2(x / y))
        for x, y in (
            (a.plan.tp, b.plan.tp),
            (a.plan.pp, b.plan.pp),
            (a.training.microbatch, b.training.microbatch),
        )
    )
    sharding = abs((a.plan.zero or 0) - (b.plan.zero or 0))
    recompute = a.plan.recompute.mode != b.plan.recompute.mode
    return doublings + 0.5 * sharding + 0.25 * recompute


def _tensor_degrees(run: RunSpec) -> list[int]:
    world, node = run.cluster.world_size, run.cluster.devices_per_node
    most = min(world, max(2 * node, run.plan.tp))
    return sorted({run.plan.tp, *(t for t in tensor_degrees(run.model, world) if t <= most)})


def _stage_counts(run: RunSpec) -> list[int]:
    plan = run.plan
    if plan.stages is not None or isinstance(run.model, ConvSpec) or plan.preset == "ddp":
        return [plan.pp]
    if plan.preset == "fsdp":
        return [plan.pp]
    return [p for p in divisors(run.model.layers) if run.cluster.world_size % p == 0]


def _zero_stages(run: RunSpec, tp: int, pp: int) -> Sequence[int | None]:
    plan = run.plan
    replicas = run.cluster.world_size // (tp * pp * plan.cp)
    if plan.zero is None or pp > 1 or replicas <= 1:
        return [plan.zero]
    stages = ZERO_STAGES.get(plan.preset, (0, 1, 2, 3))
    return sorted({plan.zero, stages[0], stages[-1]})


def _recompute_modes(run: RunSpec) -> list[str]:
    now = run.plan.recompute.mode
    return [now] if now == "full" else [now, "full"]


def _microbatches(run: RunSpec, tp: int, pp: int) -> list[int]:
    dp, rest = divmod(run.cluster.world_size, tp * pp * run.plan.cp)
    if rest or not dp:
        return []
    most = run.training.global_batch // dp
    sizes = {run.training.microbatch, *(2**i for i in range(MOST_MICROBATCH.bit_length()))}
    return [
        size
        for size in sorted(sizes)
        if size <= most and most % size == 0 and most // size * pp <= MOST_SLOTS
    ]


def _changed(
    run: RunSpec, tp: int, pp: int, zero: int | None, mode: str, microbatch: int
) -> OtherPlan:
    plan = run.plan
    changes: dict[str, Any] = {}
    fields: dict[str, Any] = {"dp": None}
    if tp != plan.tp:
        sequence_parallel = tp > 1 and (plan.sequence_parallel or plan.tp == 1)
        fields |= {"tp": tp, "sequence_parallel": sequence_parallel}
        changes["plan.tp"] = tp
        if sequence_parallel != plan.sequence_parallel:
            changes["plan.sequence_parallel"] = sequence_parallel
    if pp != plan.pp:
        fields |= {"pp": pp, "interleave": 1, "schedule": "1f1b", "in_flight": None}
        changes["plan.pp"] = pp
        if plan.interleave > 1:
            changes |= {"plan.interleave": 1, "plan.schedule": "1f1b"}
    if zero != plan.zero:
        fields["zero"] = changes["plan.zero"] = zero
    if mode != plan.recompute.mode:
        fields["recompute"] = Recompute(mode=mode)
        changes["plan.recompute"] = mode
    changed = changed_plan(run, **fields)
    if changes and gives_dp(run):
        changes["plan.dp"] = changed.plan.dp
    if microbatch != run.training.microbatch:
        training = replace(run.training, microbatch=microbatch)
        changed = replace(changed, training=training)
        changes["training.microbatch"] = microbatch
    return OtherPlan(run=changed, changes=changes)


def valid(run: RunSpec) -> bool:
    """Returns whether model, plan and batch of a run go together."""
    training = run.training
    numbers = Numbers(
        num_devices=run.cluster.world_size,
        sequence=training.sequence,
        global_batch=training.global_batch,
        microbatch=training.microbatch,
    )
    return not check_plan(run.model, run.plan, numbers)


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
