"""When gradients are reduced: what a plan may ask of the framework of its preset."""

from __future__ import annotations

from foretrain.errors import Problem
from foretrain.strategy.plan import Plan


def check_no_sync(plan: Plan, microbatches: int) -> list[Problem]:
    """Returns what is wrong with when gradients are reduced.

    DeepSpeed refuses sums of whole gradients where it partitions them; replicated gradients are
    reduced once per step.
    """
    sharded = (plan.zero or 0) >= 2
    if plan.no_sync is False and not sharded and microbatches > 1 and plan.tree is None:
        return [
            Problem(
                what="a reduction of replicated gradients after every micro-batch is not modelled",
                where="plan.no_sync",
                value=False,
                allowed="true",
                way_out="leave no_sync out, or shard gradients (zero 2 or 3)",
            )
        ]
    if not plan.no_sync or plan.preset != "deepspeed" or not sharded:
        return []
    what = f"DeepSpeed refuses no_sync with ZeRO stage {plan.zero}: its gradients are partitioned"
    return [
        Problem(
            what=what,
            where="plan.no_sync",
            value=True,
            allowed="false",
            way_out="use zero 1, or preset fsdp",
        )
    ]
