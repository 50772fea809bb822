"""What simpler models would say of the same run: to see what each part of foretrain is worth.

Three baselines, each with the same graph, plan and cluster (docs/explain/baselines.md):

- *plain*: foretrain without runtime behaviour: nothing slows when computation and communication
  overlap, and transfers that share a link do not.
- *task graph*: as in FlexFlow's simulator: operators cost what they measure alone, a transfer costs
  its bytes over the nominal bandwidth of the slowest link on its way, the host costs nothing. It
  has no micro-batches, no recomputation and no sharded states, and says so.
- *analytical*: one formula. FLOP over what the largest GEMM reaches, ring volumes over nominal
  bandwidths, the bubble of the schedule, gradients after everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.model import CostModel, build_cost_model
from foretrain.cost.prices import Prices
from foretrain.cost.user_calibration import current_calibration
from foretrain.hardware.cluster import Cluster
from foretrain.predict import CATEGORIES, Compiled, compile_run, data_parallel
from foretrain.program import Comm, CommEvent, ComputeEvent, Event, Program
from foretrain.run.spec import RunSpec
from foretrain.simulator.simulate import event_times, simulate

#: Bytes on the busiest link of a ring, as a multiple of CommEvent.bytes, for n ranks.
_RING = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
#: The side of the GEMM whose rate the analytical baseline takes for every FLOP.
_LARGE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Step times in seconds; None where a model cannot express the run, `reason` says why."""

    plain_s: float
    analytical_s: float
    task_graph_s: float | None
    task_graph_reason: str = ""


def baselines(run: RunSpec) -> Baselines:
    """Returns the step times, in seconds, that three simpler models give for a run."""
    compiled = compile_run(run)
    curves = current_calibration().curves
    model = build_cost_model(run.cluster, run.stack, curves=curves)
    prices = model.price(compiled.program.events)
    reason = task_graph_limit(run)
    return Baselines(
        plain_s=_play(compiled, prices),
        analytical_s=analytical_seconds(run, compiled.program, model),
        task_graph_s=None if reason else _task_graph_seconds(run, compiled, prices),
        task_graph_reason=reason,
    )


def task_graph_limit(run: RunSpec) -> str:
    """Returns what of the plan a simulator of plain task graphs cannot express, "" if nothing."""
    plan = run.plan
    asked: Mapping[str, bool] = {
        "micro-batches": run.training.accumulation(data_parallel(run)) > 1,
        "a pipeline": plan.pp > 1,
        "sharded states": bool(plan.zero) or plan.preset == "fsdp",
        "recomputation": plan.recompute.mode != "none",
        "sequence parallelism": bool(plan.sequence_parallel) and plan.tp > 1,
    }
    return ", ".join(name for name, used in asked.items() if used)


def analytical_seconds(run: RunSpec, program: Program, model: CostModel) -> float:
    """Returns the closed form: the busiest stage over its micro-batches, bubble, gradients.

    step = (m + (p - 1) / v) / m (FLOP / rate + blocking bytes / bandwidth) + gradient bytes /
    bandwidth; m micro-batches, p stages of v chunks.
    """
    rate = _gemm_rate(run, model)
    micro = run.training.accumulation(data_parallel(run))
    fill = 1.0
    if run.plan.pp > 1:
        fill += (run.plan.pp - 1) / (run.plan.interleave or 1) / micro
    times: list[float] = []
    for index in range(len(program.classes)):
        flops = blocking = gradients = 0.0
        late = {
            entry.event
            for entry in program.classes[index].entries
            if isinstance(entry, Comm) and entry.category == "dp"
        }
        for event_index, count in program.class_counts(index).items():
            event = program.events[event_index]
            if isinstance(event, ComputeEvent):
                flops += count * event.flops
            elif event_index in late:
                gradients += count * wire_seconds(event, run.cluster)
            else:
                blocking += count * wire_seconds(event, run.cluster)
        times.append(fill * (flops / rate + blocking) + gradients)
    return max(times)


def wire_seconds(event: CommEvent, cluster: Cluster) -> float:
    """Returns the bytes of a ring over the nominal bandwidth of its slowest link, in seconds."""
    layout = cluster.layout(event.ranks)
    n = layout.num_ranks
    if n < 2:
        return 0.0
    share = _RING[event.collective] * (n - 1) / n if event.collective in _RING else 1.0
    if layout.inside_scaleup_domain:
        bandwidth = cluster.scaleup_bandwidth
    elif layout.inside_node:
        bandwidth = cluster.device.pcie_bandwidth
    else:
        bandwidth = cluster.node_bandwidth
    return event.count * share * event.bytes / bandwidth


def _gemm_rate(run: RunSpec, model: CostModel) -> float:
    """Returns the FLOP/s of a large square GEMM in the compute dtype of the run."""
    size = float(_LARGE)
    event = ComputeEvent(
        op="gemm",
        direction="forward",
        dtype=run.training.roles.compute,
        shape=(("b", 1.0), ("m", size), ("n", size), ("k", size)),
        flops=2.0 * size**3,
        bytes=6.0 * size**2,
    )
    return event.flops / float(model.price([event]).value_s[0])


def _task_graph_seconds(run: RunSpec, compiled: Compiled, prices: Prices) -> float:
    value = np.array(
        [
            wire_seconds(event, run.cluster) if isinstance(event, CommEvent) else alone
            for event, alone in zip(compiled.program.events, prices.value_s, strict=True)
        ]
    )
    nothing = np.zeros_like(value)
    latency = np.where(_is_compute(compiled.program.events), prices.latency_s, nothing)
    return _play(compiled, replace(prices, value_s=value, latency_s=latency, host_s=nothing))


def _is_compute(events: Iterable[Event]) -> NDArray[np.bool_]:
    return np.array([isinstance(event, ComputeEvent) for event in events])


def _play(compiled: Compiled, prices: Prices) -> float:
    free = dict.fromkeys(CATEGORIES, (0.0, 0.0))
    return simulate(compiled.program, event_times(prices, free, plain=True)).step_s
