"""Selective recompute per operator (torchtitan) and the work that frameworks add around layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.graph.precision import Precision
from foretrain.program import ComputeEvent, Program
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan, Recompute
from support import (
    FSDP_MIXED,
    MEGATRON,
    STACK,
    collectives_of,
    compile_small,
    labels_of,
    llama,
    segment,
)

B, S, H, F, A, KV, D = 2, 32, 64, 96, 8, 4, 8
TITAN = replace(STACK, selective="operators", fused=())


def titan(tp: int = 1, *, sequence_parallel: bool = False, mode: str = "selective") -> Program:
    plan = Plan(tp=tp, zero=0, sequence_parallel=sequence_parallel, recompute=Recompute(mode=mode))
    return compile_small(llama(), plan, tp, microbatch=B, sequence=S, stack=TITAN).program


def repeated(program: Program) -> set[str]:
    items = segment(program, "layers.0 backward").items
    return {item.label for item in items if item.category == "recompute"}


CHEAP = {"attention.norm", "attention.rotary_q", "attention.rotary_k", "attention.residual"}
CHEAP |= {"mlp.norm", "mlp.act"}


def test_attention_and_every_second_product_are_kept() -> None:
    """In order: q, (k), v, (attention output), up, (gate), down; those in brackets run again."""
    expected = CHEAP | {"attention.k", "attention.out", "mlp.gate"}
    assert repeated(titan()) == expected
    assert repeated(titan(tp=2)) == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_kept_per_operator(tp: int) -> None:
    """q, v, attention's output, up and the log-sum-exp, split; the block's output, whole.

    The output of the down projection is cached like that of every kept product, though no backward
    reads it.
    """
    kept = segment(titan(tp), "layers.0 forward").delta()["activations"]
    per_token = 2 * (A * D + KV * D + A * D + F) / tp + 4 * A / tp + 2 * H + 2 * H
    assert kept == B * S * per_token


def test_nothing_runs_twice_in_backward() -> None:
    items = segment(titan(), "layers.0 backward").items
    labels = [item.label for item in items if item.category == "recompute"]
    assert len(labels) == len(set(labels))


def test_the_reduction_behind_a_repeated_product_is_repeated() -> None:
    """Without sequence parallelism torchtitan keeps no output of an all-reduce."""
    found = labels_of(titan(tp=2), "layers.0 backward")
    assert found.count("attention.out.out all-reduce") == 1
    assert not any(label.startswith("mlp.down") for label in found)


def test_the_output_of_a_reduce_scatter_is_kept() -> None:
    program = titan(tp=2, sequence_parallel=True)
    assert repeated(program) == CHEAP | {"attention.k", "mlp.gate"}
    kept = titan(tp=2, sequence_parallel=True, mode="none")
    assert sorted(collectives_of(program, "layers.0 backward")) == sorted(
        collectives_of(kept, "layers.0 backward")
    )


# -- framework passes ----------------------------------------------------------------------------

LAYER = 2 * H * H + 2 * H * KV * D + 3 * H * F + 2 * H
FUSED_ADD = replace(STACK, fused=("qkv", "gate_up", "wgrad_accumulate"))


def extra(
    plan: Plan,
    which: str,
    *,
    accumulation: int = 4,
    precision: Precision = MEGATRON,
    stack: Stack = STACK,
) -> dict[str, float]:
    """Bytes of the operators of a layer's segment that are no operators of the graph, by label."""
    run = compile_small(
        llama(), plan, 4, accumulation=accumulation, precision=precision, stack=stack
    )
    found: dict[str, float] = {}
    for item in segment(run.program, f"layers.0 {which}").items:
        event = run.program.events[item.event]
        if isinstance(event, ComputeEvent) and item.label.endswith(("weights", "gradients")):
            found[item.label] = event.bytes
    return found


def test_gradients_are_added_to_a_wider_accumulator() -> None:
    """Read bf16 and fp32, write fp32; nothing is read when there is one micro-step only."""
    plan = Plan(preset="ddp", zero=0)
    assert extra(plan, "forward") == {}
    assert extra(plan, "backward") == {"accumulate gradients": LAYER * (2 + 4 + 4)}
    assert extra(plan, "backward", accumulation=1) == {"accumulate gradients": LAYER * (2 + 4)}


def test_no_pass_adds_what_needs_no_adding() -> None:
    plan = Plan(preset="ddp", zero=0)
    assert extra(plan, "backward", stack=FUSED_ADD) == {}  # the GEMM's epilogue adds
    assert extra(plan, "backward", precision=Precision(), accumulation=1) == {}


def test_fsdp_casts_shards_unpacks_weights_and_packs_gradients() -> None:
    """A quarter of the fp32 weights is cast, all of them are copied out in bf16, twice."""
    plan = Plan(preset="fsdp", zero=3)
    assert extra(plan, "forward", precision=FSDP_MIXED) == {
        "cast weights": LAYER / 4 * (4 + 2),
        "unpack weights": LAYER * (2 + 2),
    }
    backward = extra(plan, "backward", precision=FSDP_MIXED, accumulation=1)
    assert backward["unpack weights"] == LAYER * (2 + 2)
    assert backward["pack gradients"] == LAYER * (2 + 2)
    kept = extra(replace(plan, reshard=False), "backward", precision=FSDP_MIXED)
    assert "unpack weights" not in kept
