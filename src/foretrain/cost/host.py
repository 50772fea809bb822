"""The time of the host to launch an event: operators, kernels, collectives.

    host = launches host_launch_us + host_op_us       (collectives: count (host_comm_us + checks))

Checks (`checked_collectives`: TORCH_DISTRIBUTED_DEBUG=DETAIL) keep the host until all ranks of a
group have met: a time per rank, step.toml.

host_op_us is the stack's value for the operator (`host_op_us_by`), else for all. Backward operators
take `host_backward` times as long: autograd launches them without the Python code of modules.
Servers of a generation of devices have processors of their time: `host_on` says how much longer
their operators take than those of the stack's own constants.

A replayed CUDA graph is one launch for many kernels: the cost of an event falls to the share
below. Constants are the stack's. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretrain.cost.calibration import load
from foretrain.program import CommEvent, ComputeEvent, Event
from foretrain.stack import Stack
from foretrain.units import US

#: Host time of a kernel in a replayed graph: 10 us per graph over a few dozen kernels (a guess).
GRAPH_KERNEL_US = 0.3


def host_seconds(
    event: Event, kernels: float, stack: Stack, devices_per_node: int | None = None
) -> float:
    """Returns the host time to launch `event`, which takes `kernels` launches.

    All ranks count as one node's where `devices_per_node` is not given.
    """
    if kernels <= 0.0:
        return 0.0
    if isinstance(event, CommEvent):
        checks = 0.0
        if stack.checked_collectives and event.collective != "send_recv":
            checks = _check_us(event.ranks, devices_per_node or max(event.ranks) + 1)
        return kernels * (stack.host_comm_us + checks) * US
    if stack.cuda_graphs and event.direction != "optimizer":
        return kernels * GRAPH_KERNEL_US * US
    share = 1.0 if event.direction in ("forward", "optimizer") else stack.host_backward
    return share * (kernels * stack.host_launch_us + _op_us(event, stack)) * US


def on_hosts(stack: Stack, generation: str) -> Stack:
    """Returns the stack with the host times of the servers that devices of a generation are in."""
    pace = stack.host_on.get(generation, 1.0)
    by_operator = {op: pace * value for op, value in stack.host_op_us_by.items()}
    return replace(stack, host_op_us=pace * stack.host_op_us, host_op_us_by=by_operator)


def _check_us(ranks: Sequence[int], devices_per_node: int) -> float:
    """The first rank of a group hears and answers the others one by one, over sockets."""
    step = load("step")
    near = sum(rank // devices_per_node == ranks[0] // devices_per_node for rank in ranks) - 1
    far = len(ranks) - 1 - near
    apart = near * float(step["check_near_us"]) + far * float(step["check_far_us"])
    return float(step["check_base_us"]) + apart


def _op_us(event: ComputeEvent, stack: Stack) -> float:
    if event.op == "weight_parts":
        return event.get("copies") * stack.zero_gather_us
    if event.direction != "forward" and f"{event.op}_backward" in stack.host_op_us_by:
        return stack.host_op_us_by[f"{event.op}_backward"]
    return stack.host_op_us_by.get(event.op, stack.host_op_us)
