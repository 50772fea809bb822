"""T5: parameters, FLOP, what its layers communicate and what its stages send, by closed forms.

b s h of the tables below is microbatch x source x hidden of one data-parallel rank; t is the
target's length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.flops import model_flops_per_sample
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.transformer import build_graph
from foretrain.predict import compile_run, predict
from foretrain.program import Comm, CommEvent, ComputeEvent, Program
from foretrain.run.load import load_run
from foretrain.simulator.simulate import simulate
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan, Recompute
from support import (
    FSDP_MIXED,
    OPEN,
    STACK,
    Collective,
    collectives_of,
    compile_small,
    flat_times,
    step_collectives,
    t5,
)

B, S, T, H, F, V = 2, 32, 16, 64, 96, 160
INNER = 8 * 16  # heads x head_dim
BSH, BTH = B * S * H, B * T * H
SELF = 4 * H * INNER
MLP = 2 * H * F
CORE = "attention"
ENCODER, DECODER = SELF + MLP + 2 * H, 2 * SELF + MLP + 3 * H
TABLE = 8 * 8  # buckets x heads


def program(plan: Plan, world: int, spec: ModelSpec | None = None, **kw: object) -> Program:
    run = compile_small(
        spec or t5(),
        plan,
        world,
        microbatch=B,
        sequence=S,
        target=T,
        **kw,  # type: ignore[arg-type]
    )
    return run.program


# -- parameters and FLOP -------------------------------------------------------------------------


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40), st.booleans(),
    st.booleans(), st.sampled_from(["fused", "unfused"]),
)  # fmt: skip
def test_parameters_and_flops_equal_the_closed_forms(
    layers: int, decoder: int, source: int, target: int, gated: bool, tied: bool, kind: str
) -> None:
    spec = t5(layers=layers, decoder_layers=decoder, tied=tied,
              activation="geglu" if gated else "relu")  # fmt: skip
    graph = build_graph(spec, batch=3, sequence=source, target_sequence=target, attention=kind)
    mlp = MLP * 3 // 2 if gated else MLP
    count = layers * (ENCODER - MLP + mlp) + decoder * (DECODER - MLP + mlp)
    count += 2 * TABLE + 2 * H + V * H * (1 if tied else 2)
    assert graph.num_parameters == count
    half = kind == "fused"
    expected = model_flops_per_sample(spec, source, half, target) * 3 / 3
    assert graph.forward_flops() == pytest.approx(expected, rel=1e-12)
    # 2 FLOP per parameter of a matrix and token, and 4 x pairs x heads x head_dim
    matrices = layers * (SELF + mlp) * source + decoder * (SELF + mlp) * target + V * H * target
    cross = decoder * (SELF // 2 * target + SELF // 2 * source)
    pairs = layers * source**2 + decoder * (target**2 * (0.5 if half else 1) + source * target)
    assert expected == pytest.approx(3 * (2.0 * (matrices + cross) + 4.0 * INNER * pairs))


def test_the_events_of_cross_attention_have_two_lengths() -> None:
    made = program(Plan(zero=0), 1, replace(t5(), positions="none"))
    cores = [dict(e.shape) for e in made.events if isinstance(e, ComputeEvent) and e.op == CORE]
    shapes = {(core["seq_q"], core["seq_kv"], core["causal"]) for core in cores}
    assert shapes == {(S, S, 0.0), (T, T, 1.0), (T, S, 0.0)}


def test_a_table_of_positions_is_shared_by_the_layers_of_a_stack() -> None:
    one = program(Plan(zero=0), 1)
    assert (
        one.classes[0].persistent["weights"]
        == 2.0 * build_graph(t5(), batch=1, sequence=S, target_sequence=T).num_parameters
    )
    unfused = build_graph(t5(), batch=1, sequence=S, target_sequence=T, attention="unfused")
    assert [op.name for op in unfused.block("decoder").ops if op.name.endswith("bias")] == [
        "attention.bias"
    ]  # none in cross attention


# -- Megatron: tensor and sequence parallelism ---------------------------------------------------


def layers_of(made: Program, name: str) -> list[Collective]:
    """The collectives of every copy of a layer: all alike."""
    found = [s for s in made.segments if s.name == name]
    assert found, name
    first = collectives_of(made, name)
    for one in found:
        assert len([i for i in one.items if i.stream != "compute"]) == len(first)
    return first


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("stack", [STACK, OPEN])
def test_tensor_parallelism(tp: int, stack: Stack) -> None:
    """All-reduce of b t h after each part; backward one more, of b s h, for keys and values."""
    made = program(Plan(tp=tp, zero=0), tp, stack=stack)

    def reduce(n: int) -> Collective:
        return ("all_reduce", ("tp",), n)

    assert layers_of(made, "encoder.0 forward") == [reduce(BSH)] * 2
    assert layers_of(made, "encoder.0 backward") == [reduce(BSH)] * 2
    assert layers_of(made, "decoder.0 forward") == [reduce(BTH)] * 3
    assert Counter(layers_of(made, "decoder.0 backward")) == {reduce(BTH): 3, reduce(BSH): 1}
    assert layers_of(made, "embedding forward") == [reduce(BSH)]
    assert layers_of(made, "bridge.0 forward") == [reduce(BTH)]


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism(tp: int) -> None:
    """Each all-reduce is a gather and a scatter; what the products read is gathered again."""
    made = program(Plan(tp=tp, zero=0, sequence_parallel=True), tp)

    def counts(gathers: Counter[int], scatters: Counter[int]) -> Counter[Collective]:
        found: Counter[Collective] = Counter()
        for kind, times in (("all_gather", gathers), ("reduce_scatter", scatters)):
            found.update({(kind, ("tp",), n): c for n, c in times.items()})
        return found

    found = {
        name: Counter(layers_of(made, name))
        for name in ("encoder.0 forward", "encoder.0 backward", "decoder.0 forward",
                     "decoder.0 backward")
    }  # fmt: skip
    assert found == {
        "encoder.0 forward": counts(Counter({BSH: 2}), Counter({BSH: 2})),
        "encoder.0 backward": counts(Counter({BSH: 4}), Counter({BSH: 2})),
        "decoder.0 forward": counts(Counter({BTH: 3, BSH: 1}), Counter({BTH: 3})),
        "decoder.0 backward": counts(Counter({BTH: 6, BSH: 1}), Counter({BTH: 3, BSH: 1})),
    }


# -- ZeRO and FSDP -------------------------------------------------------------------------------

PARAMETERS = 2 * ENCODER + 4 * DECODER + 2 * TABLE + 2 * H + V * H


def data(made: Program) -> dict[tuple[str, float], int]:
    """Kind and elements of all data-parallel collectives of a step -> how often."""
    found: Counter[tuple[str, float]] = Counter()
    for (kind, axes, elements), count in step_collectives(made).items():
        assert axes == ("dp_shard",)
        found[kind, elements] += count
    return dict(found)


@pytest.mark.parametrize("world", [2, 4])
def test_zero_0_to_2_move_every_parameter_once_or_twice(world: int) -> None:
    assert data(program(Plan(zero=0), world)) == {("all_reduce", PARAMETERS): 1}
    assert data(program(Plan(zero=1), world)) == {
        ("reduce_scatter", PARAMETERS): 1,
        ("all_gather", PARAMETERS): 1,
    }
    steps = 4
    two = data(program(Plan(zero=2), world, accumulation=steps))
    assert sum(n * c for (kind, n), c in two.items() if kind == "reduce_scatter") == (
        steps * PARAMETERS
    )
    assert sum(n * c for (kind, n), c in two.items() if kind == "all_gather") == PARAMETERS


def test_fsdp_gathers_every_unit_twice_and_scatters_once_per_micro_step() -> None:
    steps = 4
    made = data(program(Plan(preset="fsdp", zero=3), 4, accumulation=steps, precision=FSDP_MIXED))
    first, rest = DECODER + TABLE, DECODER
    units = {V * H: 1, ENCODER + TABLE: 1, ENCODER: 1, first: 1, rest: 3}
    gathers = {("all_gather", float(n)): 2 * steps * c for n, c in units.items()}
    scatters = {("reduce_scatter", float(n)): steps * c for n, c in units.items()}
    # the last norms: the encoder's stand in the bridge (gathered twice), the decoder's in the head
    ends = {("all_gather", float(H)): 3 * steps, ("reduce_scatter", float(H)): 2 * steps}
    assert made == {**gathers, **scatters, **ends}


# -- pipeline stages -----------------------------------------------------------------------------


def transfers(made: Program) -> dict[tuple[int, int], float]:
    """(sending, receiving stage) -> bytes of a transfer."""
    return {
        (e.ranks[0], e.ranks[1]): e.bytes
        for e in made.events
        if isinstance(e, CommEvent) and e.collective == "send_recv"
    }


def test_the_encoder_output_travels_to_all_later_stages() -> None:
    made = program(Plan(pp=3), 3)  # two layers of the encoder, then four of the decoder
    assert transfers(made) == {
        (0, 1): 2 * BSH, (1, 0): 2 * BSH, (1, 2): 2 * (BTH + BSH), (2, 1): 2 * (BTH + BSH),
    }  # fmt: skip


def test_a_stage_may_hold_the_end_of_the_encoder_and_the_start_of_the_decoder() -> None:
    made = program(Plan(pp=3, stages=(1, 2, 3)), 3)
    both = 2 * (BTH + BSH)
    assert transfers(made) == {(0, 1): 2 * BSH, (1, 0): 2 * BSH, (1, 2): both, (2, 1): both}


def test_copies_of_the_word_table_and_of_positions_are_summed_over_their_stages() -> None:
    made = program(Plan(pp=6), 6)
    ties: dict[int, set[tuple[tuple[int, ...], float]]] = {stage: set() for stage in range(6)}
    for rank_class in made.classes:
        for entry in rank_class.entries:
            if isinstance(entry, Comm) and (entry.key or "").startswith("tied"):
                event = made.events[entry.event]
                assert isinstance(event, CommEvent)
                ties[rank_class.stage].add((event.ranks, event.bytes / 4))
    word, encoder, decoder = ((0, 2, 5), V * H), ((0, 1), TABLE), ((2, 3, 4, 5), TABLE)
    assert ties == {
        0: {word, encoder}, 1: {encoder}, 2: {word, decoder}, 3: {decoder}, 4: {decoder},
        5: {word, decoder},
    }  # fmt: skip


PLANS = [
    Plan(zero=0),
    Plan(tp=2, sequence_parallel=True, recompute=Recompute(mode="full")),
    Plan(tp=2, recompute=Recompute(mode="selective")),
    Plan(pp=2, recompute=Recompute(mode="full", layers=1)),
    Plan(pp=3),
    Plan(pp=3, interleave=2, schedule="interleaved"),
    Plan(pp=3, stages=(1, 2, 3)),
    Plan(pp=2, tp=2, sequence_parallel=True),
    Plan(preset="fsdp", zero=3, recompute=Recompute(mode="full")),
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("stack", [STACK, OPEN, replace(OPEN, scatter_gather=True)])
def test_memory_is_given_back_by_the_end_of_the_step(plan: Plan, stack: Stack) -> None:
    world = plan.pp * plan.tp * 2
    made = program(plan, world, accumulation=6, stack=stack)
    for flat in (False, True):
        for peak in simulate(made, flat_times(made), flat=flat).peaks:
            assert peak.timeline[-1][1] == pytest.approx(peak.timeline[0][1], abs=1.0)
            assert all(total > 0 for _, total, *_ in peak.timeline)


def test_the_encoder_output_is_kept_once_however_many_layers_read_it() -> None:
    """One more layer of the decoder saves nothing of the source's length but its k and v."""

    long, short = 2 * S, S
    grown: list[float] = []
    for source in (short, long):
        found: list[float] = []
        for layers in (2, 3):
            spec = t5(decoder_layers=layers, positions="none", dropout=0.0, attention_dropout=0.0)
            run = compile_small(spec, Plan(zero=0), 1, microbatch=B, sequence=source, target=T,
                                accumulation=1)  # fmt: skip
            # the head's segment is the fullest moment: all layers saved, nothing freed yet
            peaks = simulate(run.program, flat_times(run.program)).peaks
            found.append(peaks[0].parts["activations"])
        grown.append(found[1] - found[0])
    assert grown[1] - grown[0] == pytest.approx(2 * B * (long - short) * 2 * INNER)


# -- run files -----------------------------------------------------------------------------------

RUN = {
    "model": "t5-small",
    "training": {"sequence": 512, "target_sequence": 128, "global_batch": 16, "microbatch": 2},
    "cluster": "1x8 a100-sxm-80gb",
}


def test_a_run_of_two_sequences() -> None:
    result = predict(load_run({**RUN, "plan": {"tp": 2, "sequence_parallel": True}}))
    assert not any("no cost model" in line for line in result.warnings)
    assert result.tokens_per_s == pytest.approx(640 * result.samples_per_s)
    short = load_run(RUN, overrides={"training.target_sequence": 64})
    assert predict(short).step_time_s.value < result.step_time_s.value


def test_the_target_is_as_long_as_the_source_unless_given() -> None:
    run = load_run({**RUN, "training": {"sequence": 256, "global_batch": 16}})
    assert run.training.target_sequence == 256
    assert any("target_sequence = 256 (not given" in line for line in run.assumptions)
    assert load_run(RUN, overrides={"training.decoder_seq_length": 99}).training == replace(
        load_run(RUN).training, target_sequence=99
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "gpt2"}, "has no decoder beside an encoder"),
        ({"training.target_sequence": 0}, "training.target_sequence: out of range"),
        ({"plan.tp": 2, "plan.sequence_parallel": True, "training.target_sequence": 127},
         "target_sequence 127 is not a multiple of tp 2"),
        ({"plan.pp": 8, "plan.tp": 1}, "8 virtual stages do not divide the 12 layers"),
        ({"plan.cp": 2}, "context parallelism"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(change: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        load_run(RUN, overrides=change)


@pytest.mark.parametrize("key", ["parallel", "embedding_norm", "image", "window"])
def test_what_is_not_modelled_of_two_stacks_is_refused(key: str) -> None:
    value = 16 if key in ("image", "window") else True
    with pytest.raises(InputError, match=f"model.{key}: is not modelled"):
        resolve_model({"family": "t5", "layers": 2, "hidden": 8, "heads": 2, key: value})


def test_learned_positions_are_shared_by_both_stacks() -> None:
    spec = t5(positions="learned", max_positions=64)
    graph = build_graph(spec, batch=1, sequence=S, target_sequence=T)
    rows = [t for b in graph.blocks for t in b.weights if "position" in t.name]
    assert [t.tied_to for t in rows] == [None, "embedding/embedding.position.weight"]
    assert graph.num_parameters == PARAMETERS - 2 * TABLE + 64 * H
    compiled = compile_run(load_run(RUN))
    assert [b.name for b in compiled.graph.blocks] == [
        "embedding", "encoder", "bridge", "decoder", "head",
    ]  # fmt: skip
