"""Small programs with made-up prices, and ways to read what a program does.

Tests of the compiler and the simulator need no device and no cost model: a price is any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from foretrain.compiler.lower import Job, compile_program
from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.transformer import build_graph
from foretrain.graph.ir import Graph
from foretrain.graph.precision import Precision
from foretrain.program import Comm, CommEvent, ComputeEvent, Event, Item, Program, Run, Segment
from foretrain.simulator.segment_play import EventTimes
from foretrain.simulator.simulate import Simulated, simulate
from foretrain.stack import Stack
from foretrain.strategy.checks import ZERO_STAGES
from foretrain.strategy.plan import Overlap, Plan, Recompute
from foretrain.strategy.presets import build_tree
from foretrain.strategy.tree import StrategyTree
from foretrain.units import dtype_bytes

MEGATRON = Precision(grad_reduce="fp32", grad_accumulate="fp32")
#: bf16 compute over fp32 shards: what FSDP's mixed precision keeps.
FSDP_MIXED = Precision(weight="fp32", grad_accumulate="fp32", master=None)
#: One copy of the logits in the compute dtype; frameworks that keep more are tested by name.
STACK = Stack(name="made-up", preset="megatron", fused=("qkv", "gate_up"), logits_dtype="bf16")
OPEN = replace(STACK, attention="unfused", fused=())


def llama(**sizes: Any) -> ModelSpec:
    """A small gated model with rotary positions and grouped KV heads; untied, without biases."""
    usual = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 160}
    return resolve_model({"family": "llama", **usual, **sizes})


def gpt(**sizes: Any) -> ModelSpec:
    """A small model with biases, learned positions, dropout and tied embeddings."""
    usual = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 160, "max_positions": 64}
    return resolve_model({"family": "gpt", **usual, **sizes})


def t5(**sizes: Any) -> ModelSpec:
    """A small encoder of 2 layers with a decoder of 4; no biases, tied, relative positions."""
    usual = {"layers": 2, "decoder_layers": 4, "hidden": 64, "heads": 8, "head_dim": 16}
    usual |= {"ffn": 96, "vocab": 160, "buckets": 8}
    return resolve_model({"family": "t5", **usual, **sizes})


@dataclass(frozen=True, kw_only=True)
class Small:
    """What a small run compiles to."""

    graph: Graph
    tree: StrategyTree
    program: Program
    microbatch: int
    accumulation: int


def compile_small(
    spec: ModelSpec,
    plan: Plan,
    world: int,
    *,
    accumulation: int = 4,
    microbatch: int = 2,
    sequence: int = 32,
    target: int | None = None,
    stack: Stack = STACK,
    precision: Precision = MEGATRON,
    optimizer: str = "adamw",
    devices_per_node: int = 8,
    fp8_layouts: int = 1,
) -> Small:
    """Graph, tree and program of a plan on `world` ranks."""
    dp = world // (plan.tp * plan.pp * plan.cp)
    graph = build_graph(
        spec,
        batch=microbatch * dp,
        sequence=sequence,
        target_sequence=target,
        attention=stack.attention,
    )
    tree = build_tree(plan, spec, world_size=world, accumulation=accumulation, stack=stack)
    job = Job(
        precision=precision,
        optimizer=optimizer,
        stack=stack,
        devices_per_node=devices_per_node,
        samples_per_step=accumulation * dp * microbatch,
        fp8_layouts=fp8_layouts,
    )
    return Small(
        graph=graph,
        tree=tree,
        program=compile_program(graph, tree, job),
        microbatch=microbatch,
        accumulation=accumulation,
    )


# -- prices --------------------------------------------------------------------------------------


def priced(
    program: Program,
    price: Callable[[Event], float],
    *,
    latency: Callable[[Event], float] = lambda event: 0.0,
    host_s: float = 0.0,
    link: Callable[[Event], str] = lambda event: "",
    overlap: Mapping[str, tuple[float, float]] | None = None,
    fluid: bool = False,
) -> EventTimes:
    """Times that a function of the event decides."""
    return EventTimes(
        value=[price(event) for event in program.events],
        latency=[latency(event) for event in program.events],
        host=[host_s] * len(program.events),
        link=tuple(link(event) for event in program.events),
        overlap=overlap or {},
        fluid=fluid,
    )


def flat_times(
    program: Program,
    *,
    comm: float = 1.0,
    host_s: float = 0.0,
    plain: bool = True,
    press: float = 0.0,
    slowed: float = 0.0,
    shared: bool = False,
) -> EventTimes:
    """Times at flat rates: 100 TFLOP/s, 1 TB/s and `comm` x (10 us + bytes / 100 GB/s).

    `shared` puts transfers between stages and groups of more than two ranks on the NIC; `press`
    and `slowed` are the overlap factors of collectives (transfers between stages press on nothing:
    cost/overlap.py).
    """

    def price(event: Event) -> float:
        if isinstance(event, ComputeEvent):
            return event.flops * 1e-14 + event.bytes * 1e-12
        return comm * (1e-5 + event.bytes * 1e-11) * event.count

    def latency(event: Event) -> float:
        return 0.0 if isinstance(event, ComputeEvent) else comm * 1e-5

    def link(event: Event) -> str:
        if not shared or isinstance(event, ComputeEvent):
            return ""
        return "nic" if len(event.ranks) > 2 or event.collective == "send_recv" else ""

    kinds = ("tp", "cp", "ep", "dp")
    return priced(
        program,
        price,
        latency=latency,
        host_s=host_s,
        link=link,
        overlap=dict.fromkeys(kinds, (press, slowed)),
        fluid=not plain,
    )


def layer_times(program: Program, forward: float, backward: float) -> EventTimes:
    """Times where only the attention kernel of a layer costs something."""

    def price(event: Event) -> float:
        if isinstance(event, ComputeEvent) and event.op == "attention":
            return forward if event.direction == "forward" else backward
        return 0.0

    return priced(program, price)


def step_seconds(program: Program, times: EventTimes, *, flat: bool = False) -> float:
    """The simulated step."""
    return simulate(program, times, flat=flat).step_s


def last_parts(simulated: Simulated) -> dict[str, float]:
    """Every time part of the class that finishes last, by name."""
    parts = simulated.classes[simulated.last_class].parts
    names = ("compute", "recompute", "optimizer", "bubble", "host", "wait", "other")
    return {**{name: getattr(parts, name) for name in names}, **parts.exposed_communication}


# -- reading a program ---------------------------------------------------------------------------

Collective = tuple[str, tuple[str, ...], float]  # kind, axes, elements


def collective(program: Program, entry: Item | Comm) -> Collective:
    """Kind, axes and elements of a communication (all its buckets together)."""
    event = program.events[entry.event]
    assert isinstance(event, CommEvent)
    elements = event.bytes * event.count / dtype_bytes(event.dtype)
    return (event.collective, entry.axes, elements)


def segment(program: Program, name: str) -> Segment:
    """The first segment called `name`, e.g. "layers.0 forward"."""
    return next(s for s in program.segments if s.name == name)


def collectives_of(program: Program, name: str) -> list[Collective]:
    """The communication of one segment in launch order."""
    return [
        collective(program, item)
        for item in segment(program, name).items
        if item.stream != "compute"
    ]


def labels_of(program: Program, name: str) -> list[str]:
    """The labels of the communication of one segment."""
    return [item.label for item in segment(program, name).items if item.stream != "compute"]


def step_collectives(program: Program, stage: int = 0) -> Counter[Collective]:
    """The asynchronous collectives of one rank of a stage; the gradient norm left out."""
    return Counter(
        collective(program, entry)
        for entry in program.classes[stage].entries
        if isinstance(entry, Comm) and entry.key is None
    )


def wire_bytes(program: Program, stage: int = 0, axes: tuple[str, ...] | None = None) -> float:
    """Bytes that one rank of a stage sends in the asynchronous collectives of one step."""
    total = 0.0
    for entry in program.classes[stage].entries:
        if not isinstance(entry, Comm) or entry.key is not None:
            continue
        if axes is not None and not set(entry.axes) <= set(axes):
            continue
        event = program.events[entry.event]
        assert isinstance(event, CommEvent)
        n = program.mesh.size(entry.axes)
        factor = 2 if event.collective == "all_reduce" else 1
        total += factor * (n - 1) / n * event.bytes * event.count
    return total


def launched(program: Program, stage: int) -> Iterator[tuple[Item, Event]]:
    """Every item that one rank of a stage launches in a step, with its event."""
    for entry in program.classes[stage].entries:
        if isinstance(entry, Run):
            for index in entry.segments:
                for item in program.segments[index].items:
                    yield item, program.events[item.event]


# -- random runs ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RandomRun:
    """A valid small run; `compile` compiles it."""

    spec: ModelSpec
    plan: Plan
    world: int
    accumulation: int
    microbatch: int
    sequence: int
    stack: Stack

    def compile(self, **changes: Any) -> Small:
        run = replace(self, **changes)
        return compile_small(
            run.spec,
            run.plan,
            run.world,
            accumulation=run.accumulation,
            microbatch=run.microbatch,
            sequence=run.sequence,
            stack=run.stack,
            devices_per_node=4,
        )


@st.composite
def random_runs(draw: st.DrawFn, *, max_world: int = 32, max_layers: int = 8) -> RandomRun:
    """Llama or GPT of a few layers on up to `max_world` ranks, cp = 1, any way to cut it."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    pp = draw(st.sampled_from([p for p in (1, 2, 3, 4) if tp * p <= max_world]))
    dp = draw(st.sampled_from([d for d in (1, 2, 4, 8) if tp * pp * d <= max_world]))
    interleave = draw(st.sampled_from([1, 1, 2] if 2 * pp <= max_layers and pp > 1 else [1]))
    groups = pp if interleave > 1 else 1
    accumulation = groups * draw(st.integers(1, 4 if groups == 1 else 2))
    preset = draw(st.sampled_from(["megatron", "fsdp", "deepspeed", "ddp"]))
    zero = draw(st.sampled_from(ZERO_STAGES[preset]))
    if preset == "deepspeed" and pp > 1:
        zero = min(zero, 1)
    schedule = "interleaved" if interleave > 1 else draw(st.sampled_from(["1f1b", "gpipe"]))
    mode = draw(st.sampled_from(["none", "none", "selective", "full"]))
    plan = Plan(
        preset=preset,
        tp=tp,
        pp=pp,
        zero=zero,
        shard=draw(st.sampled_from([s for s in (1, 2, 4, 8) if dp % s == 0])) if zero else None,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        interleave=interleave,
        schedule=schedule,
        recompute=Recompute(mode=mode, layers=draw(st.sampled_from([None, None, 1]))),
        reshard=draw(st.booleans()),
        bucket_mib=draw(st.sampled_from([None, 0.01, 0.1])),
        prefetch=draw(st.integers(0, 2)),
        overlap=Overlap(
            grad=draw(st.sampled_from([None, True, False])),
            param=draw(st.sampled_from([None, True, False])),
            tp=draw(st.sampled_from([None, True])),
            p2p=draw(st.sampled_from([None, True])),
        ),
    )
    heads = draw(st.sampled_from([h for h in (4, 8) if h % tp == 0]))
    kv_heads = draw(
        st.sampled_from(
            [k for k in (1, 2, 4, 8) if heads % k == 0 and (k % tp == 0 or tp % k == 0)]
        )
    )
    per_chunk = draw(st.integers(1, max(1, max_layers // (pp * interleave))))
    sizes = {
        "layers": pp * interleave * per_chunk,
        "hidden": 8 * heads,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": draw(st.sampled_from([64, 96])),
        "vocab": 80,
        "tied": draw(st.booleans()),
    }
    if draw(st.booleans()):
        spec = llama(**sizes)
    else:  # where a table of positions lies under sequence parallelism: tests/unit/test_memory.py
        spec = gpt(**sizes, positions="rotary" if plan.sequence_parallel else "learned")
    stack = replace(
        STACK,
        attention=draw(st.sampled_from(["fused", "unfused"])),
        fused=draw(st.sampled_from([(), ("qkv", "gate_up"), ("qkv", "wgrad_accumulate")])),
        p2p_sync=draw(st.booleans()),
        grad_norm=draw(st.booleans()),
        scatter_gather=draw(st.booleans()),
    )
    return RandomRun(
        spec=spec,
        plan=plan,
        world=tp * pp * dp,
        accumulation=accumulation,
        microbatch=draw(st.integers(1, 2)),
        sequence=draw(st.sampled_from([8, 16])),
        stack=stack,
    )
