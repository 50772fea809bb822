"""The strategy tree: how settings flow, what overrides mean, what is refused, its text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from foretrain.compiler.lower import Job, compile_program
from foretrain.errors import PlanError
from foretrain.frontends.transformer import build_graph
from foretrain.program import ComputeEvent, Program
from foretrain.strategy.plan import Overlap, Plan, Recompute
from foretrain.strategy.presets import build_tree, node_from_mapping
from foretrain.strategy.text import read_tree, tree_mapping, tree_text
from foretrain.strategy.tree import Node, StrategyTree, layer_classes, resolve
from support import (
    FSDP_MIXED,
    MEGATRON,
    STACK,
    collectives_of,
    compile_small,
    flat_times,
    gpt,
    llama,
    segment,
    step_collectives,
    step_seconds,
    wire_bytes,
)

B, S, H, F, L = 2, 32, 64, 256, 4
Override = Mapping[str, Mapping[str, Any]]

# -- settings flow down --------------------------------------------------------------------------


def test_deeper_nodes_win_dim_by_dim_and_of_equals_the_later() -> None:
    nodes = [
        Node(pattern="", computation={"batch": ("dp_shard",), "seq": ("cp",)}),
        Node(pattern="layers.*.mlp.up", computation={"out": ("tp",)}, recompute="full"),
        Node(pattern="layers", computation={"out": ("cp",)}, recompute="selective"),
        Node(pattern="layers.*.mlp.up", computation={"out": ("dp_shard",)}),
    ]
    found = resolve(nodes, "layers.3.mlp.up")
    assert found.inherited == {"batch": ("dp_shard",), "seq": ("cp",)}
    assert found.own == {"out": ("dp_shard",)}
    assert found.recompute == "full"
    assert resolve(nodes, "layers.3.mlp.down").own == {"out": ("cp",)}
    assert resolve(nodes, "head.norm").own == {}
    assert resolve(nodes, "head.norm").recompute == "none"


def test_memory_roles_are_replaced_one_by_one() -> None:
    nodes = [
        Node(pattern="", memory={"master": {"*": ("dp_shard",)}, "weight": {}}, reshard=True),
        Node(pattern="layers.2", memory={"weight": {"*": ("dp_shard",)}}, reshard=False),
    ]
    found = resolve(nodes, "layers.2")
    assert found.memory == {"master": {"*": ("dp_shard",)}, "weight": {"*": ("dp_shard",)}}
    assert found.reshard is False
    assert resolve(nodes, "layers.1").reshard is True


def test_a_pattern_reaches_what_it_matches_and_all_below() -> None:
    node = Node(pattern="layers.1?.mlp")
    assert node.matches(["layers", "12", "mlp"])
    assert node.matches(["layers", "12", "mlp", "up"])
    assert not node.matches(["layers", "2", "mlp"])
    assert not node.matches(["layers", "12"])
    assert Node(pattern="").matches(["anything"])


def test_layers_reached_by_the_same_nodes_are_one_class() -> None:
    nodes = [Node(pattern=""), Node(pattern="layers.*.mlp"), Node(pattern="layers.2.attention")]
    keys = layer_classes(nodes, "layers", range(4))
    assert keys[0] == keys[1] == keys[3] != keys[2]


# -- splitting one linear layer along each of its dims -------------------------------------------


def two_ranks(overrides: Override) -> Program:
    """A GPT on tp = 2 where only `overrides` split anything."""
    spec = gpt(ffn=F)
    tree = build_tree(Plan(tp=2, zero=0), spec, world_size=2, accumulation=1, stack=STACK)
    nodes = [node_from_mapping(pattern, value) for pattern, value in overrides.items()]
    job = Job(
        precision=MEGATRON, optimizer="adamw", stack=STACK, devices_per_node=8, samples_per_step=B
    )
    graph = build_graph(spec, batch=B, sequence=S)
    return compile_program(graph, replace(tree, nodes=(tree.nodes[0], *nodes)), job)


def one_layer(name: str, dim: str) -> Program:
    return two_ranks({f"layers.*.{name}": {"computation": {dim: "tp"}}})


def gemm_flops(program: Program, name: str, label: str) -> float:
    for item in segment(program, name).items:
        event = program.events[item.event]
        if item.label == label and isinstance(event, ComputeEvent):
            return event.flops
    raise AssertionError(f"no {label} in {name}")


def test_without_a_split_nothing_is_sent() -> None:
    program = two_ranks({})
    for name in ("layers.0 forward", "layers.0 backward", "head forward", "embedding backward"):
        assert collectives_of(program, name) == []
    assert not step_collectives(program)


X, WIDE = B * S * H, B * S * F
GATHER, REDUCE = ("all_gather", ("tp",), X), ("all_reduce", ("tp",), X)
WIDE_GATHER, WIDE_REDUCE = ("all_gather", ("tp",), WIDE), ("all_reduce", ("tp",), WIDE)


@pytest.mark.parametrize(
    ("dim", "forward", "backward", "per_step"),
    [
        ("batch", [GATHER], [WIDE_GATHER], L * (H * F + H)),
        ("seq", [GATHER], [WIDE_GATHER], L * (H * F + H)),
        ("out", [GATHER], [WIDE_REDUCE], 0),
        ("in", [REDUCE], [WIDE_GATHER], 0),
    ],
)
def test_a_row_layer_split_along_one_dim(
    dim: str, forward: list[Any], backward: list[Any], per_step: int
) -> None:
    """Down projection: input, output and gradients are whole around it.

    batch, seq: rows are a free slice of the input, the output is gathered; dw and the bias
    gradient stay partial until the step. out: columns of the output, dx partial. in: output
    partial, dx in columns.
    """
    program = one_layer("mlp.down", dim)
    assert collectives_of(program, "layers.0 forward") == forward
    assert collectives_of(program, "layers.0 backward") == backward
    expected = {("all_reduce", ("tp",), per_step): 1} if per_step else {}
    assert step_collectives(program) == expected
    whole = two_ranks({})
    for name, label in (("forward", "mlp.down"), ("backward", "mlp.down.dw")):
        half = gemm_flops(program, f"layers.0 {name}", label)
        assert half == gemm_flops(whole, f"layers.0 {name}", label) / 2


@pytest.mark.parametrize(
    ("dim", "forward", "backward", "per_step"),
    [
        ("batch", [GATHER], [GATHER], L * (2 * H * F + F + H)),
        ("seq", [GATHER], [GATHER], L * (2 * H * F + F + H)),
        ("out", [REDUCE], [REDUCE], 0),
        ("in", [WIDE_REDUCE], [GATHER], 0),
    ],
)
def test_a_column_layer_split_along_one_dim(
    dim: str, forward: list[Any], backward: list[Any], per_step: int
) -> None:
    """Up projection: what follows takes its layout over until the block's output is whole."""
    program = one_layer("mlp.up", dim)
    assert collectives_of(program, "layers.0 forward") == forward
    assert collectives_of(program, "layers.0 backward") == backward
    expected = {("all_reduce", ("tp",), per_step): 1} if per_step else {}
    assert step_collectives(program) == expected
    half = gemm_flops(program, "layers.0 forward", "mlp.up")
    assert half == gemm_flops(two_ranks({}), "layers.0 forward", "mlp.up") / 2


@pytest.mark.parametrize(
    ("name", "dim", "forward"),
    [
        ("attention.q", "in", [REDUCE]),
        ("attention.q", "out", [REDUCE]),
        ("attention.out", "in", [REDUCE]),
        ("attention.out", "out", [GATHER, GATHER]),
    ],
)
def test_attention_layers_split_by_columns_and_rows(
    name: str, dim: str, forward: list[Any]
) -> None:
    """q by columns splits the heads of the core; out by columns the residual, gathered by norms."""
    assert collectives_of(one_layer(name, dim), "layers.0 forward") == forward


def test_an_override_may_name_a_dim_by_its_group() -> None:
    override = {"layers.*.mlp.up": {"computation": {"out": ["tp"]}}}
    program = compile_small(llama(), Plan(tp=2, zero=0, overrides=override), 2).program
    assert program.segments == compile_small(llama(), Plan(tp=2, zero=0), 2).program.segments


# -- overrides of some layers --------------------------------------------------------------------


def names(program: Program) -> set[str]:
    return {s.name for s in program.segments if s.name.startswith("layers")}


def test_equal_layers_are_lowered_once() -> None:
    assert names(compile_small(llama(), Plan(zero=1), 4).program) == {
        "layers.0 forward",
        "layers.0 backward",
    }


def test_a_memory_override_of_one_layer_splits_its_class_only() -> None:
    """Layer 3 sharded like ZeRO-3: it alone is gathered, it alone has segments of its own."""
    shard = {"*": ["dp_shard"]}
    override = {
        "layers.3": {"memory": {"weight": shard, "grad_accumulator": shard, "master": shard}}
    }
    spec, a, n = llama(), 3, 4
    program = compile_small(
        spec, Plan(preset="ddp", zero=0, overrides=override), n, accumulation=a
    ).program
    plain = compile_small(spec, Plan(preset="ddp", zero=0), n, accumulation=a).program
    assert {"layers.0 forward", "layers.3 forward"} <= names(program)
    assert not any(name.startswith(("layers.1", "layers.2")) for name in names(program))
    layer = 2 * H * H + 2 * H * 32 + 3 * H * 96 + 2 * H
    total = 4 * layer + H + 2 * 160 * H
    rest = 2 * (n - 1) / n * (total - layer) * 4.0
    sharded = (n - 1) / n * a * layer * (2 * 2.0 + 4.0)
    assert wire_bytes(program) == pytest.approx(rest + sharded)
    gathers = [e for e in program.classes[0].entries if getattr(e, "stream", "") == "gather"]
    assert {getattr(e, "label", "").split()[0] for e in gathers} == {"layers.3"}
    weights = program.classes[0].persistent["weights"]
    assert weights == plain.classes[0].persistent["weights"] - 2.0 * layer * (n - 1) / n


def test_a_computation_override_of_some_layers() -> None:
    override = {"layers.[12].mlp.up": {"computation": {"ffn": []}}}
    plan = Plan(tp=2, zero=0, overrides=override)
    program = compile_small(gpt(ffn=F), plan, 2).program
    assert {"layers.0 forward", "layers.1 forward"} <= names(program)
    assert len(collectives_of(program, "layers.0 forward")) == 2
    assert len(collectives_of(program, "layers.1 forward")) == 1  # the MLP is repeated


# -- ZeRO is nothing but memory layouts ----------------------------------------------------------

SHARD = {"*": ["dp_shard", "cp"]}
ZERO_AS_OVERRIDES: dict[int, Override] = {
    1: {"": {"memory": {"master": SHARD}}},
    2: {"": {"memory": {"master": SHARD, "grad_accumulator": SHARD}}},
    3: {
        "": {"memory": {"master": SHARD, "grad_accumulator": SHARD, "weight": SHARD}},
        "head": {"reshard": False},
    },
}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("cp", [1, 2])
def test_zero_written_as_memory_overrides_is_the_preset(zero: int, cp: int) -> None:
    overlap = Overlap(param=zero >= 3)  # a choice of the runtime, not a layout
    preset = Plan(preset="deepspeed", zero=zero, cp=cp)
    written = Plan(
        preset="deepspeed", zero=0, cp=cp, overrides=ZERO_AS_OVERRIDES[zero], overlap=overlap
    )
    a = compile_small(llama(), preset, 4).program
    b = compile_small(llama(), written, 4).program
    assert a.events == b.events
    assert a.segments == b.segments
    assert a.classes == b.classes
    assert step_seconds(a, flat_times(a)) == step_seconds(b, flat_times(b))


# -- the text form -------------------------------------------------------------------------------

PLANS = [
    (Plan(), 1),
    (Plan(tp=4, pp=2, zero=1, sequence_parallel=True), 16),
    (Plan(tp=2, pp=2, interleave=2, zero=1, recompute=Recompute(mode="selective")), 8),
    (Plan(tp=8, zero=0), 8),  # KV heads on a sub-axis
    (Plan(preset="fsdp", zero=3, shard=2), 4),
    (Plan(preset="ddp", zero=0), 4),
    (Plan(preset="deepspeed", zero=2, bucket_mib=0.1), 4),
    (Plan(cp=2, tp=2, zero=1), 8),
    (Plan(pp=4, schedule="gpipe", zero=0), 4),
    (Plan(pp=4, in_flight=(3, 2, 2, 1), stages=(1, 1, 1, 1), zero=0), 8),
    (Plan(pp=2, zero=0, recompute=Recompute(mode="full", layers=1)), 2),
    (Plan(tp=2, zero=0, order=("tp", "pp", "dp")), 4),
    (Plan(tp=2, zero=0, overrides={"layers.3": {"keep_gathered": True, "reshard": False}}), 2),
    (Plan(tp=2, zero=0, overrides={"layers.*.mlp.up": {"computation": {"in": ["tp"]}}}), 2),
]


@pytest.mark.parametrize(("plan", "world"), PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_the_printed_tree_reads_back_to_the_same_program(plan: Plan, world: int) -> None:
    first = compile_small(llama(), plan, world)
    printed = yaml.safe_load(tree_text(first.tree))["tree"]
    again = compile_small(llama(), Plan(tp=plan.tp, pp=plan.pp, cp=plan.cp, tree=printed), world)
    assert again.tree == first.tree
    assert again.program == first.program
    assert tree_text(again.tree) == tree_text(first.tree)


def a_tree() -> StrategyTree:
    return build_tree(Plan(tp=2), llama(), world_size=4, accumulation=1, stack=STACK)


@pytest.mark.parametrize("key", ["mesh", "schedule", "runtime", "nodes", "data_axes"])
def test_a_tree_that_lacks_a_part_is_refused(key: str) -> None:
    mapping = tree_mapping(a_tree())
    del mapping[key]
    with pytest.raises(PlanError, match="missing key") as error:
        read_tree({**mapping, "extra": 1})
    assert {problem.value for problem in error.value.problems} == {key, "extra"}


def test_a_value_of_the_wrong_form_is_refused_with_a_way_out() -> None:
    mapping = {**tree_mapping(a_tree()), "schedule": {"kind": "1f1b"}}
    with pytest.raises(PlanError, match="explain RUN --stage plan"):
        read_tree(mapping)


# -- what is refused -----------------------------------------------------------------------------


def refusal(overrides: Override) -> PlanError:
    with pytest.raises(PlanError) as error:
        compile_small(llama(), Plan(tp=2, pp=2, zero=0, overrides=overrides), 8)
    return error.value


def test_an_unknown_dim_is_refused_with_the_dims_of_the_operator() -> None:
    (problem,) = refusal({"layers.*.mlp.down": {"computation": {"outt": "tp"}}}).problems
    assert problem.value == "outt"
    assert problem.allowed == "batch, ffn, in, out, seq"
    assert "'out'" in problem.way_out


@pytest.mark.parametrize(
    "setting",
    [{"computation": {"out": "tq"}}, {"memory": {"weight": {"*": "tq"}}}],
    ids=["computation", "memory"],
)
def test_an_unknown_axis_is_refused_with_the_axes_of_the_mesh(setting: Any) -> None:
    (problem,) = refusal({"layers.*.mlp.down": setting}).problems
    assert problem.value == "tq"
    assert problem.allowed == "dp_replicate, dp_shard, cp, tp"
    assert "'tp'" in problem.way_out


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    (problem,) = refusal({"layers.3": {"memmory": {}}}).problems
    assert problem.value == "memmory"
    assert "memory" in problem.allowed


def test_a_split_that_does_not_divide_is_refused_with_the_size() -> None:
    spec = llama(ffn=90)
    override = {"layers.*.mlp.up": {"computation": {"ffn": ["tp"]}}}
    with pytest.raises(PlanError, match="size 90 cannot be split 4 ways"):
        compile_small(spec, Plan(tp=4, zero=0, overrides=override), 4)


MEANINGLESS: dict[str, Override] = {
    "unknown memory role": {"layers.3": {"memory": {"wieght": {"*": "dp_shard"}}}},
    "dim that weights are not split by": {"layers.3": {"memory": {"weight": {"out": "dp_shard"}}}},
    "unknown dim of the residual": {"": {"memory": {"residual": {"sequence": "tp"}}}},
    "unknown recompute": {"layers.3": {"recompute": "fulll"}},
    "path that matches nothing": {"layers.*.mpl.down": {"computation": {"out": "tp"}}},
    "layer that does not exist": {"layers.9": {"memory": {"weight": {"*": "dp_shard"}}}},
    "unknown dim on a module": {"layers.*.mlp": {"computation": {"bogus": "tp"}}},
    "one axis on two dims": {"layers.*.mlp.down": {"computation": {"out": "tp", "in": "tp"}}},
    "one axis twice": {"layers.*.mlp.down": {"computation": {"out": ["tp", "tp"]}}},
    "pipeline axis": {"layers.*.mlp.down": {"computation": {"out": "pp"}}},
    "no list of axes": {"layers.*.mlp.down": {"computation": {"out": 5}}},
}


@pytest.mark.parametrize("override", MEANINGLESS.values(), ids=MEANINGLESS)
def test_no_override_is_ignored_silently(override: Override) -> None:
    assert refusal(override).problems


# -- presets -------------------------------------------------------------------------------------


def test_fsdp_shards_everything_and_keeps_the_last_unit() -> None:
    run = compile_small(llama(), Plan(preset="fsdp", zero=3), 4, precision=FSDP_MIXED)
    root, head = run.tree.nodes
    assert set(root.memory) == {"residual", "master", "grad_accumulator", "weight"}
    assert (head.pattern, head.reshard) == ("head", False)


def test_the_mesh_has_tp_innermost_and_order_changes_it() -> None:
    def mesh(plan: Plan) -> tuple[tuple[str, int], ...]:
        tree = build_tree(plan, llama(), world_size=16, accumulation=1, stack=STACK)
        return tuple(zip(tree.mesh.axes, tree.mesh.sizes, strict=True))

    usual = Plan(tp=2, pp=2, cp=2)
    assert mesh(usual) == (("pp", 2), ("dp_replicate", 1), ("dp_shard", 2), ("cp", 2), ("tp", 2))
    changed = replace(usual, order=("tp", "dp", "pp", "cp"))
    assert [axis for axis, _ in mesh(changed)] == ["tp", "dp_replicate", "dp_shard", "pp", "cp"]
    sharded = Plan(preset="fsdp", zero=3, shard=4)
    assert mesh(sharded)[1:3] == (("dp_replicate", 4), ("dp_shard", 4))
