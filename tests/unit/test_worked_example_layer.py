"""What one transformer layer must communicate, line by line: docs/explain/placements.md.

b s h of the tables below is microbatch x sequence x hidden of one data-parallel rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.frontends.spec import ModelSpec
from foretrain.program import CommEvent, ComputeEvent, Program
from foretrain.strategy.plan import Plan, Recompute
from support import (
    FSDP_MIXED,
    OPEN,
    STACK,
    Small,
    collectives_of,
    compile_small,
    gpt,
    labels_of,
    llama,
    segment,
    step_collectives,
)

B, S, H, F, V, L = 2, 32, 64, 96, 160, 4
BSH = B * S * H
REDUCE = ("all_reduce", ("tp",), BSH)
GATHER = ("all_gather", ("tp",), BSH)
SCATTER = ("reduce_scatter", ("tp",), BSH)


def small(spec: ModelSpec, plan: Plan, world: int, **kw: object) -> Program:
    run: Small = compile_small(spec, plan, world, microbatch=B, sequence=S, **kw)  # type: ignore[arg-type]
    return run.program


def tensor_parallel(
    spec: ModelSpec, *, tp: int = 2, sequence_parallel: bool = False, **kw: object
) -> Program:
    plan = Plan(tp=tp, zero=0, sequence_parallel=sequence_parallel, **kw)  # type: ignore[arg-type]
    return small(spec, plan, tp)


FAMILIES = pytest.mark.parametrize("spec", [llama(), gpt()], ids=["llama", "gpt"])


# -- 1. Megatron tensor parallel, no sequence parallel -------------------------------------------


@FAMILIES
def test_tensor_parallel_reduces_twice_forward_and_twice_backward(spec: ModelSpec) -> None:
    program = tensor_parallel(spec)
    assert collectives_of(program, "layers.0 forward") == [REDUCE, REDUCE]
    assert labels_of(program, "layers.0 forward") == [
        "attention.out.out all-reduce",
        "mlp.down.out all-reduce",
    ]
    # one reduction of dx for up and gate together, one (not three) for q, k and v
    assert collectives_of(program, "layers.0 backward") == [REDUCE, REDUCE]
    first, second = labels_of(program, "layers.0 backward")
    assert first.startswith("d.mlp.norm.out")
    assert second.startswith("d.attention.norm.out")


@FAMILIES
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_number_of_ranks_changes_no_volume(spec: ModelSpec, tp: int) -> None:
    spec = replace(spec, kv_heads=8)
    program = tensor_parallel(spec, tp=tp)
    assert collectives_of(program, "layers.0 forward") == [REDUCE, REDUCE]
    assert collectives_of(program, "layers.0 backward") == [REDUCE, REDUCE]


@FAMILIES
def test_unfused_kernels_reduce_as_often(spec: ModelSpec) -> None:
    """Sums of partial sums stay partial also when q, k, v are three kernels."""
    program = small(spec, Plan(tp=2, zero=0), 2, stack=OPEN)
    assert collectives_of(program, "layers.0 forward") == [REDUCE, REDUCE]
    assert collectives_of(program, "layers.0 backward") == [REDUCE, REDUCE]


def test_a_bias_of_a_row_split_layer_is_added_after_the_reduction() -> None:
    items = segment(tensor_parallel(gpt()), "layers.0 forward").items
    labels = [item.label for item in items]
    at = labels.index("attention.out.out all-reduce")
    assert labels[at - 1 : at + 2] == [
        "attention.out",
        "attention.out.out all-reduce",
        "attention.residual",
    ]
    assert items[at + 1].waits == (at,)


def test_local_shapes_of_a_split_layer() -> None:
    program = tensor_parallel(llama(), tp=4)
    shapes = {
        item.label: program.events[item.event]
        for item in segment(program, "layers.0 forward").items
    }
    d, kv, heads = 8, 4, 8
    expected = {
        "attention.q+attention.k+attention.v": (B * S, (heads + 2 * kv) * d / 4, H),
        "attention.out": (B * S, H, heads * d / 4),
        "mlp.up+mlp.gate": (B * S, 2 * F / 4, H),
        "mlp.down": (B * S, H, F / 4),
    }
    for label, (m, n, k) in expected.items():
        event = shapes[label]
        assert isinstance(event, ComputeEvent)
        assert (event.get("b"), event.get("m"), event.get("n"), event.get("k")) == (1, m, n, k)
        assert event.flops == 2 * m * n * k
    core = shapes["attention.core"]
    assert isinstance(core, ComputeEvent)
    assert (core.get("heads"), core.get("kv_heads")) == (2, 1)


# -- fewer KV heads than ranks -------------------------------------------------------------------


def test_fewer_kv_heads_than_ranks_split_a_sub_axis() -> None:
    """2 KV heads over 8 ranks: split 2 ways, replicated 4 ways; x tp is one group as before."""
    program = tensor_parallel(llama(kv_heads=2), tp=8)
    sizes = dict(zip(program.mesh.axes, program.mesh.sizes, strict=True))
    assert (sizes["tp.0"], sizes["tp.1"]) == (2, 4)
    both = ("all_reduce", ("tp.0", "tp.1"), BSH)
    assert collectives_of(program, "layers.0 forward") == [both, both]
    core = next(
        program.events[item.event]
        for item in segment(program, "layers.0 forward").items
        if item.label == "attention.core"
    )
    assert isinstance(core, ComputeEvent)
    assert (core.get("heads"), core.get("kv_heads")) == (1, 1)


def test_weight_gradients_of_shared_kv_heads_are_partial_over_the_sub_axis() -> None:
    program = tensor_parallel(llama(kv_heads=2), tp=8)
    key_and_value = L * 2 * (2 * 8 // 2) * H  # 2 heads of size 8, split 2 ways, for k and v
    assert step_collectives(program) == {("all_reduce", ("tp.1",), key_and_value): 1}


def test_gradients_of_shared_kv_activations_are_not_reduced_in_the_layer() -> None:
    """dk and dv are partial over the sub-axis; that passes through dx and ends in its sum."""
    program = tensor_parallel(llama(kv_heads=2), tp=8)
    both = ("all_reduce", ("tp.0", "tp.1"), BSH)
    assert collectives_of(program, "layers.0 backward") == [both, both]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_kv_heads_with_sequence_parallel(kv_heads: int) -> None:
    """x is gathered once for q, k and v, whatever the number of KV heads."""
    program = tensor_parallel(llama(kv_heads=kv_heads), tp=8, sequence_parallel=True)
    axes = ("tp",) if kv_heads == 1 else ("tp.0", "tp.1")
    gather, scatter = ("all_gather", axes, BSH), ("reduce_scatter", axes, BSH)
    assert collectives_of(program, "layers.0 forward") == [gather, scatter, gather, scatter]
    found = collectives_of(program, "layers.0 backward")
    assert sorted(found) == sorted([gather] * 4 + [scatter] * 2)


def test_one_kv_head_is_replicated_over_the_whole_axis() -> None:
    program = tensor_parallel(llama(kv_heads=1), tp=4)
    assert collectives_of(program, "layers.0 forward") == [REDUCE, REDUCE]
    assert collectives_of(program, "layers.0 backward") == [REDUCE, REDUCE]
    assert step_collectives(program) == {("all_reduce", ("tp",), L * 2 * 8 * H): 1}


# -- 2. with Megatron sequence parallel ----------------------------------------------------------


@FAMILIES
def test_sequence_parallel_forward_gathers_twice_and_scatters_twice(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, sequence_parallel=True)
    assert collectives_of(program, "layers.0 forward") == [GATHER, SCATTER, GATHER, SCATTER]


@FAMILIES
def test_sequence_parallel_backward_gathers_the_saved_input_again(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, sequence_parallel=True)
    found = collectives_of(program, "layers.0 backward")
    assert sorted(found) == sorted([GATHER] * 4 + [SCATTER] * 2)
    labels = labels_of(program, "layers.0 backward")
    again = [label for label in labels if not label.startswith("d.")]
    assert again == ["mlp.norm.out all-gather", "attention.norm.out all-gather"]


@FAMILIES
def test_the_repeated_gather_is_a_choice_of_layout(spec: ModelSpec) -> None:
    overrides = {"layers.*": {"keep_gathered": True}}
    program = tensor_parallel(spec, sequence_parallel=True, overrides=overrides)
    found = collectives_of(program, "layers.0 backward")
    assert sorted(found) == sorted([GATHER] * 2 + [SCATTER] * 2)


def test_sequence_parallel_sends_the_same_bytes_but_for_the_repeated_gather() -> None:
    def sent(program: Program, name: str) -> float:
        factors = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
        return sum(factors[kind] * n for kind, _, n in collectives_of(program, name))

    plain, split = tensor_parallel(gpt()), tensor_parallel(gpt(), sequence_parallel=True)
    assert sent(split, "layers.0 forward") == sent(plain, "layers.0 forward")
    assert sent(split, "layers.0 backward") == sent(plain, "layers.0 backward") + 2 * BSH


def test_gradients_of_norms_and_row_biases_are_reduced_once_per_step() -> None:
    """LayerNorm 2 h each, biases of output projection and down h each; RMSNorm h each."""
    program = tensor_parallel(gpt(), sequence_parallel=True)
    assert step_collectives(program) == {
        ("all_reduce", ("tp",), L * (2 * 2 * H + 2 * H) + 2 * H): 1
    }
    program = tensor_parallel(llama(), sequence_parallel=True)
    assert step_collectives(program) == {("all_reduce", ("tp",), (2 * L + 1) * H): 1}


def test_without_sequence_parallel_nothing_is_reduced_over_tp_at_the_end() -> None:
    assert not step_collectives(tensor_parallel(gpt()))


def test_the_gather_for_the_weight_gradient_may_hide_behind_the_data_gradient() -> None:
    """With overlap the gathers start before the data gradient that does not need them."""
    stack = replace(STACK, overlap_tp=True)
    program = small(llama(), Plan(tp=2, zero=0, sequence_parallel=True), 2, stack=stack)
    items = segment(program, "layers.0 backward").items
    labels = [item.label for item in items]
    gather = labels.index("mlp.norm.out all-gather")
    data, weight = labels.index("mlp.gate.d0+mlp.up.d0"), labels.index("mlp.gate.dw+mlp.up.dw")
    assert gather < data < weight
    assert gather not in items[data].waits
    assert gather in items[weight].waits


# -- 4. embedding, logits, loss ------------------------------------------------------------------


@FAMILIES
def test_the_embedding_reduces_its_output_and_nothing_backward(spec: ModelSpec) -> None:
    program = tensor_parallel(spec)
    assert collectives_of(program, "embedding forward") == [REDUCE]
    assert collectives_of(program, "embedding backward") == []


@FAMILIES
def test_the_embedding_with_sequence_parallel(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, sequence_parallel=True)
    assert collectives_of(program, "embedding forward") == [SCATTER]
    assert collectives_of(program, "embedding backward") == [GATHER]


@FAMILIES
def test_a_split_vocabulary_needs_three_reductions_of_fp32_values(spec: ModelSpec) -> None:
    program = tensor_parallel(spec)
    row = ("all_reduce", ("tp",), B * S)
    assert collectives_of(program, "head forward") == [row, row, row]
    events = [program.events[i.event] for i in segment(program, "head forward").items]
    small_ones = [event for event in events if isinstance(event, CommEvent)]
    assert {event.dtype for event in small_ones} == {"fp32"}
    assert {event.bytes for event in small_ones} == {4.0 * B * S}


@FAMILIES
def test_the_loss_needs_no_communication_backward_and_dx_one_reduction(spec: ModelSpec) -> None:
    program = tensor_parallel(spec)
    assert collectives_of(program, "head backward") == [REDUCE]
    assert labels_of(program, "head backward") == ["d.head.norm.out all-reduce"]


@FAMILIES
def test_the_logits_with_sequence_parallel(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, sequence_parallel=True)
    row = ("all_reduce", ("tp",), B * S)
    assert collectives_of(program, "head forward") == [GATHER, row, row, row]
    assert collectives_of(program, "head backward") == [GATHER, SCATTER]


@FAMILIES
def test_the_logits_of_one_rank_are_its_part_of_the_vocabulary(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, tp=4)
    written = max(item.delta.get("logits", 0.0) for item in segment(program, "head forward").items)
    assert written == 2.0 * B * S * V / 4


# -- 8. recompute --------------------------------------------------------------------------------


@FAMILIES
def test_full_recompute_repeats_the_forward_with_its_collectives(spec: ModelSpec) -> None:
    kept, again = tensor_parallel(spec), tensor_parallel(spec, recompute=Recompute(mode="full"))
    assert collectives_of(again, "layers.0 forward") == collectives_of(kept, "layers.0 forward")
    assert collectives_of(again, "layers.0 backward") == [REDUCE] * 4


@FAMILIES
def test_full_recompute_with_sequence_parallel_repeats_gathers_and_scatters(
    spec: ModelSpec,
) -> None:
    """The weight gradients gather their inputs again all the same: kept is the split input."""
    kept = tensor_parallel(spec, sequence_parallel=True)
    full = Recompute(mode="full")
    again = tensor_parallel(spec, sequence_parallel=True, recompute=full)
    expected = [*collectives_of(kept, "layers.0 backward"), *[GATHER, SCATTER] * 2]
    assert sorted(collectives_of(again, "layers.0 backward")) == sorted(expected)


@FAMILIES
def test_full_recompute_keeps_the_layer_input_only(spec: ModelSpec) -> None:
    program = tensor_parallel(spec, recompute=Recompute(mode="full"))
    kept = segment(program, "layers.0 forward").delta()
    assert kept["activations"] == 2.0 * BSH  # the output, which is the next layer's input
    assert kept.get("temporary", 0.0) == 0.0


def test_full_recompute_leaves_embedding_and_head_alone() -> None:
    plan = {"sequence_parallel": True, "recompute": Recompute(mode="full")}
    program = tensor_parallel(gpt(), **plan)
    kept = tensor_parallel(gpt(), sequence_parallel=True)
    for name in ("embedding backward", "head backward"):
        assert segment(program, name).items[0].category == "compute"
        assert collectives_of(program, name) == collectives_of(kept, name)


def repeated(program: Program, name: str = "layers.0 backward") -> list[str]:
    return [i.label for i in segment(program, name).items if i.category == "recompute"]


def test_selective_recompute_repeats_the_attention_core_without_collectives() -> None:
    spec = gpt(attention_dropout=0.1)
    plan = Plan(tp=2, zero=0, recompute=Recompute(mode="selective"))
    program = small(spec, plan, 2, stack=OPEN)
    assert set(repeated(program)) == {
        "attention.scores",
        "attention.softmax",
        "attention.dropout",
        "attention.context",
    }
    assert len(repeated(program)) == 4
    kept = small(spec, Plan(tp=2, zero=0), 2, stack=OPEN)
    for which in ("forward", "backward"):
        name = f"layers.0 {which}"
        assert collectives_of(program, name) == collectives_of(kept, name)


@FAMILIES
def test_selective_recompute_of_a_fused_kernel_repeats_nothing(spec: ModelSpec) -> None:
    plan = Plan(tp=2, zero=0, recompute=Recompute(mode="selective"))
    program = small(spec, plan, 2)
    kept = small(spec, Plan(tp=2, zero=0), 2)
    assert repeated(program) == []
    assert [s.items for s in program.segments] == [s.items for s in kept.segments]


def test_recompute_of_the_first_layers_of_a_stage_only() -> None:
    plan = Plan(pp=2, zero=0, recompute=Recompute(mode="full", layers=1))
    program = small(llama(), plan, 2)
    for stage in program.classes:
        backwards = next(e for e in stage.entries if getattr(e, "slot", "") == "B")
        names = [program.segments[s] for s in getattr(backwards, "segments", ())]
        counts = [sum(i.category == "recompute" for i in s.items) > 0 for s in names]
        assert sum(counts) == 1


def test_fsdp_units_gather_in_full_recompute_no_more_often() -> None:
    """Weights gathered for backward serve the repeated forward too."""
    plan = Plan(preset="fsdp", zero=3)
    again = replace(plan, recompute=Recompute(mode="full"))
    assert step_collectives(small(llama(), plan, 4, precision=FSDP_MIXED)) == step_collectives(
        small(llama(), again, 4, precision=FSDP_MIXED)
    )
