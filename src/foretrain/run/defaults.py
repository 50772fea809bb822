"""Defaults of a run: what each preset's framework does when nothing is said, one line for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from foretrain.errors import Problem
from foretrain.frontends.spec import ConvSpec, Model, ModelSpec, RecSpec
from foretrain.graph.precision import LOW, Precision
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan, Recompute

#: ZeRO stage of a preset that is given no stage (Megatron without its distributed optimizer,
#: FSDP's full shard, DeepSpeed's stage 1, replicas).
ZERO: Mapping[str, int] = {
    "megatron": 0, "fsdp": 3, "deepspeed": 1, "ddp": 0, "dlrm": 0, "plain": 0,
}  # fmt: skip

OPTIMIZER = "adamw"
CONV_OPTIMIZER = "sgd-momentum"
REC_OPTIMIZER = "sgd"

#: Presets whose framework pads the vocabulary, to a multiple of this times tp
#: (Megatron-LM, --make-vocab-size-divisible-by).
PADDING_PRESETS = ("megatron", "deepspeed")
VOCAB_MULTIPLE = 128


def usual_optimizer(model: Model | None) -> str:
    """Returns the optimizer that a kind of model is usually trained with."""
    if isinstance(model, ConvSpec):
        return CONV_OPTIMIZER
    return REC_OPTIMIZER if isinstance(model, RecSpec) else OPTIMIZER


def settle_plan(plan: Plan, given: set[str]) -> tuple[Plan, list[str]]:
    """Returns the plan with its preset's defaults, and a line for each default taken."""
    lines: list[str] = []
    preset = f"default of preset {plan.preset}"
    if plan.zero is None:
        plan = replace(plan, zero=ZERO[plan.preset])
        lines.append(f"zero = {plan.zero} ({preset})")
    if plan.sequence_parallel is None:
        plan = replace(plan, sequence_parallel=False)
        if plan.tp > 1:
            lines.append(f"sequence_parallel = false ({preset})")
    if plan.schedule is None:
        word = "interleaved" if plan.interleave > 1 else "1f1b"
        plan = replace(plan, schedule=word)
        if plan.pp > 1:
            why = f"interleave {plan.interleave}" if plan.interleave > 1 else preset
            lines.append(f"schedule = {word} ({why})")
    if "recompute" not in given:
        lines.append("recompute = none (not given)")
    return plan, lines


def drop_foreign_settings(spec: Model, plan: Plan) -> tuple[Plan, list[Problem]]:
    """Returns the plan without what belongs to layers of tokens, and a problem for each of them.

    A convolutional network or a recommender has neither a sequence nor stages of equal layers.
    """
    if isinstance(spec, ModelSpec):
        return plan, []
    given: dict[str, object] = {
        "sequence_parallel": plan.sequence_parallel or None,
        "interleave": plan.interleave if plan.interleave > 1 else None,
        "in_flight": plan.in_flight,
        "stages": None if plan.stages is None else list(plan.stages),
    }
    problems = [
        Problem(
            what=f"{spec.name} has no sequence and no stages of layers",
            where=f"plan.{key}",
            value=value,
            way_out=f"leave {key} out",
        )
        for key, value in given.items()
        if value is not None
    ]
    plain = replace(plan, sequence_parallel=None, interleave=1, in_flight=None, stages=None)
    return (plain if problems else plan), problems


def drop_idle_settings(plan: Plan, given: set[str]) -> tuple[Plan, list[str]]:
    """Returns the plan without settings that cannot act, and a warning for each of them."""
    warnings: list[str] = []

    def idle(key: str, why: str) -> None:
        warnings.append(f"plan.{key} has no effect: {why}")

    if plan.pp == 1:
        plan = _without_pipeline(plan, given, idle)
    if plan.in_flight is not None and plan.schedule == "gpipe":
        plan = replace(plan, in_flight=None)
        idle("in_flight", "gpipe runs all forwards first")
    if plan.sequence_parallel and plan.tp == 1:
        plan = replace(plan, sequence_parallel=False)
        idle("sequence_parallel", "tp is 1")
    if plan.shard is not None and (plan.zero or ZERO[plan.preset]) == 0:
        plan = replace(plan, shard=None)
        idle("shard", "zero is 0")
    if plan.recompute.mode == "none" and plan.recompute.layers is not None:
        plan = replace(plan, recompute=Recompute())
        idle("recompute.layers", "the mode is none")
    zero = ZERO[plan.preset] if plan.zero is None else plan.zero
    if plan.no_sync and zero < 2:
        plan = replace(plan, no_sync=None)
        idle("no_sync", f"with zero {zero} gradients are reduced once per step anyway")
    if plan.offload == "none" and "optimizer_offload_fraction" in given:
        idle("optimizer_offload_fraction", "offload is none")
    sharded = plan.preset == "fsdp" or plan.zero == 3
    for key in ("reshard", "prefetch"):
        if key in given and not sharded:
            idle(key, "the plan gathers no weights")
    return plan, warnings


def _without_pipeline(plan: Plan, given: set[str], idle: Callable[[str, str], None]) -> Plan:
    """The plan of one stage, without what orders several."""
    if plan.interleave > 1:
        idle("interleave", "pp is 1")
    if plan.in_flight is not None:
        idle("in_flight", "pp is 1")
    if plan.schedule is not None and "schedule" in given:
        idle("schedule", "pp is 1")
    schedule = None if plan.schedule is None else "1f1b"
    return replace(plan, interleave=1, in_flight=None, schedule=schedule)


def pad_vocabulary(spec: Model, plan: Plan) -> tuple[Model, list[str]]:
    """Returns the model as the preset's framework builds it, with a line when rows were added."""
    if not isinstance(spec, ModelSpec):
        return spec, []
    own = spec.vocab_unpadded or spec.vocab
    unit = VOCAB_MULTIPLE * plan.tp
    padded = -(-own // unit) * unit
    if plan.preset not in PADDING_PRESETS or padded == own:
        return replace(spec, vocab=own), []
    line = (
        f"vocabulary padded from {own} to {padded} (a multiple of {VOCAB_MULTIPLE} x tp "
        f"{plan.tp}, as preset {plan.preset} does)"
    )
    return replace(spec, vocab=padded, vocab_unpadded=own), [line]


def stack_lines(
    spec: Model, stack: Stack, precision: Precision, given: Collection[str]
) -> list[str]:
    """Returns what a stack decides that costs much and is easily overlooked.

    `given`: roles whose dtype the run states.
    """
    lines: list[str] = []
    if isinstance(spec, ModelSpec) and stack.attention == "unfused":
        lines.append(
            f"attention in separate kernels, scores written to memory, as stack {stack.name} does"
        )
    if precision.weight in LOW and "weight" not in given:
        lines.append(f"weights kept in {precision.weight} (stack {stack.name})")
    return lines


def plan_warnings(
    spec: Model, plan: Plan, stack: Stack, *, sequence: int, microbatches: int
) -> list[str]:
    """Returns what is valid but rarely wanted, or has no effect."""
    warnings: list[str] = []
    if not isinstance(spec, ModelSpec):
        return warnings
    repeats_core = plan.recompute.mode == "selective" and stack.selective == "core"
    if repeats_core and stack.attention == "fused":
        warnings.append(
            "recompute selective has no effect: it repeats the attention core, and the fused "
            f"attention of stack {stack.name} saves nothing that could be repeated"
        )
    if plan.tp > 1 and not plan.sequence_parallel:
        warnings.append(
            "sequence_parallel is off: norms and dropout are repeated on all "
            f"{plan.tp} tensor-parallel ranks; turning it on saves activation memory"
        )
    if plan.pp > 1 and microbatches < plan.pp:
        warnings.append(
            f"{microbatches} micro-batches do not fill {plan.pp} pipeline stages: some are always "
            "idle"
        )
    limit = spec.max_positions
    if limit is not None and sequence > limit and spec.positions != "learned":
        warnings.append(
            f"sequence {sequence} is beyond the {limit} positions that {spec.name} was made for"
        )
    return warnings
