"""Context parallelism: the layouts of `cp` against sums by hand, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from foretrain import load_run, predict
from foretrain.errors import InputError
from foretrain.program import CommEvent, ComputeEvent, Program
from foretrain.strategy.plan import Plan
from support import compile_small, llama

RUN: dict[str, Any] = {
    "model": "llama-3-8b",
    "training": {"sequence": 8192, "global_batch": 8, "microbatch": 1},
    "plan": {"preset": "megatron", "zero": 1},
    "cluster": "1x8 h100-sxm",
}


def launches(program: Program, slot: str) -> list[tuple[Any, Any]]:
    """Items and events of one micro-batch's forward or backward."""
    found: list[tuple[Any, Any]] = []
    for entry in program.classes[0].entries:
        if getattr(entry, "slot", "") == slot and entry.microbatch == 0:
            for segment in entry.segments:
                items = program.segments[segment].items
                found += [(item, program.events[item.event]) for item in items]
    return found


def collectives(program: Program, slot: str) -> Counter[tuple[str, float]]:
    return Counter(
        (event.collective, event.bytes)
        for item, event in launches(program, slot)
        if isinstance(event, CommEvent) and item.axes == ("cp",)
    )


def work(program: Program, slot: str) -> float:
    """FLOP of a micro-batch without the sum of gradients, which is as large as the weights."""
    return sum(
        event.flops
        for item, event in launches(program, slot)
        if isinstance(event, ComputeEvent) and item.label != "accumulate gradients"
    )


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(cp: int, tp: int) -> None:
    spec, sequence, microbatch, width = llama(), 32, 2, 2
    run = compile_small(spec, Plan(cp=cp, tp=tp, zero=0), cp * tp, sequence=sequence)
    size = float(microbatch * sequence * spec.kv_heads / tp * spec.head_dim * width)
    assert collectives(run.program, "F") == {("all_gather", size): 2 * spec.layers}
    backward = collectives(run.program, "B")
    assert backward["reduce_scatter", size] == 2 * spec.layers
    assert backward["all_gather", size] == 2 * spec.layers  # saved as shares, gathered again


@pytest.mark.parametrize("cp", [2, 4])
def test_every_rank_has_its_share_of_the_work(cp: int) -> None:
    one = compile_small(llama(), Plan(zero=0), 1).program
    many = compile_small(llama(), Plan(cp=cp, zero=0), cp).program
    for slot in ("F", "B"):
        assert work(many, slot) == pytest.approx(work(one, slot) / cp, rel=1e-12)


def test_activations_shrink_and_weights_do_not() -> None:
    def parts(cp: int) -> dict[str, float]:
        run = load_run(RUN, overrides={"plan.cp": cp})
        assert run.plan.cp == cp
        return {part.name: part.value for part in _parts(predict(run))}

    one, two = parts(1), parts(2)
    assert two["weights"] == one["weights"]
    assert two["optimizer"] == one["optimizer"]  # shards over dp x cp = 8 ranks either way
    assert two["activations"] == pytest.approx(one["activations"] / 2, rel=0.01)


def _parts(result: Any) -> list[Any]:
    class Part:
        def __init__(self, name: str, value: float) -> None:
            self.name, self.value = name, value

    return [Part(name, value) for name, value in result.memory.parts_bytes.items()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training.sequence": 8190, "plan.cp": 2}, "8190 is not a multiple of 2 x cp 2 = 4"),
        (
            {"plan.cp": 2, "plan.tp": 4, "plan.sequence_parallel": True, "training.sequence": 8200},
            "8200 is not a multiple of 2 x cp 2 x tp 4 = 16",
        ),
        (
            {"plan.cp": 16},
            "plan.cp: tp 1 x pp 1 x cp 16 = 16 does not divide the 8 devices of the cluster "
            "(got 16); allowed: 1, 2, 4, 8; nearest: cp 8",
        ),
        (
            {"plan.tp": 4, "plan.cp": 3, "training.sequence": 12288},
            "(got 3); allowed: 1, 2; nearest: cp 2",
        ),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_run(RUN, overrides=change)
    assert message in str(caught.value)


def test_models_without_a_sequence_to_split_are_refused() -> None:
    run = {
        "model": "resnet-50",
        "training": {"global_batch": 64},
        "plan": {"preset": "ddp", "cp": 2},
        "cluster": "1x8 h100-sxm",
    }
    with pytest.raises(InputError, match="context parallelism of resnet-50 is not modelled"):
        load_run(run)


def test_lengths_of_encoders_need_no_pair_of_chunks() -> None:
    change = {"model": "bert-large", "training.sequence": 510, "plan.cp": 2}
    assert load_run(RUN, overrides=change).plan.cp == 2
