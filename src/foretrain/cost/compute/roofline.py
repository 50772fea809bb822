"""The roofline of an operator that has no model of its own: never zero, and counted as such.

    T = kernels t0 + max(F / (P / 2), D / (B e_d))

Half of the peak is what an operator of unknown kind may reach; the interval says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.cost.answer import Answer, width
from foretrain.cost.compute.memory_bound import constants_for, stack_value
from foretrain.cost.machine import Machine
from foretrain.program import ComputeEvent


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns a guess from the FLOP and bytes of each event."""
    found = constants_for(machine)
    answers: list[Answer] = []
    for event in events:
        kernels = max(1.0, stack_value(machine.stack.kernels, event.op, event.direction))
        floor = kernels * found.number("t0_us") * 1e-6
        compute = 2.0 * event.flops / machine.peak(event.dtype)
        memory = event.bytes / (machine.device.memory_bandwidth * found.number("e_d"))
        answers.append(
            Answer(
                value_s=floor + max(compute, memory),
                latency_s=floor,
                factor=width("unknown", "unmodelled"),
                kernels=kernels,
                family="other",
                provenance="guess",
                formula=f"{event.op}: no model, roofline of its FLOP and bytes",
            )
        )
    return answers
