"""What one optimizer step must communicate between replicas and stages, line by line.

N counts the parameters of one rank, n = dp x cp ranks share them, a micro-steps make a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from foretrain.frontends.spec import ModelSpec
from foretrain.program import Comm, CommEvent, Program, Run
from foretrain.strategy.plan import Overlap, Plan
from support import (
    STACK,
    Small,
    collective,
    compile_small,
    gpt,
    llama,
    step_collectives,
    wire_bytes,
)

G, W = 4.0, 2.0  # bytes of the reduced gradient (fp32) and of the gathered weight (bf16)

LLAMA, GPT = llama(), gpt()
PRESETS = ("megatron", "deepspeed", "ddp", "fsdp")


def parameters(spec: ModelSpec) -> int:
    """Trained parameters of the whole model, counted by hand; tied tables once."""
    h, f, kv = spec.hidden, spec.ffn, spec.kv_heads * spec.head_dim
    layer = h * h * 2 + 2 * h * kv + (3 if spec.gated else 2) * h * f
    norm = h if spec.norm == "rmsnorm" else 2 * h
    biases = 0 if spec.family == "llama" else (h + 2 * kv) + h + f + h
    tables = spec.vocab * h * (1 if spec.tied else 2)
    positions = (spec.max_positions or 0) * h if spec.positions == "learned" else 0
    return spec.layers * (layer + 2 * norm + biases) + norm + tables + positions


def data_parallel(
    plan: Plan, world: int, *, accumulation: int = 4, spec: ModelSpec = LLAMA, **kw: object
) -> Program:
    run: Small = compile_small(spec, plan, world, accumulation=accumulation, **kw)  # type: ignore[arg-type]
    return run.program


def kinds(program: Program, stage: int = 0) -> Counter[str]:
    """How many collectives of each kind one rank launches in a step."""
    found: Counter[str] = Counter()
    for (kind, _, _), count in step_collectives(program, stage).items():
        found[kind] += count
    return found


# -- 3. data parallel in all its forms -----------------------------------------------------------


def test_parameters_are_counted_like_the_graph() -> None:
    for spec in (LLAMA, GPT):
        run = compile_small(spec, Plan(zero=0), 1)
        assert run.graph.num_parameters == parameters(spec)


@pytest.mark.parametrize("preset", ["ddp", "megatron", "deepspeed"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["llama", "gpt"])
def test_ddp_reduces_all_gradients_once_per_step(
    preset: str, accumulation: int, spec: ModelSpec
) -> None:
    n, world = parameters(spec), 4
    program = data_parallel(
        Plan(preset=preset, zero=0), world, accumulation=accumulation, spec=spec
    )
    assert set(kinds(program)) == {"all_reduce"}
    assert wire_bytes(program) == pytest.approx(2 * 3 / 4 * n * G)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("preset", ["megatron", "deepspeed"])
def test_zero_1_scatters_gradients_and_gathers_weights_once(preset: str, accumulation: int) -> None:
    n = parameters(LLAMA)
    program = data_parallel(Plan(preset=preset, zero=1), 4, accumulation=accumulation)
    assert set(kinds(program)) == {"reduce_scatter", "all_gather"}
    assert wire_bytes(program) == pytest.approx(3 / 4 * n * (G + W))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("preset", ["megatron", "deepspeed"])
def test_zero_2_scatters_gradients_every_micro_step(preset: str, accumulation: int) -> None:
    n = parameters(LLAMA)
    program = data_parallel(Plan(preset=preset, zero=2), 4, accumulation=accumulation)
    assert wire_bytes(program) == pytest.approx(3 / 4 * n * (accumulation * G + W))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_zero_2_with_a_full_accumulator_scatters_once(accumulation: int) -> None:
    """A memory override of the root keeps whole gradients: the bytes are those of ZeRO-1."""
    full = {"": {"memory": {"grad_accumulator": {}}}}
    program = data_parallel(Plan(zero=2, overrides=full), 4, accumulation=accumulation)
    assert wire_bytes(program) == pytest.approx(3 / 4 * parameters(LLAMA) * (G + W))
    kept = data_parallel(Plan(zero=1), 4, accumulation=accumulation)
    assert program.classes[0].persistent == kept.classes[0].persistent


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("preset", ["fsdp", "deepspeed"])
def test_fsdp_gathers_twice_and_scatters_once_per_micro_step(
    preset: str, accumulation: int
) -> None:
    """The last unit (the head) stays gathered from its forward to its backward."""
    n, a, head = parameters(LLAMA), accumulation, LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    program = data_parallel(Plan(preset=preset, zero=3), 4, accumulation=a)
    expected = 3 / 4 * (a * n * (2 * W + G) - a * head * W)
    assert wire_bytes(program) == pytest.approx(expected)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_fsdp_without_resharding_gathers_once_per_micro_step(accumulation: int) -> None:
    n, a = parameters(LLAMA), accumulation
    program = data_parallel(Plan(preset="fsdp", zero=3, reshard=False), 4, accumulation=a)
    assert wire_bytes(program) == pytest.approx(3 / 4 * n * a * (W + G))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_fsdp_with_a_full_accumulator_scatters_once(accumulation: int) -> None:
    n, a, head = parameters(LLAMA), accumulation, LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    full = {"": {"memory": {"grad_accumulator": {}}}}
    program = data_parallel(Plan(preset="fsdp", zero=3, overrides=full), 4, accumulation=a)
    assert wire_bytes(program) == pytest.approx(3 / 4 * (2 * a * n * W - a * head * W + n * G))


def test_hsdp_shards_inside_a_group_and_reduces_shards_between_groups() -> None:
    """8 ranks as 2 replicas of 4 shards, one micro-step."""
    n, head = parameters(LLAMA), LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    program = data_parallel(Plan(preset="fsdp", zero=3, shard=4), 8, accumulation=1)
    inside = wire_bytes(program, axes=("dp_shard",))
    between = wire_bytes(program, axes=("dp_replicate",))
    assert inside == pytest.approx(3 / 4 * (n * (2 * W + G) - head * W))
    assert between == pytest.approx(2 * 1 / 2 * n / 4 * G)
    assert wire_bytes(program) == inside + between


def test_replicas_of_shards_are_reduced_once_per_step() -> None:
    """With accumulation the shard stays a partial sum over the replicas until the last one."""
    n, a, head = parameters(LLAMA), 4, LLAMA.vocab * LLAMA.hidden + LLAMA.hidden
    program = data_parallel(Plan(preset="fsdp", zero=3, shard=4), 8, accumulation=a)
    inside = wire_bytes(program, axes=("dp_shard",))
    assert inside == pytest.approx(3 / 4 * a * (n * (2 * W + G) - head * W))
    assert wire_bytes(program, axes=("dp_replicate",)) == pytest.approx(2 * 1 / 2 * n / 4 * G)


@pytest.mark.parametrize("plan", [Plan(zero=z, tp=2) for z in (0, 1, 2, 3)], ids=str)
def test_tensor_parallel_ranks_reduce_their_part(plan: Plan) -> None:
    """N is what one rank holds: everything but the norms is split over tp."""
    norms = (2 * LLAMA.layers + 1) * LLAMA.hidden
    n = (parameters(LLAMA) - norms) / 2 + norms
    a = 1
    expected = {
        0: 2 * 3 / 4 * n * G,
        1: 3 / 4 * n * (G + W),
        2: 3 / 4 * n * (a * G + W),
        3: 3 / 4 * (n * (2 * W + G) - (LLAMA.vocab * LLAMA.hidden / 2 + LLAMA.hidden) * W),
    }
    program = data_parallel(plan, 8, accumulation=a)
    assert wire_bytes(program) == pytest.approx(expected[plan.zero or 0])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_are_pieces_of_the_same_total(preset: str, overlap: bool) -> None:
    n = parameters(LLAMA)
    for mib in (0.01, 0.05, 10.0, None):
        plan = Plan(preset=preset, zero=0, bucket_mib=mib, overlap=Overlap(grad=overlap))
        program = data_parallel(plan, 4)
        assert wire_bytes(program) == pytest.approx(2 * 3 / 4 * n * G)


def test_overlapped_buckets_follow_the_backward_from_the_last_layer() -> None:
    """Every bucket waits for the backward of the units in it, the head's bucket first."""
    plan = Plan(preset="ddp", zero=0, bucket_mib=0.05, overlap=Overlap(grad=True))
    program = data_parallel(plan, 4, accumulation=2)
    entries = program.classes[0].entries
    order = [
        entry.layer if isinstance(entry, Run) else "reduce"
        for entry in entries
        if (isinstance(entry, Run) and entry.slot == "B" and entry.microbatch == 1)
        or (isinstance(entry, Comm) and entry.key is None)
    ]
    names = [name for name in order if name != "reduce"]
    assert names[0] == "head"
    assert names[-1] == "embedding"
    assert len(names) == LLAMA.layers + 2
    assert "reduce" in order[1:-1]
    assert order[-1] == "reduce"


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_reduced_by_the_last_micro_step_only(zero: int) -> None:
    plan = Plan(preset="megatron", zero=zero, overlap=Overlap(grad=True))
    program = data_parallel(plan, 4, accumulation=4)
    last = max(
        i for i, e in enumerate(program.classes[0].entries) if isinstance(e, Run) and e.slot == "F"
    )
    reductions = [
        i
        for i, entry in enumerate(program.classes[0].entries)
        if isinstance(entry, Comm) and entry.stream == "reduce"
    ]
    assert min(reductions) > last


def test_zero_shards_over_cp_too() -> None:
    """n = dp x cp: gradients are partial over both, and both hold a part of the states."""
    program = data_parallel(Plan(zero=1, cp=2), 4)
    n = parameters(LLAMA)
    assert wire_bytes(program) == pytest.approx(3 / 4 * n * (G + W))
    assert program.classes[0].persistent["optimizer"] == pytest.approx(12 * n / 4)


# -- 4. tied weights -----------------------------------------------------------------------------


def tied_reductions(program: Program) -> list[tuple[int, float, tuple[int, ...]]]:
    """Stage, elements and representative group of every reduction between stages."""
    found: list[tuple[int, float, tuple[int, ...]]] = []
    for rank_class in program.classes:
        for entry in rank_class.entries:
            if isinstance(entry, Comm) and (entry.key or "").startswith("tied embedding"):
                event = program.events[entry.event]
                assert isinstance(event, CommEvent)
                kind, axes, elements = collective(program, entry)
                assert (kind, axes) == ("all_reduce", ("pp",))
                found.append((rank_class.stage, elements, event.ranks))
    return found


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_tied_table_is_reduced_once_between_first_and_last_stage(
    pp: int, tp: int, zero: int
) -> None:
    program = data_parallel(Plan(pp=pp, tp=tp, zero=zero), pp * tp, spec=GPT)
    elements = GPT.vocab * GPT.hidden / tp
    pair = (0, (pp - 1) * tp)
    assert tied_reductions(program) == [(0, elements, pair), (pp - 1, elements, pair)]


def test_interleaved_chunks_keep_first_and_last_on_different_ranks() -> None:
    program = data_parallel(Plan(pp=2, interleave=2, zero=0), 2, spec=GPT)
    assert [stage for stage, _, _ in tied_reductions(program)] == [0, 1]


def test_a_tied_table_on_one_rank_is_not_reduced_and_counts_once() -> None:
    program = data_parallel(Plan(zero=0), 2, spec=GPT)
    assert tied_reductions(program) == []
    assert program.classes[0].persistent["weights"] == 2.0 * parameters(GPT)


def test_the_second_copy_of_a_tied_table_takes_memory() -> None:
    program = data_parallel(Plan(pp=2, zero=0), 2, spec=GPT)
    total = sum(c.persistent["weights"] for c in program.classes)
    assert total == 2.0 * (parameters(GPT) + GPT.vocab * GPT.hidden)


def test_an_untied_model_reduces_nothing_between_stages() -> None:
    assert tied_reductions(data_parallel(Plan(pp=4, zero=0), 4)) == []


# -- 5. pipeline boundaries ----------------------------------------------------------------------


def transfers(program: Program, stage: int, word: str) -> list[float]:
    """Bytes of the transfers of one rank whose label starts with `word`."""
    return [
        program.events[entry.event].bytes
        for entry in program.classes[stage].entries
        if isinstance(entry, Comm) and entry.label.startswith(word)
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_boundary_carries_bsh_or_its_part_with_sequence_parallel(sequence_parallel: bool) -> None:
    b, s, h, t = 2, 32, 64, 4
    plan = Plan(tp=t, pp=2, zero=0, sequence_parallel=sequence_parallel)
    program = data_parallel(plan, 2 * t, accumulation=3)
    size = b * s * h * 2.0 / (t if sequence_parallel else 1)
    for stage, word in ((0, "send activation"), (1, "recv activation")):
        assert transfers(program, stage, word) == [size] * 3
    for stage, word in ((1, "send gradient"), (0, "recv gradient")):
        assert transfers(program, stage, word) == [size] * 3
    assert transfers(program, 0, "recv activation") == transfers(program, 1, "recv gradient") == []


def test_a_stack_may_send_a_part_and_gather_it() -> None:
    b, s, h, t = 2, 32, 64, 4
    stack = replace(STACK, scatter_gather=True)
    program = data_parallel(Plan(tp=t, pp=2, zero=0), 2 * t, accumulation=3, stack=stack)
    assert transfers(program, 0, "send activation") == [b * s * h * 2.0 / t] * 3
    gathers = transfers(program, 1, "boundary")
    assert gathers == [b * s * h * 2.0] * 3
    # with sequence parallel every rank has only its part anyway
    plan = Plan(tp=t, pp=2, zero=0, sequence_parallel=True)
    program = data_parallel(plan, 2 * t, accumulation=3, stack=stack)
    assert transfers(program, 1, "boundary") == []


@pytest.mark.parametrize(("pp", "interleave"), [(2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_one_transfer_per_boundary_micro_batch_and_direction(pp: int, interleave: int) -> None:
    """v p - 1 boundaries, each passed once forward and once backward by every micro-batch."""
    a = 8
    spec = llama(layers=8)
    plan = Plan(pp=pp, interleave=interleave, zero=0)
    program = data_parallel(plan, pp, accumulation=a, spec=spec)
    for word in ("activation", "gradient"):
        sent = sum(len(transfers(program, stage, f"send {word}")) for stage in range(pp))
        received = sum(len(transfers(program, stage, f"recv {word}")) for stage in range(pp))
        assert sent == received == a * (interleave * pp - 1)
    keys = [
        entry.key
        for c in program.classes
        for entry in c.entries
        if isinstance(entry, Comm) and entry.category == "pp"
    ]
    assert set(Counter(keys).values()) == {2}  # a sender and a receiver each
