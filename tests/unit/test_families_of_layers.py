"""BERT, Gemma 2, ALiBi and OPT-350m: volumes by closed forms, what scores need, what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.frontends.build import build_graph as build
from foretrain.frontends.build import flops_per_sample
from foretrain.frontends.catalog import find_model, resolve_model
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.transformer import build_graph
from foretrain.graph.ir import Block, Graph
from foretrain.predict import predict
from foretrain.program import ComputeEvent, Program
from foretrain.run.load import load_run
from foretrain.run.stacks import list_stacks, load_stack
from foretrain.strategy.plan import Plan
from support import FSDP_MIXED, OPEN, collectives_of, compile_small, step_collectives

B, S, H, F, V, L = 2, 32, 64, 96, 160, 4


def small(family: str, **more: Any) -> ModelSpec:
    usual = {"layers": L, "hidden": H, "heads": 8, "ffn": F, "vocab": V}
    spec = resolve_model({"family": family, **usual, **more})
    assert isinstance(spec, ModelSpec)
    return spec


def program(spec: ModelSpec, plan: Plan, world: int, **kw: Any) -> Program:
    return compile_small(spec, plan, world, microbatch=B, sequence=S, **kw).program


# -- BERT: what ZeRO and FSDP move ---------------------------------------------------------------

NORM = 2 * H
LAYER = 4 * H * H + 4 * H + 2 * H * F + F + H + 2 * NORM
EMBEDDING = (V + 512 + 2) * H + NORM
#: dense, norm and bias of the words; pooler and classifier of the pairs; the table is tied.
HEAD = H * H + H + NORM + V + H * H + H + 2 * H + 2
BERT = L * LAYER + EMBEDDING + HEAD


def data(made: Program) -> dict[tuple[str, float], int]:
    """Kind and elements of the data-parallel collectives of a step -> how often."""
    return {(kind, n): count for (kind, _, n), count in step_collectives(made).items()}


@pytest.mark.parametrize("world", [2, 4])
def test_zero_moves_the_parameters_of_bert_once_or_twice(world: int) -> None:
    spec = small("bert")
    assert build_graph(spec, batch=1, sequence=S).num_parameters == BERT
    assert data(program(spec, Plan(zero=0), world)) == {("all_reduce", BERT): 1}
    assert data(program(spec, Plan(zero=1), world)) == {
        ("reduce_scatter", BERT): 1, ("all_gather", BERT): 1,
    }  # fmt: skip
    two = data(program(spec, Plan(zero=2), world, accumulation=3))
    scattered = sum(n * count for (kind, n), count in two.items() if kind == "reduce_scatter")
    gathered = sum(n * count for (kind, n), count in two.items() if kind == "all_gather")
    assert (scattered, gathered) == (3 * BERT, BERT)


def test_fsdp_gathers_each_unit_of_bert_twice_and_its_head_once() -> None:
    plan = Plan(preset="fsdp", zero=3)
    steps = 3
    assert data(program(small("bert"), plan, 4, accumulation=steps, precision=FSDP_MIXED)) == {
        ("all_gather", LAYER): 2 * L * steps,
        ("all_gather", EMBEDDING): 2 * steps,
        ("all_gather", HEAD): steps,
        ("reduce_scatter", LAYER): L * steps,
        ("reduce_scatter", EMBEDDING): steps,
        ("reduce_scatter", HEAD): steps,
    }


# -- Gemma 2: two kinds of layers, norms on both sides -------------------------------------------


def gemma2(**more: Any) -> ModelSpec:
    return small("gemma2", window=8, kv_heads=4, **more)


def layers(graph: Graph) -> list[Block]:
    return [block for block in graph.blocks if block.name == "layers"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_second_layer_has_a_window(depth: int) -> None:
    graph = build_graph(gemma2(layers=depth), batch=1, sequence=S)
    windows = {
        number: op.attributes["window"]
        for block in layers(graph)
        for number in block.layers
        for op in block.ops
        if op.cost == "attention"
    }
    assert windows == {i: 0.0 if i % 2 else 8.0 for i in range(depth)}
    expected = flops_per_sample(gemma2(layers=depth), sequence=S) / 3
    assert graph.forward_flops() == pytest.approx(expected)


@pytest.mark.parametrize("stages", [(2, 2), (1, 3), (3, 1)])
def test_stages_hold_both_kinds_of_layers_in_turn(stages: tuple[int, ...]) -> None:
    made = program(gemma2(), Plan(pp=2, stages=stages), 2, accumulation=2)
    windows: list[float] = []
    for stage in range(2):
        for entry in made.classes[stage].entries:
            if getattr(entry, "slot", "") != "F" or getattr(entry, "microbatch", 1):
                continue
            for segment in entry.segments:  # type: ignore[union-attr]
                events = (made.events[item.event] for item in made.segments[segment].items)
                cores = [e for e in events if isinstance(e, ComputeEvent) and e.op == "attention"]
                windows += [dict(core.shape)["window"] for core in cores]
    assert windows == [8.0, 0.0, 8.0, 0.0]


def test_norms_after_each_part_keep_the_collectives_of_a_usual_layer() -> None:
    size = B * S * H
    made = program(gemma2(), Plan(tp=2, zero=0), 2)
    assert collectives_of(made, "layers.0 forward") == [("all_reduce", ("tp",), size)] * 2
    made = program(gemma2(), Plan(tp=2, zero=0, sequence_parallel=True), 2)
    kinds = [kind for kind, _, _ in collectives_of(made, "layers.0 forward")]
    assert kinds == ["all_gather", "reduce_scatter"] * 2


def test_an_override_reaches_the_layer_of_its_number() -> None:
    plan = Plan(overrides={"layers.3": {"recompute": "full"}})
    made = program(gemma2(), plan, 1)
    again = {s.name for s in made.segments for i in s.items if i.category == "recompute"}
    assert again == {"layers.3 backward"}
    with pytest.raises(InputError, match="matches no module"):
        program(gemma2(), Plan(overrides={"layers.4": {"recompute": "full"}}), 1)


# -- what is done to scores ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "need"),
    [(small("bloom"), "alibi"), (small("t5"), "relative"), (gemma2(), "softcap")],
)
def test_a_kernel_that_cannot_do_it_leaves_the_attention_unfused(
    spec: ModelSpec, need: str
) -> None:
    names = {
        able: {op.cost for _, op in build(spec, batch=1, sequence=S, fused_scores=able).ops()}
        for able in ((), (need,))
    }
    assert "attention" not in names[()]
    assert ("softcap" if need == "softcap" else "score_bias") in names[()]
    assert "attention" in names[(need,)]
    assert "score_bias" not in names[(need,)]


def test_a_bias_costs_a_pass_over_the_scores_and_nothing_backward() -> None:
    """Read and written once forward; its gradient is that of the scores, ALiBi has no weights."""
    square = B * 8 * S * S * 2
    made = program(small("bloom"), Plan(zero=0), 1, stack=OPEN)
    biases = [e for e in made.events if isinstance(e, ComputeEvent) and e.op == "score_bias"]
    assert [(e.direction, e.bytes) for e in biases] == [("forward", 2 * square)]
    relative = program(small("t5", buckets=8), Plan(zero=0), 1, stack=OPEN)
    events = [e for e in relative.events if isinstance(e, ComputeEvent)]
    table = 8 * 8 * 2
    rows = 8 * S * S * 2
    assert {e.bytes for e in events if e.op == "score_bias"} == {2 * square + rows + table}
    assert square + table in {e.bytes for e in events if e.op == "bias_grad"}


def test_stacks_name_only_what_scores_may_need() -> None:
    for name in list_stacks():
        assert set(load_stack(name).fused_scores) <= {"alibi", "relative", "softcap"}


@pytest.mark.parametrize("stack", ["pytorch-eager", "llm-foundry", "megatron-te", "jax-xla"])
@pytest.mark.parametrize("model", ["mpt-7b", "gemma-2-2b", "opt-350m", "t5-base"])
def test_every_operator_of_the_families_has_a_cost(model: str, stack: str) -> None:
    run = load_run({
        "model": model, "cluster": "1x8 h100-sxm", "stack": stack,
        "training": {"sequence": 512, "global_batch": 8},
    })  # fmt: skip
    result = predict(run, strict=True)
    assert result.step_time_s.value > 0


@pytest.mark.parametrize("stack", ["pytorch-eager", "llm-foundry", "megatron-te", "jax-xla"])
def test_alibi_costs_time_only_where_no_kernel_does_it(stack: str) -> None:
    usual = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 1000}
    run = {"cluster": "1x1 h100-sxm", "stack": stack, "plan": {"preset": "plain"},
           "training": {"sequence": 2048, "global_batch": 8}}  # fmt: skip
    times = [
        predict(load_run({**run, "model": {"family": "mpt", "positions": kind, **usual}}))
        for kind in ("alibi", "none")
    ]
    ratio = times[0].step_time_s.value / times[1].step_time_s.value
    if stack in ("llm-foundry", "megatron-te"):
        assert ratio == pytest.approx(1.0, abs=1e-9)
    else:
        assert ratio > 1.1


# -- a word table that is narrower than the layers -----------------------------------------------


def test_a_narrow_table_has_a_product_on_each_side() -> None:
    graph = build_graph(find_model("opt-350m"), batch=1, sequence=8)  # type: ignore[arg-type]
    assert [op.name for op in graph.block("embedding").ops][:2] == [
        "embedding.word", "embedding.project",
    ]  # fmt: skip
    assert [op.name for op in graph.block("head").ops][:2] == ["head.project", "head.logits"]
    table = graph.block("embedding").tensor("embedding.word.weight")
    assert (table.shape, graph.block("head").tensor("head.logits.weight").tied_to) == (
        (50272, 512), "embedding/embedding.word.weight",
    )  # fmt: skip


def test_a_narrow_table_is_reduced_over_tp_before_it_is_widened() -> None:
    made = program(small("opt", projection=32, dropout=0.0), Plan(tp=2, zero=0), 2)
    assert collectives_of(made, "embedding forward") == [("all_reduce", ("tp",), B * S * 32)]
