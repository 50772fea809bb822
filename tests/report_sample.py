"""Hand-made runs and results for the tests of report and analysis: two stages, numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretrain.frontends.spec import ModelSpec
from foretrain.graph.precision import Precision
from foretrain.hardware import parse_cluster
from foretrain.mesh import Mesh
from foretrain.program import (
    Comm,
    CommEvent,
    ComputeEvent,
    Item,
    Program,
    RankClass,
    Run,
    Segment,
)
from foretrain.run.spec import RunSpec, Training
from foretrain.simulator.result import (
    Band,
    ClassResult,
    EventCost,
    MemoryResult,
    Result,
    Slice,
    TimeParts,
)
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan
from foretrain.units import GIB

GEMM = ComputeEvent(
    op="gemm",
    direction="forward",
    dtype="bf16",
    shape=(("b", 1), ("m", 2048), ("n", 4096), ("k", 4096)),
    flops=2.0 * 2048 * 4096 * 4096,
    bytes=67e6,
)
NORM = ComputeEvent(
    op="layernorm",
    direction="forward",
    dtype="bf16",
    shape=(("rows", 2048), ("cols", 4096), ("operands", 2)),
    flops=0.0,
    bytes=33e6,
)
REDUCE = CommEvent(collective="all_reduce", bytes=16e6, dtype="bf16", ranks=(0, 1))
SEND = CommEvent(collective="send_recv", bytes=8e6, dtype="bf16", ranks=(0, 2))


def sample_run(**plan: Any) -> RunSpec:
    """A small decoder on 2 stages x 2 tensor ranks."""
    model = ModelSpec(
        name="gpt-tiny",
        family="gpt",
        layers=4,
        hidden=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        ffn=16384,
        vocab=50304,
        max_positions=2048,
    )
    training = Training(
        sequence=2048, global_batch=8, microbatch=1, precision="bf16", roles=Precision()
    )
    plan_ = Plan(**{"tp": 2, "pp": 2, "dp": 1, "schedule": "1f1b", "zero": 0, **plan})
    return RunSpec(
        model=model,
        training=training,
        plan=plan_,
        cluster=parse_cluster("1x4 a100-sxm-80gb"),
        stack=Stack(name="megatron-te", preset="megatron"),
        assumptions=("microbatch 1",),
    )


def sample_program() -> Program:
    """Two classes: stage 0 runs the layer twice and sends; stage 1 runs it three times."""
    layer = Segment(
        name="layers.forward",
        items=(
            Item(label="layers.norm", event=1),
            Item(
                label="layers.qkv",
                event=0,
                delta={"activations": 1.0 * GIB},
                transient={"workspace": 0.5 * GIB},
            ),
            Item(label="layers.reduce", event=2, stream="tp", category="tp", axes=("tp",)),
        ),
    )
    send = Comm(label="send", event=3, stream="pp", category="pp", after=(0,), key="f0")
    first = RankClass(
        name="stage 0",
        stage=0,
        ranks=(0, 1),
        entries=(Run(segments=(0, 0), slot="F", layer="layers.0"), send),
        persistent={"weights": 4.0 * GIB},
    )
    receive = replace(send, label="receive", after=(), posted=True)
    last = RankClass(
        name="stage 1",
        stage=1,
        ranks=(2, 3),
        entries=(receive, Run(segments=(0, 0, 0), slot="F", layer="layers.2", after=(0,))),
        persistent={"weights": 5.0 * GIB},
    )
    return Program(
        mesh=Mesh(axes=("pp", "tp"), sizes=(2, 2)),
        events=(GEMM, NORM, REDUCE, SEND),
        segments=(layer,),
        classes=(first, last),
        samples_per_step=8,
        notes=("one note",),
    )


def sample_parts(step: float = 0.1) -> TimeParts:
    """Parts that sum to `step` and whose rounded values do not without care."""
    return TimeParts(
        compute=step / 3,
        recompute=step / 9,
        optimizer=step / 9,
        exposed_communication={"tp": step / 9, "cp": 0.0, "ep": 0.0, "pp": step / 27, "dp": 0.0},
        bubble=step * 5 / 27,
        host=step / 27,
        wait=step / 27,
        other=step / 27,
    )


def _class(name: str, stage: int, ranks: tuple[int, ...], peak: float) -> ClassResult:
    return ClassResult(
        name=name,
        stage=stage,
        ranks=ranks,
        busy_s=0.06,
        exposed_s=0.015,
        idle_s=0.025,
        bubble_s=0.0185,
        parts=sample_parts(),
        peak_allocated_bytes=peak * GIB,
        peak_parts_bytes={"weights": (peak - 20.0) * GIB, "activations": 20.0 * GIB},
        moment="first backward",
    )


def sample_memory(used: float = 61.3) -> MemoryResult:
    """The fullest rank sits on stage 0; parts add up to `used` GiB."""
    return MemoryResult(
        capacity_bytes=80.0 * GIB,
        usable_bytes=76.0 * GIB,
        peak_allocated_bytes=(used - 3.0) * GIB,
        peak_reserved_bytes=(used - 1.0) * GIB,
        device_used_bytes=used * GIB,
        worst_rank=1,
        moment="backward of microbatch 0",
        parts_bytes={
            "weights": (used - 23.0) * GIB,
            "activations": 20.0 * GIB,
            "fragmentation": 2.0 * GIB,
            "context": 1.0 * GIB,
        },
    )


def sample_events() -> tuple[EventCost, ...]:
    """Prices of the four events; summed: gemm 15 ms, norm 5 ms, reduce 10 ms, send 2 ms."""

    def cost(event: Any, label: str, count: int, value: float, source: str) -> EventCost:
        return EventCost(
            event=event,
            label=label,
            count=count,
            value_s=value,
            low_s=0.9 * value,
            high_s=1.2 * value,
            provenance=source,
            formula="floor + max(flops / peak, bytes / bandwidth)",
        )

    return (
        cost(GEMM, "gemm 1x2048x4096x4096 bf16", 5, 3e-3, "fitted"),
        cost(NORM, "layernorm 2048x4096 bf16", 5, 1e-3, "spec"),
        cost(REDUCE, "all_reduce 16 MB over 2", 5, 2e-3, "measured"),
        cost(SEND, "send_recv 8 MB", 2, 1e-3, "guess"),
    )


def sample_result(**changes: Any) -> Result:
    """A result of 0.1 s per step on 4 GPUs; any field may be replaced."""
    result = Result(
        step_time_s=Band(value=0.1, low=0.08, high=0.125),
        samples_per_s=80.0,
        tokens_per_s=163840.0,
        tokens_per_s_per_device=40960.0,
        model_flops_per_step=4.992e13,
        model_flops_full_attention=5.2e13,
        hardware_flops_per_step=6.24e13,
        peak_flops_per_device=312e12,
        peak_dtype="bf16",
        mfu=0.4,
        hfu=0.5,
        fits=True,
        bubble_fraction=0.2,
        memory=sample_memory(),
        time_parts=sample_parts(),
        last_class=1,
        classes=(_class("stage 0", 0, (0, 1), 58.3), _class("stage 1", 1, (2, 3), 50.0)),
        events=sample_events(),
        timeline=(
            Slice(
                rank_class=0,
                stream="compute",
                label="layers.0",
                category="compute",
                start_s=0.0,
                finish_s=0.01,
            ),
        ),
        memory_timeline=(((0.0, 4.0 * GIB), (0.01, 5.0 * GIB)), ((0.0, 5.0 * GIB),)),
        program=sample_program(),
        provenance={"measured": 0.3125, "fitted": 0.46875, "spec": 0.15625, "guess": 0.0625},
        assumptions=("links at full rate", "routing balanced"),
        warnings=("the NIC count was guessed",),
        mode="hierarchical",
    )
    return replace(result, **changes)
