"""Roles of a precision that a run states and that change nothing: said instead of ignored."""

from __future__ import annotations

from collections.abc import Collection

from foretrain.run.stacks import ROLES
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan

#: Optimizers without moments in a dtype of choice, and those with two (compiler/optimizer.py).
NO_MOMENTS = ("none", "sgd", "adam-8bit")
TWO_MOMENTS = ("adam", "adamw", "lamb")


def idle_roles(
    given: Collection[str], plan: Plan, stack: Stack, *, optimizer: str, data: int
) -> list[str]:
    """Returns a warning for each role of `given` that changes neither time nor memory.

    `data` ranks hold the same weights. Where products of weight gradients add to the sum themselves
    no tensor of role `grad` exists, unless a bucket or a reduction after every backward needs one.
    A tree or overrides may lay gradients out in any way, so that `grad` may act. Nothing is said of
    a list of all roles, as the JSON of a run has it.
    """
    if set(ROLES) - {"second_moment"} <= set(given):
        return []
    free = plan.tree is not None or bool(plan.overrides)
    adds = "wgrad_accumulate" in stack.fused and not stack.late_accumulate
    staged = stack.flat_buckets or plan.preset in ("ddp", "deepspeed")
    staged = staged or (stack.ddp_buckets and not plan.zero)
    apart = data > 1 and (staged or (plan.zero or 0) >= 2)
    reasons = {
        "grad": (
            adds and not apart and not free,
            "products of weight gradients add to the sum themselves; grad_accumulate is what is "
            "kept, grad_reduce what is sent",
        ),
        "grad_reduce": (
            data == 1 and plan.tp == 1,
            "one rank holds each weight, gradients are not sent",
        ),
        "moments": (optimizer in NO_MOMENTS, _none_kept("moment", optimizer)),
        "second_moment": (optimizer not in TWO_MOMENTS, _none_kept("second moment", optimizer)),
        "master": (optimizer == "none", "the optimizer is none"),
    }
    return [
        f"training.precision.{role} has no effect: {why}"
        for role, (idle, why) in reasons.items()
        if role in given and idle
    ]


def _none_kept(what: str, optimizer: str) -> str:
    if optimizer == "adam-8bit":
        return "adam-8bit keeps 8 bits per moment"
    return f"optimizer {optimizer} keeps no {what}"
