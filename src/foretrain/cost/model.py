"""The cost model: prices of events on one cluster with one software stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foretrain.cost import offload
from foretrain.cost.answer import Answer
from foretrain.cost.calibration import load
from foretrain.cost.compute import (
    attention,
    convolution,
    embedding_bag,
    gemm,
    memory_bound,
    moe,
    optimizer,
    roofline,
)
from foretrain.cost.host import host_seconds, on_hosts
from foretrain.cost.machine import Machine
from foretrain.cost.network import collectives
from foretrain.cost.network.collectives import GroupCost
from foretrain.cost.network.measured import MeasuredCurve
from foretrain.cost.overlap import overlap
from foretrain.cost.prices import Prices
from foretrain.cost.straggler import straggler_factor
from foretrain.hardware.cluster import Cluster
from foretrain.program import CommEvent, ComputeEvent, Event
from foretrain.stack import Stack
from foretrain.units import US, format_bytes

Provider = Callable[[Sequence[ComputeEvent], Machine], list[Answer]]

#: The provider of an operator by the name of its cost model; anything else is a roofline guess.
PROVIDERS: dict[str, Provider] = {
    "gemm": gemm.price,
    "attention": attention.price,
    "conv2d": convolution.price,
    "embedding_bag": embedding_bag.price,
    "moe_gemm": moe.price,
    **dict.fromkeys(sorted(memory_bound.OPS), memory_bound.price),
    **dict.fromkeys(sorted(optimizer.OPS), optimizer.price),
}


class CostModel:
    """Prices events; what has been priced once is remembered."""

    def __init__(
        self,
        cluster: Cluster,
        stack: Stack,
        *,
        warm: bool = True,
        curves: Sequence[MeasuredCurve] = (),
    ) -> None:
        self.cluster = cluster
        self.curves = tuple(curves)
        self.stack = on_hosts(stack, cluster.device.generation)
        self._machine = Machine(device=cluster.device, stack=stack, warm=warm)
        self._known: dict[Event, Answer] = {}
        self._groups: dict[tuple[str, tuple[int, ...], int], GroupCost] = {}

    def price(self, events: Sequence[Event]) -> Prices:
        """Returns the prices of `events`, one entry each, in seconds."""
        self._learn(events)
        answers = [self._known[event] for event in events]
        value = _array([a.value_s for a in answers])
        factor = _array([a.factor for a in answers])
        host = [
            host_seconds(event, answer.kernels, self.stack, self.cluster.devices_per_node)
            for event, answer in zip(events, answers, strict=True)
        ]
        return Prices(
            value_s=value,
            latency_s=_array([a.latency_s for a in answers]),
            low_s=value / factor,
            high_s=value * factor,
            host_s=_array(host),
            kernels=_array([a.kernels for a in answers]),
            link=tuple(a.link for a in answers),
            family=tuple(a.family for a in answers),
            provenance=tuple(a.provenance for a in answers),
            formula=tuple(a.formula for a in answers),
            travel_s=_array([a.travel_s for a in answers]),
            out_s=_array([a.out_s for a in answers]),
            in_s=_array([a.in_s for a in answers]),
            synced=self.stack.sync_blocks,
            blocking=self.stack.launch_blocking,
        )

    def overlap(self, category: str) -> tuple[float, float]:
        """Returns (gamma_compute, gamma_comm) for transfers of a category (tp, dp, pp, ...)."""
        return overlap(category, self.cluster)

    @property
    def run_band(self) -> float:
        """Returns the factor (x/) that whole runs add to the 90 % interval of a step."""
        return float(load("step")["band"])

    def unmodelled(self, events: Sequence[Event]) -> tuple[int, ...]:
        """Returns the indices of the events that no model covers (priced as a roofline guess)."""
        return tuple(
            i
            for i, event in enumerate(events)
            if isinstance(event, ComputeEvent) and provider(event.op) is roofline.price
        )

    def calibrated(self, events: Sequence[Event]) -> list[str]:
        """Returns one line per measured curve in use: its source, and sizes beyond it."""
        used: dict[str, list[float]] = {}
        for event in events:
            if isinstance(event, CommEvent):
                curve = collectives.measured_curve(event, self.cluster, self.curves)
                if curve is not None:
                    beyond = used.setdefault(f"{event.collective} x{curve.ranks}: {curve.text}", [])
                    beyond += [] if curve.covers(event.bytes) else [event.bytes]
        return [
            f"{text}; extrapolated to {', '.join(map(format_bytes, sorted(set(beyond))))}"
            if beyond
            else text
            for text, beyond in used.items()
        ]

    def _learn(self, events: Sequence[Event]) -> None:
        groups: dict[Provider, list[ComputeEvent]] = {}
        for event in dict.fromkeys(events):
            if event in self._known:
                continue
            if isinstance(event, CommEvent):
                if event.collective in offload.COLLECTIVES:
                    self._known[event] = offload.price(event, self.cluster)
                else:
                    answer = collectives.price(event, self.cluster, self._group_cost(event))
                    self._known[event] = _waited_for(answer, event, self.stack)
            else:
                groups.setdefault(provider(event.op), []).append(event)
        for provide, group in groups.items():
            answers = provide(group, self._machine)
            if self._machine.warm:
                slowest = straggler_factor(self.cluster.world_size)
                factor = float(load("step")["compute"]) * (slowest * self.stack.kernel_factor)
                answers = [_in_step(answer, factor) for answer in answers]
            self._known.update(zip(group, answers, strict=True))

    def _group_cost(self, event: CommEvent) -> GroupCost:
        """Events of one group differ in their bytes only."""
        key = (event.collective, event.ranks, event.sharers)
        if key not in self._groups:
            self._groups[key] = collectives.group_cost(
                event.collective,
                event.ranks,
                self.cluster,
                sharers=event.sharers,
                curves=self.curves,
            )
        return self._groups[key]


def build_cost_model(
    cluster: Cluster, stack: Stack, *, warm: bool = True, curves: Sequence[MeasuredCurve] = ()
) -> CostModel:
    """Returns the cost model of `cluster` with the kernels and host costs of `stack`.

    `warm` prices operators as they run within a step: with operands that are partly resident in
    L2, and a few per cent slower than alone (step.toml). Switch it off to compare with tables of
    isolated operators, which are measured with cold caches. `curves` were measured on such a
    cluster and win over the model.
    """
    return CostModel(cluster, stack, warm=warm, curves=curves)


def provider(op: str) -> Provider:
    """Returns the function that prices an operator."""
    if op.startswith("ce_"):
        return memory_bound.price
    return PROVIDERS.get(op, roofline.price)


def _in_step(answer: Answer, factor: float) -> Answer:
    """Returns the time within a step, on the slowest device, of an operator priced alone.

    Written out: `replace` takes longer than all else of the price of one operator in a table.
    """
    return Answer(
        value_s=answer.latency_s + factor * (answer.value_s - answer.latency_s),
        latency_s=answer.latency_s,
        factor=answer.factor,
        kernels=answer.kernels,
        family=answer.family,
        provenance=answer.provenance,
        formula=f"{answer.formula}; x {factor:.4g} in a step",
        link=answer.link,
        travel_s=answer.travel_s,
    )


def _waited_for(answer: Answer, event: CommEvent, stack: Stack) -> Answer:
    """Returns the time of a collective with the wait for the last of its ranks to get there.

    A rank that runs behind its host does not feel when exactly the host launched; one that begins
    every block or every kernel from idle does. Their delays are taken as exponential with the mean
    `rank_skew_us`: of n ranks the last is sum(1/i) of them late, i = 1 ... n, the average one 1.
    """
    waits = stack.sync_blocks or stack.launch_blocking
    if not waits or event.collective == "send_recv":
        return answer
    wait = stack.rank_skew_us * US * sum(1.0 / i for i in range(2, len(event.ranks) + 1))
    return replace(
        answer,
        value_s=answer.value_s + wait,
        latency_s=answer.latency_s + wait,
        formula=f"{answer.formula}; {wait / US:.4g} us for the last rank",
    )


def _array(values: Sequence[float]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)
