"""Single changes of a run that are worth a prediction, ordered by what they could save at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretrain.analysis.candidate import Candidate, changed_plan, share
from foretrain.analysis.candidates_memory import activations_away, fused_loss, offload
from foretrain.frontends.spec import num_layers
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.strategy.checks import ZERO_STAGES, Numbers, check_plan
from foretrain.strategy.choices import divisors
from foretrain.strategy.plan import RECOMPUTE, Plan, Recompute
from foretrain.strategy.presets import build_tree
from foretrain.strategy.tree import Runtime

#: Small steps of a device run below its peak mostly because of launches and waves of tiles; a
#: larger micro-batch wins back at most about this share of the computation (docs/explain/costs.md).
BATCH_EFFICIENCY = 0.15

#: How far a knob is turned at once: twice, and where the run does not fit up to eight times.
FACTORS = (2, 4, 8)

#: The kind of all changes that are no setting of the run.
WHAT_IF = "what if"


def candidates(run: RunSpec, result: Result) -> list[Candidate]:
    """Returns the valid single changes of plan and micro-batch, in a fixed order."""
    found = [
        *_recompute(run, result),
        *_microbatch(run, result),
        *_zero(run, result),
        *_tensor(run, result),
        *_pipeline(run, result),
        *offload(run, result),
        *activations_away(run, result),
        *fused_loss(run, result),
        *_switches(run, result),
        *_interleave(run, result),
    ]
    return [candidate for candidate in found if _valid(candidate.run)]


def what_ifs(run: RunSpec, result: Result) -> list[Candidate]:
    """Returns changes of the hardware: NICs of twice the rate, a device of 10 % more FLOP/s.

    All are of one kind, so that a list of levers holds at most one of them.
    """
    cluster, parts = run.cluster, result.time_parts
    found: list[Candidate] = []
    inside = run.plan.tp * run.plan.cp <= cluster.devices_per_node
    exposed = _exposed(result, "ep", "pp", "dp", *(() if inside else ("tp", "cp")))
    if cluster.nodes > 1 and exposed:
        faster = replace(cluster, nic_bandwidth=2 * cluster.nic_bandwidth)
        title = f"what if the NICs were twice as fast ({faster.text})"
        changed = replace(run, cluster=faster)
        found.append(Candidate(kind=WHAT_IF, title=title, run=changed, saves_s=exposed / 2))
    peaks = {dtype: 1.1 * peak for dtype, peak in cluster.device.peak_flops.items()}
    device = replace(cluster.device, peak_flops=peaks)
    title = f"what if {device.name} had 10 % more FLOP/s"
    changed = replace(run, cluster=replace(cluster, device=device))
    saves = (1 - 1 / 1.1) * (parts.compute + parts.recompute)
    found.append(Candidate(kind=WHAT_IF, title=title, run=changed, saves_s=saves))
    return found


def _factors(result: Result) -> tuple[int, ...]:
    """Returns how far knobs that free memory are turned."""
    return FACTORS[:1] if result.fits else FACTORS


def _valid(run: RunSpec) -> bool:
    numbers = Numbers(
        num_devices=run.cluster.world_size,
        sequence=run.training.sequence,
        target_sequence=run.training.target_sequence,
        global_batch=run.training.global_batch,
        microbatch=run.training.microbatch,
    )
    return run.training.microbatch >= 1 and not check_plan(run.model, run.plan, numbers)


def _exposed(result: Result, *axes: str) -> float:
    return sum(result.time_parts.exposed_communication.get(axis, 0.0) for axis in axes)


def _grows(run: RunSpec, result: Result, *more: str) -> float:
    """Returns the share of memory that doubles when half as many ranks share a model's parts.

    What ZeRO shards over data-parallel ranks does not grow: there are twice as many of these.
    """
    sharded = run.plan.zero or 0
    words = [w for stage, w in ((3, "weight"), (2, "grad"), (1, "optimizer")) if sharded < stage]
    return share(result, *words, *more)


def _left_over(factor: float) -> float:
    """Returns the share that dividing by `factor` frees at most; a tenth is not divided."""
    return 0.9 * (1 - 1 / factor)


def _recompute(run: RunSpec, result: Result) -> list[Candidate]:
    now, parts = run.plan.recompute.mode, result.time_parts
    activations = share(result, "activation")
    found: list[Candidate] = []
    for mode in RECOMPUTE:
        step = RECOMPUTE.index(mode) - RECOMPUTE.index(now) if now in RECOMPUTE else 0
        if not step:
            continue
        saves = parts.recompute + 0.25 * _exposed(result, "tp") if step < 0 else -parts.compute / 3
        found.append(
            Candidate(
                kind="recompute",
                title=f"recompute {now} -> {mode}",
                run=changed_plan(run, recompute=Recompute(mode=mode)),
                changes={"plan.recompute": mode},
                saves_s=saves if abs(step) > 1 or step < 0 else saves / 4,
                frees=activations * (0.9 if mode == "full" else 0.4) if step > 0 else -activations,
            )
        )
    return found


def _microbatch(run: RunSpec, result: Result) -> list[Candidate]:
    parts, size = result.time_parts, run.training.microbatch
    activations = share(result, "activation", "logit", "temporary")
    larger = parts.host + BATCH_EFFICIENCY * parts.compute + _exposed(result, "dp")
    smaller = (parts.bubble + parts.wait) / 2
    found: list[Candidate] = []
    less = [(size // n, smaller, 1 - 1 / n) for n in _factors(result)]
    for other, saves, frees in ((2 * size, larger, -activations), *less):
        training = replace(run.training, microbatch=other)
        found.append(
            Candidate(
                kind="microbatch",
                title=f"microbatch {size} -> {other}",
                run=replace(run, training=training),
                changes={"training.microbatch": other},
                saves_s=saves,
                frees=frees if frees < 0 else frees * activations,
            )
        )
    return found


def _zero(run: RunSpec, result: Result) -> list[Candidate]:
    plan = run.plan
    stages = ZERO_STAGES.get(plan.preset, (0, 1, 2, 3))
    if plan.zero not in stages or (plan.dp or 1) == 1:
        return []
    states = share(result, "weight", "grad", "master", "moment", "optimizer")
    found: list[Candidate] = []
    for step in (-1, *((1,) if result.fits else (1, 2, 3))):
        i = stages.index(plan.zero) + step
        if not 0 <= i < len(stages):
            continue
        saves = _exposed(result, "dp") / 2 if step < 0 else result.time_parts.optimizer / 2
        found.append(
            Candidate(
                kind="zero",
                title=f"zero {plan.zero} -> {stages[i]}",
                run=changed_plan(run, zero=stages[i]),
                changes={"plan.zero": stages[i]},
                saves_s=saves,
                frees=min(step * states / 2, states),
            )
        )
    return found


def _tensor(run: RunSpec, result: Result) -> list[Candidate]:
    plan, parts = run.plan, result.time_parts
    found: list[Candidate] = []
    for tp in (plan.tp // 2, *(n * plan.tp for n in _factors(result))):
        if tp < 1:
            continue
        up = tp > plan.tp
        if up and result.fits and tp > run.cluster.devices_per_node:
            continue  # leaving the node makes every layer wait for the NICs
        title = f"tp {plan.tp} -> {tp}"
        if plan.tp * plan.pp * plan.cp * (plan.dp or 1) != tp * plan.pp * plan.cp:
            title += f" (dp {plan.dp} -> {_dp(run, tp * plan.pp)})"
        changes: dict[str, Any] = {"tp": tp}
        if tp == 1:
            changes["sequence_parallel"] = False
        less = _exposed(result, "dp") + parts.optimizer / 2
        saves = less if up else _exposed(result, "tp") + parts.host / 2 + 0.05 * parts.compute
        found.append(
            Candidate(
                kind="tp",
                title=title,
                run=changed_plan(run, **changes, dp=None),
                changes=_paths(changes, run) | _dp_path(run, tp * plan.pp),
                saves_s=saves,
                frees=_left_over(tp / plan.tp)
                if up
                else -_grows(run, result, "activation", "logit"),
            )
        )
    return found


def _pipeline(run: RunSpec, result: Result) -> list[Candidate]:
    plan, parts = run.plan, result.time_parts
    if plan.stages is not None or isinstance(plan.in_flight, tuple):
        return []
    found: list[Candidate] = []
    for pp in (plan.pp // 2, *(n * plan.pp for n in _factors(result))):
        if pp < 1:
            continue
        up = pp > plan.pp
        changes: dict[str, Any] = {"pp": pp}
        if pp == 1:
            changes |= {"interleave": 1, "schedule": "1f1b", "in_flight": None}
        less = _exposed(result, "dp") + parts.optimizer / 2
        saves = less if up else (parts.bubble + parts.wait) / 2 + _exposed(result, "pp")
        found.append(
            Candidate(
                kind="pp",
                title=f"pp {plan.pp} -> {pp} (dp {plan.dp} -> {_dp(run, plan.tp * pp)})",
                run=changed_plan(run, **changes, dp=None),
                changes=_paths(changes, run) | _dp_path(run, plan.tp * pp),
                saves_s=saves,
                frees=_left_over(pp / plan.pp) * _grows(run, result)
                if up
                else -_grows(run, result),
            )
        )
    return found


def _switches(run: RunSpec, result: Result) -> list[Candidate]:
    plan = run.plan
    found: list[Candidate] = []
    if plan.tp > 1 and not plan.sequence_parallel:
        found.append(
            Candidate(
                kind="sequence_parallel",
                title="sequence parallel on",
                run=changed_plan(run, sequence_parallel=True),
                changes={"plan.sequence_parallel": True},
                saves_s=0.05 * result.time_parts.compute,
                frees=0.4 * share(result, "activation"),
            )
        )
    runtime = _runtime(run)
    for word, axis, text in (
        ("grad", "dp", "gradient reduction"),
        ("param", "dp", "weight gathering"),
        ("tp", "tp", "tp communication"),
        ("p2p", "pp", "pipeline transfers"),
    ):
        if getattr(runtime, f"overlap_{word}") or not _exposed(result, axis):
            continue
        overlap = replace(plan.overlap, **{word: True})
        found.append(
            Candidate(
                kind=f"overlap.{word}",
                title=f"overlap {text} with computation",
                run=changed_plan(run, overlap=overlap),
                changes={f"plan.overlap.{word}": True},
                saves_s=_exposed(result, axis),
            )
        )
    return found


def _runtime(run: RunSpec) -> Runtime:
    """Returns what already overlaps, the defaults of preset and stack included."""
    world, dp = run.cluster.world_size, run.plan.dp or 1
    accumulation = run.training.accumulation(dp)
    tree = build_tree(
        run.plan, run.model, world_size=world, accumulation=accumulation, stack=run.stack
    )
    return tree.runtime


def _interleave(run: RunSpec, result: Result) -> list[Candidate]:
    plan = run.plan
    if plan.pp == 1 or plan.stages is not None:
        return []
    options = divisors(num_layers(run.model) // plan.pp)
    more = [n for n in options if n > plan.interleave]
    if not more:
        return []
    chunks = more[0]
    return [
        Candidate(
            kind="interleave",
            title=f"interleave {plan.interleave} -> {chunks}",
            run=changed_plan(run, interleave=chunks, schedule="interleaved"),
            changes={"plan.interleave": chunks, "plan.schedule": "interleaved"},
            saves_s=result.time_parts.bubble * (1 - plan.interleave / chunks),
            frees=-0.05,
        )
    ]


def gives_dp(run: RunSpec) -> bool:
    """Returns whether the run file says dp, which then has to follow tp and pp."""
    given: object = run.source.get("plan")
    return isinstance(given, Mapping) and "dp" in given


def _dp_path(run: RunSpec, model_parallel: int) -> dict[str, Any]:
    return {"plan.dp": _dp(run, model_parallel)} if gives_dp(run) else {}


def _dp(run: RunSpec, model_parallel: int) -> int:
    return run.cluster.world_size // (model_parallel * run.plan.cp)


def _paths(changes: Mapping[str, Any], run: RunSpec) -> dict[str, Any]:
    """Returns the `--set` paths of changed plan fields, without what did not change."""
    default = Plan()
    return {
        f"plan.{key}": value
        for key, value in changes.items()
        if value != getattr(run.plan, key) and not (value is None and getattr(default, key) is None)
    }
