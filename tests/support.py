"""Small programs with made-up prices, and ways to read what a program does.

Tests of the compiler and the simulator need no device and no cost model: a price is any number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
from foretrain.strategy.plan import Plan
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
    stack: Stack = STACK,
    precision: Precision = MEGATRON,
    optimizer: str = "adamw",
    devices_per_node: int = 8,
) -> Small:
    """Graph, tree and program of a plan on `world` ranks."""
    dp = world // (plan.tp * plan.pp * plan.cp)
    graph = build_graph(spec, batch=microbatch * dp, sequence=sequence, attention=stack.attention)
    tree = build_tree(plan, spec, world_size=world, accumulation=accumulation, stack=stack)
    job = Job(
        precision=precision,
        optimizer=optimizer,
        stack=stack,
        devices_per_node=devices_per_node,
        samples_per_step=accumulation * dp * microbatch,
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

    `shared` puts groups of more than two ranks on the NIC; `press` and `slowed` are the overlap
    factors of every kind of communication.
    """

    def price(event: Event) -> float:
        if isinstance(event, ComputeEvent):
            return event.flops * 1e-14 + event.bytes * 1e-12
        return comm * (1e-5 + event.bytes * 1e-11) * event.count

    def latency(event: Event) -> float:
        return 0.0 if isinstance(event, ComputeEvent) else comm * 1e-5

    def link(event: Event) -> str:
        crosses = isinstance(event, CommEvent) and len(event.ranks) > 2
        return "nic" if shared and crosses else ""

    kinds = ("tp", "cp", "ep", "pp", "dp")
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
