"""Conservation in compiled programs: FLOP, gradient bytes and live bytes of random runs.

Expected numbers come from the model's sizes, written out here, not from the compiler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from foretrain.frontends.spec import ModelSpec
from foretrain.program import Comm, ComputeEvent, Program, RankClass, Run
from foretrain.simulator.simulate import simulate
from foretrain.strategy.tree import StrategyTree
from support import (
    RandomRun,
    Small,
    flat_times,
    launched,
    random_runs,
    wire_bytes,
)

CONTRACTIONS = ("gemm", "attention")
DATA_AXES = ("dp_replicate", "dp_shard", "cp")

# -- FLOP ----------------------------------------------------------------------------------------


def executed(program: Program) -> Counter[tuple[str, str, str]]:
    """FLOP of all ranks in one step by (op, direction, category)."""
    total: Counter[tuple[str, str, str]] = Counter()
    for stage, rank_class in enumerate(program.classes):
        for item, event in launched(program, stage):
            if isinstance(event, ComputeEvent) and event.op in CONTRACTIONS:
                key = (event.op, event.direction, item.category)
                total[key] += event.flops * len(rank_class.ranks)
    return total


def recomputed_layers(run: RandomRun, tree: StrategyTree) -> int:
    """Layers that repeat something: all, or the first one of every chunk."""
    if run.plan.recompute.mode == "none":
        return 0
    limit = run.plan.recompute.layers
    return sum(n if limit is None else min(limit, n) for n in tree.schedule.stages)


def layer_flops(run: RandomRun) -> dict[str, float]:
    """FLOP of one layer's forward on the samples of a micro-step of the whole job.

    Ranks that share a KV head (tp above kv_heads) each project it: that work is repeated.
    """
    spec, dp = run.spec, run.world // (run.plan.tp * run.plan.pp)
    tokens = run.microbatch * dp * run.sequence
    heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shared = max(1, run.plan.tp // spec.kv_heads)
    mlp = (3 if spec.gated else 2) * spec.hidden * spec.ffn
    square = 2 * 2 * run.sequence * heads * tokens
    fused = run.stack.attention == "fused"
    return {
        "linear": 2 * tokens * (spec.hidden * (2 * heads + 2 * kv * shared) + mlp),
        "fused core": square / 2 if fused else 0.0,  # a causal kernel skips half of the square
        "open core": 0.0 if fused else square,
    }


def head_flops(run: RandomRun) -> float:
    dp = run.world // (run.plan.tp * run.plan.pp)
    return 2.0 * run.microbatch * dp * run.sequence * run.spec.hidden * run.spec.vocab


@settings(max_examples=50)
@given(random_runs(max_world=32))
def test_no_split_loses_or_repeats_flop(run: RandomRun) -> None:
    small: Small = run.compile()
    found, a, layers = executed(small.program), run.accumulation, run.spec.layers
    one = layer_flops(run)
    gemm = layers * (one["linear"] + one["open core"]) + head_flops(run)
    core = layers * one["fused core"]
    expected = {
        ("gemm", "forward", "compute"): a * gemm,
        ("attention", "forward", "compute"): a * core,
        ("attention", "backward", "compute"): 2.5 * a * core,
    }
    for key, flops in expected.items():
        assert found[key] == pytest.approx(flops, rel=1e-12), key
    both = found["gemm", "backward_input", "compute"] + found["gemm", "backward_weight", "compute"]
    assert both == pytest.approx(2 * a * gemm, rel=1e-12)

    again, mode = recomputed_layers(run, small.tree), run.plan.recompute.mode
    full = a * again if mode == "full" else 0
    repeated = full * one["linear"] + a * again * one["open core"]
    assert found["gemm", "forward", "recompute"] == pytest.approx(repeated, rel=1e-12)
    assert found["attention", "forward", "recompute"] == pytest.approx(full * one["fused core"])
    assert set(found) <= {
        *expected,
        ("gemm", "backward_input", "compute"),
        ("gemm", "backward_weight", "compute"),
        ("gemm", "forward", "recompute"),
        ("attention", "forward", "recompute"),
    }


@settings(max_examples=50)
@given(random_runs(max_world=16))
def test_the_graph_counts_the_same_forward(run: RandomRun) -> None:
    graph = run.compile().graph
    contractions = sum(
        op.total_flops * block.repeat for block, op in graph.ops() if op.cost in CONTRACTIONS
    )
    whole = replace(run, plan=replace(run.plan, tp=1), world=run.world // run.plan.tp)
    one = layer_flops(whole)
    assert contractions == pytest.approx(
        run.spec.layers * sum(one.values()) + head_flops(whole), rel=1e-12
    )


@settings(max_examples=40)
@given(random_runs(max_world=16, max_layers=4))
def test_ranks_of_one_stage_share_its_layers(run: RandomRun) -> None:
    """Every layer runs once forward and once backward per micro-batch, on one stage."""
    program = run.compile().program
    runs: Counter[str] = Counter()
    for rank_class in program.classes:
        for entry in rank_class.entries:
            if isinstance(entry, Run) and entry.slot in ("F", "B"):
                for index in entry.segments:
                    block = program.segments[index].name.split()[0].split(".")[0]
                    runs[f"{block} {entry.slot}"] += 1
    a = run.accumulation
    assert runs == {
        **{f"layers {slot}": a * run.spec.layers for slot in "FB"},
        **{f"{block} {slot}": a for slot in "FB" for block in ("embedding", "head")},
    }
    ranks = [rank for rank_class in program.classes for rank in rank_class.ranks]
    assert sorted(ranks) == list(range(run.world))


# -- gradient bytes ------------------------------------------------------------------------------


def layer_parameters(spec: ModelSpec, tp: int) -> float:
    """Parameters of one layer on one rank: matrices and their biases split, norms whole."""
    h, f, heads = spec.hidden, spec.ffn, spec.heads * spec.head_dim
    kv = spec.kv_heads * spec.head_dim / min(tp, spec.kv_heads)
    norms = 2 * h * (1 if spec.norm == "rmsnorm" else 2)
    matrices = h * (2 * heads / tp + 2 * kv) + (3 if spec.gated else 2) * h * f / tp
    biases = 0.0
    if spec.qkv_bias:
        biases += heads / tp + 2 * kv
    if spec.out_bias:
        biases += h
    if spec.mlp_bias:
        biases += f / tp + h
    return norms + matrices + biases


def stage_parameters(run: RandomRun, tree: StrategyTree, stage: int) -> tuple[float, float]:
    """Parameters of one rank of a stage, and how many of them are the head's."""
    spec, tp, pp = run.spec, run.plan.tp, run.plan.pp
    layers = sum(tree.schedule.stages[stage::pp])
    total = layers * layer_parameters(spec, tp)
    head = 0.0
    if stage == 0:
        total += spec.vocab * spec.hidden / tp
        if spec.positions == "learned":
            total += (spec.max_positions or 0) * spec.hidden
    if stage == pp - 1:
        head = spec.hidden * (1 if spec.norm == "rmsnorm" else 2)
        if not (spec.tied and pp == 1):  # a tied table on the same rank counts once
            head += spec.vocab * spec.hidden / tp
    return total + head, head


@settings(max_examples=50)
@given(random_runs(max_world=32))
def test_gradients_and_weights_travel_as_the_zero_stage_says(run: RandomRun) -> None:
    """Bytes over the data axes, per rank: docs/explain/data-parallel.md. fp32 and bf16."""
    small = run.compile()
    a, zero, g, w = run.accumulation, run.plan.zero or 0, 4.0, 2.0
    sizes = dict(zip(small.program.mesh.axes, small.program.mesh.sizes, strict=True))
    shard, replicas = sizes["dp_shard"], sizes["dp_replicate"]
    inside, between = (shard - 1) / shard, 2 * (replicas - 1) / replicas
    for stage in range(run.plan.pp):
        n, head = stage_parameters(run, small.tree, stage)
        if zero == 0:
            data = shard * replicas
            expected = 2 * (data - 1) / data * n * g
        else:
            gradients = a if zero >= 2 and shard > 1 else 1
            weights = w
            if zero == 3:
                kept = 1 if not run.plan.reshard else 2
                weights = a * kept * w
            expected = inside * n * (gradients * g + weights) + between * n / shard * g
            if zero == 3 and run.plan.reshard:
                expected -= inside * a * head * w
        found = wire_bytes(small.program, stage, axes=DATA_AXES)
        assert found == pytest.approx(expected, rel=1e-9), (stage, zero)


@settings(max_examples=50)
@given(random_runs(max_world=16))
def test_states_of_a_stage_are_those_of_its_parameters(run: RandomRun) -> None:
    small = run.compile()
    zero = run.plan.zero or 0
    shard = small.program.mesh.size("dp_shard")
    for stage, rank_class in enumerate(small.program.classes):
        n, _ = stage_parameters(run, small.tree, stage)
        expected = {
            "weights": 2 * n / (shard if zero >= 3 else 1),
            "gradients": 4 * n / (shard if zero >= 2 else 1),
            "optimizer": 12 * n / (shard if zero >= 1 else 1),
        }
        for part, size in expected.items():
            # shards are rounded up, one element per kind of weight at most
            assert size - 1e-6 <= rank_class.persistent[part] <= size + 12 * 4


# -- live bytes ----------------------------------------------------------------------------------


def left_over(program: Program, rank_class: RankClass) -> dict[str, float]:
    """What is left of each part after all entries of a step."""
    left: Counter[str] = Counter()
    for entry in rank_class.entries:
        changes = [entry.delta_end]
        if isinstance(entry, Comm):
            changes.append(entry.delta_start)
        else:
            changes += [program.segments[index].delta() for index in entry.segments]
        for change in changes:
            for part, value in change.items():
                left[part] += value
    return {part: value for part, value in left.items() if abs(value) > 1e-6}


@settings(max_examples=50)
@given(random_runs(max_world=32))
def test_a_step_frees_what_it_allocated(run: RandomRun) -> None:
    program = run.compile().program
    for rank_class in program.classes:
        assert left_over(program, rank_class) == {}


@settings(max_examples=40)
@given(random_runs(max_world=16, max_layers=4))
def test_live_bytes_never_fall_below_the_states_and_return_to_them(run: RandomRun) -> None:
    program = run.compile().program
    simulated = simulate(program, flat_times(program, host_s=1e-6))
    for rank_class, peak, found in zip(
        program.classes, simulated.peaks, simulated.classes, strict=True
    ):
        states = sum(rank_class.persistent.values())
        levels = [level for _, level in peak.timeline]
        assert min(levels) >= states - 1e-6
        assert levels[-1] == pytest.approx(states)
        assert max(levels) == pytest.approx(peak.total)
        assert found.peak_allocated_bytes == peak.total
        for part, size in rank_class.persistent.items():
            assert peak.parts.get(part, 0.0) >= size - 0.5


@settings(max_examples=40)
@given(random_runs(max_world=16, max_layers=4))
def test_folded_and_flat_find_the_same_peak(run: RandomRun) -> None:
    program = run.compile().program
    times = flat_times(program)
    folded, flat = simulate(program, times), simulate(program, times, flat=True)
    for a, b in zip(folded.peaks, flat.peaks, strict=True):
        assert b.total == pytest.approx(a.total, rel=1e-2)


@settings(max_examples=50)
@given(random_runs(max_world=16))
def test_segments_wait_only_for_earlier_communication(run: RandomRun) -> None:
    """Waits of items and entries point backwards, and no item waits for a computation."""
    program = run.compile().program
    for segment in program.segments:
        for i, item in enumerate(segment.items):
            assert all(0 <= wait < i for wait in item.waits), item.label
            if item.stream == "compute":
                assert all(segment.items[w].stream != "compute" for w in item.waits), item.label
    for rank_class in program.classes:
        for i, entry in enumerate(rank_class.entries):
            assert all(0 <= wait < i for wait in entry.after)
