"""Memory by lifetimes: numbers worked by hand, and the closed forms of the literature.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), give
the bytes that one layer of a GPT keeps for its backward, in units of s b h (sequence, micro-batch,
hidden), with a heads and t tensor-parallel ranks, 2-byte activations and 1-byte dropout masks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.frontends.catalog import find_model
from foretrain.graph.precision import Precision
from foretrain.predict import alive_by_module, predict
from foretrain.program import Comm, Program, RankClass, Run
from foretrain.run.load import load_run
from foretrain.simulator.memory import segment_profile
from foretrain.simulator.simulate import simulate
from foretrain.strategy.plan import Plan, Recompute
from foretrain.units import GIB
from support import (
    FSDP_MIXED,
    OPEN,
    STACK,
    compile_small,
    flat_times,
    gpt,
    llama,
    segment,
)

B, S, H, A, L = 2, 32, 64, 8, 4
SBH = S * B * H
CORE = 5 * A * S / H
DROPPING = gpt(dropout=0.1, attention_dropout=0.1)


def kept_by_a_layer(plan: Plan, *, spec: object = DROPPING, stack: object = OPEN) -> float:
    """Bytes that one micro-batch keeps of a layer, its output counted, its input not."""
    run = compile_small(spec, plan, plan.tp, microbatch=B, sequence=S, stack=stack)  # type: ignore[arg-type]
    kept = segment(run.program, "layers.0 forward").delta()
    assert kept.get("temporary", 0.0) == 0.0
    return kept["activations"]


def megatron(t: int, mode: str, *, sequence_parallel: bool = False) -> Plan:
    return Plan(tp=t, zero=0, sequence_parallel=sequence_parallel, recompute=Recompute(mode=mode))


# -- published closed forms ----------------------------------------------------------------------


def test_a_layer_on_one_rank_keeps_34_sbh_and_5_as_over_h() -> None:
    assert kept_by_a_layer(megatron(1, "none")) == SBH * (34 + CORE)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallel_leaves_10_sbh_whole(t: int) -> None:
    assert kept_by_a_layer(megatron(t, "none")) == SBH * (10 + 24 / t + CORE / t)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallel_divides_all_of_it(t: int) -> None:
    plan = megatron(t, "none", sequence_parallel=True)
    assert kept_by_a_layer(plan) == SBH / t * (34 + CORE)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_selective_recompute_leaves_out_the_core(t: int) -> None:
    assert kept_by_a_layer(megatron(t, "selective", sequence_parallel=True)) == SBH / t * 34
    assert kept_by_a_layer(megatron(t, "selective")) == SBH * (10 + 24 / t)


@pytest.mark.parametrize("t", [1, 4])
def test_full_recompute_keeps_the_input(t: int) -> None:
    assert kept_by_a_layer(megatron(t, "full")) == 2 * SBH
    assert kept_by_a_layer(megatron(t, "full", sequence_parallel=True)) == 2 * SBH / t


def test_a_fused_kernel_keeps_no_squares() -> None:
    """Instead of softmax and dropout its output and one log-sum-exp per query (4 bytes)."""
    stack = replace(STACK, fused=())
    kept = kept_by_a_layer(megatron(1, "none"), stack=stack)
    assert kept == SBH * 34 + 4 * B * S * A
    assert kept_by_a_layer(megatron(1, "selective"), stack=stack) == kept


def test_grouped_heads_keep_fewer_keys_and_values() -> None:
    many, few = (
        kept_by_a_layer(megatron(1, "none"), spec=llama(kv_heads=k), stack=STACK) for k in (8, 2)
    )
    assert many - few == 2 * 2.0 * B * S * 6 * 8  # k and v, 6 heads of size 8, 2 bytes


GPT3_TOTALS = [  # GiB of the first of 8 stages, 3 chunks, tp 8, micro-batch 1
    ("none", False, 66.84),
    ("none", True, 41.41),
    ("selective", True, 12.35),
    ("full", False, 5.81),
]


@pytest.mark.parametrize(("mode", "sequence_parallel", "gib"), GPT3_TOTALS)
def test_gpt_3_on_64_devices(mode: str, sequence_parallel: bool, gib: float) -> None:
    """s b h L / t x (...) x (1 + (p - 1) / (p v)): 31 chunks of 4 layers in flight on stage 0."""
    plan = Plan(
        tp=8,
        pp=8,
        interleave=3,
        zero=0,
        sequence_parallel=sequence_parallel,
        recompute=Recompute(mode=mode),
    )
    spec = find_model("gpt3-175b")
    run = compile_small(spec, plan, 64, accumulation=16, microbatch=1, sequence=2048, stack=OPEN)
    one = segment(run.program, "layers.0 forward").delta()["activations"]
    sbh = 2048 * 12288
    core = 5 * 96 * 2048 / 12288
    factor = {
        ("none", False): 10 + 24 / 8 + core / 8,
        ("none", True): (34 + core) / 8,
        ("selective", True): 34 / 8,
        ("full", False): 2,
    }[mode, sequence_parallel]
    assert one == sbh * factor
    assert 31 * 4 * one / GIB == pytest.approx(gib, abs=0.005)
    # the simulated peak adds the embedding's mask, the working set of a layer, and transfers
    simulated = simulate(run.program, flat_times(run.program))
    found = simulated.peaks[0].total - sum(run.program.classes[0].persistent.values())
    assert 31 * 4 * one <= found <= 31 * 4 * one * 1.03 + GIB


# -- one layer by hand ---------------------------------------------------------------------------


def test_one_layer_worked_by_hand() -> None:
    """Hidden 8, 2 heads on 1 KV head of size 4, MLP 16, vocabulary 32, 4 tokens.

    Parameters: q 64, k 32, v 32, out 64, MLP 3 x 128, norms 3 x 8, tables 2 x 256: 1112.
    Kept per token (2 bytes each): x 8, norm 8, q 8, k 4, v 4, core 8, residual 8, norm 8, up 16,
    gate 16, act 16, x_out 8, norm 8: 120. In fp32: log-sum-exp 2, maximum and sum of the loss 2.
    The peak is the gradient of the logits, next to the logits: 2 x 32 values per token.
    """
    spec = llama(layers=1, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=32)
    program = compile_small(spec, Plan(zero=0), 1, accumulation=1, microbatch=1, sequence=4).program
    simulated = simulate(program, flat_times(program))
    (peak,) = simulated.peaks
    assert dict(peak.parts) == {
        "weights": 1112 * 2,
        "gradients": 1112 * 4,
        "optimizer": 1112 * 12,
        "activations": 4 * (120 * 2 + 4 * 4),
        "logits": 4 * 2 * 32 * 2,
    }
    assert "loss.loss.d" in peak.moment
    assert simulated.classes[0].peak_allocated_bytes == 1112 * 18 + 1024 + 512


def test_a_stack_may_keep_wider_copies_of_the_logits() -> None:
    """fp32, twice: 8 bytes per value beside the gradient in the compute dtype."""
    spec = llama(layers=1, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=32)
    stack = replace(STACK, logits_dtype="fp32", logits_copies=2.0)
    run = compile_small(
        spec, Plan(zero=0), 1, accumulation=1, microbatch=1, sequence=4, stack=stack
    )
    (peak,) = simulate(run.program, flat_times(run.program)).peaks
    assert peak.parts["logits"] == 4 * 32 * (8 + 2)


def test_during_an_operator_its_inputs_and_outputs_live_together() -> None:
    """MLP act of the same layer in forward: up and gate stay, the output comes to them."""
    spec = llama(layers=1, hidden=8, heads=2, kv_heads=1, ffn=16, vocab=32)
    program = compile_small(spec, Plan(zero=0), 1, accumulation=1, microbatch=1, sequence=4).program
    profile = segment_profile(segment(program, "layers.0 forward"))
    kept = sum(profile.delta.values())
    # the highest point: the down projection's output waits for the residual that replaces it
    assert sum(profile.peak.values()) == kept + 4 * 2 * 8
    assert profile.where.endswith("mlp.residual")


# -- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "gradients", "states"),
    [
        (Precision(grad_accumulate="fp32"), "adamw", 2, 4, 12),
        (Precision(), "adamw", 2, 2, 12),
        (Precision(master=None, moments="bf16"), "adamw", 2, 2, 4),
        (FSDP_MIXED, "adamw", 4, 4, 8),
        (Precision(grad_accumulate="fp32"), "sgd", 2, 4, 4),
        (Precision(grad_accumulate="fp32"), "none", 2, 4, 0),
    ],
)
def test_bytes_per_parameter(
    precision: Precision, optimizer: str, weights: float, gradients: float, states: float
) -> None:
    run = compile_small(llama(), Plan(zero=0), 1, precision=precision, optimizer=optimizer)
    n = run.graph.num_parameters
    expected = {"weights": weights * n, "gradients": gradients * n, "optimizer": states * n}
    assert run.program.classes[0].persistent == expected


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "states"),
    [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)],
)
def test_zero_divides_states_then_gradients_then_weights(
    zero: int, weights: int, gradients: int, states: int
) -> None:
    run = compile_small(llama(), Plan(preset="deepspeed", zero=zero), 4)
    n = run.graph.num_parameters
    found = run.program.classes[0].persistent
    assert found["weights"] == pytest.approx(2 * n / weights)
    assert found["gradients"] == pytest.approx(4 * n / gradients)
    assert found["optimizer"] == pytest.approx(12 * n / states)


def test_gathered_weights_live_for_the_time_of_use() -> None:
    """Prefetch 1: two units at a time; without resharding all of them until their backward."""
    spec = llama(layers=8)
    layer = 2.0 * (2 * H * H + 2 * H * 32 + 3 * H * 96 + 2 * H)

    def gathered(**knobs: object) -> float:
        plan = Plan(preset="fsdp", zero=3, **knobs)  # type: ignore[arg-type]
        program = compile_small(spec, plan, 4, precision=FSDP_MIXED, microbatch=64).program
        return simulate(program, flat_times(program)).peaks[0].parts["gathered weights"]

    assert gathered(prefetch=1) <= 2 * layer + 2.0 * (160 * H + H)
    assert gathered(reshard=False) >= 8 * layer


# -- in flight -----------------------------------------------------------------------------------


def kept_of_stage(program: Program, stage: int) -> float:
    """Activations that one forward of the stage leaves behind."""
    entries = program.classes[stage].entries
    first = next(e for e in entries if isinstance(e, Run) and e.slot == "F")
    return sum(program.segments[s].delta().get("activations", 0.0) for s in first.segments)


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"), [("1f1b", 0, 4), ("1f1b", 2, 2), ("gpipe", 0, 8)]
)
def test_activations_are_kept_once_per_micro_batch_in_flight(
    schedule: str, stage: int, expected: int
) -> None:
    """Stage s of 4 keeps 4 - s micro-batches under 1F1B, all 8 under GPipe."""
    plan = Plan(pp=4, zero=0, schedule=schedule)
    program = compile_small(llama(layers=8), plan, 4, accumulation=8, microbatch=B).program
    simulated = simulate(program, flat_times(program))
    one = kept_of_stage(program, stage)
    found = simulated.peaks[stage].total - sum(program.classes[stage].persistent.values())
    boundary = 2.0 * B * S * H  # the output leaves with its transfer
    assert expected * (one - boundary) < found < (expected + 1) * one


# -- balance -------------------------------------------------------------------------------------


def balance(program: Program, rank_class: RankClass) -> dict[str, float]:
    """What is left of each part after all entries of a step."""
    left: dict[str, float] = {}
    for entry in rank_class.entries:
        changes = [entry.delta_end]
        if isinstance(entry, Comm):
            changes.append(entry.delta_start)
        else:
            changes += [program.segments[index].delta() for index in entry.segments]
        for change in changes:
            for part, value in change.items():
                left[part] = left.get(part, 0.0) + value
    return {part: value for part, value in left.items() if abs(value) > 1e-6}


def test_gathered_boundaries_are_freed_as_they_were_allocated() -> None:
    stack = replace(STACK, scatter_gather=True)
    program = compile_small(llama(), Plan(tp=2, pp=2, zero=0), 4, stack=stack).program
    assert [balance(program, c) for c in program.classes] == [{}, {}]


# -- what is alive, by module --------------------------------------------------------------------


def test_modules_add_up_to_the_parts() -> None:
    """The same peak booked twice: by part and by module, with pipelines and sharding."""
    for plan, devices in (({"tp": 2, "pp": 2}, 8), ({"preset": "fsdp"}, 4)):
        run = load_run(
            {
                "model": {"family": "llama", "layers": 4, "hidden": 64, "heads": 8, "vocab": 160},
                "training": {"sequence": 64, "microbatch": 2, "global_batch": 32},
                "plan": plan,
                "cluster": f"1x{devices} h100-sxm",
            }
        )
        classes, modules = predict(run).classes, alive_by_module(run)
        assert len(classes) == len(modules)
        for rank_class, alive in zip(classes, modules, strict=True):
            total = sum(rank_class.peak_parts_bytes.values())
            assert sum(alive.values()) == pytest.approx(total, abs=1.0)
            assert any(name.startswith("layers.") for name in alive)
