"""Fitting a constant to measured steps: planted errors are named, weak evidence is not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import exp, log
from typing import Any

import pytest

from foretrain.analysis.fit import NOISE, Fit, fit
from foretrain.analysis.fit_response import CONSTANTS, StepModel
from foretrain.analysis.fit_search import Measured
from foretrain.analysis.fit_separate import CLEAR, separate
from foretrain.cost.adjust import Adjustments
from foretrain.errors import InputError
from foretrain.predict import predict
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec

LLAMA = {
    "family": "llama",
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 8192,
    "vocab": 32000,
}
GPT_2K = {"family": "gpt", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200}
GPT_3K = {"family": "gpt", "layers": 16, "hidden": 3072, "heads": 24, "vocab": 51200}

Wish = tuple[int, int, int, dict[str, Any]]  # sequence, global batch, microbatch, plan

#: (model, cluster, three runs): one leans on the links inside a node, one on the NICs, one on the
#: host, and the first two on computation, each in another proportion.
TRIPLES: dict[str, tuple[dict[str, Any], str, tuple[Wish, Wish, Wish]]] = {
    "h100": (
        LLAMA,
        "2x8 h100-sxm, 2x100G ib",
        (
            (4096, 64, 4, {"tp": 8, "pp": 2, "sequence_parallel": True}),
            (2048, 64, 1, {"tp": 1}),
            (512, 128, 1, {"tp": 1, "pp": 2}),
        ),
    ),
    "a100": (
        GPT_2K,
        "2x8 a100-sxm-80gb, 1x100G ib",
        (
            (2048, 32, 4, {"tp": 8, "pp": 2, "sequence_parallel": True}),
            (2048, 32, 2, {"tp": 1}),
            (256, 128, 1, {"tp": 2, "pp": 2}),
        ),
    ),
    "h200": (
        GPT_3K,
        "4x8 h200-sxm, 2x200G ib",
        (
            (2048, 64, 8, {"tp": 8, "pp": 4, "sequence_parallel": True}),
            (2048, 96, 1, {"tp": 1, "zero": 1}),
            (128, 128, 1, {"tp": 4, "pp": 2}),
        ),
    ),
}


def a_run(model: dict[str, Any], cluster: str, wish: Wish) -> RunSpec:
    sequence, batch, microbatch, plan = wish
    run = load_run(
        {
            "model": model,
            "training": {
                "sequence": sequence,
                "global_batch": batch,
                "microbatch": microbatch,
                "precision": "bf16",
                "optimizer": "adamw",
            },
            "plan": {"preset": "megatron", **plan},
            "cluster": cluster,
            "stack": "megatron-te",
        }
    )
    # a light host, so that the first two runs of a triple lean on the device
    return replace(run, stack=replace(run.stack, host_op_us=22.0, p2p_sync=False))


@cache
def models(name: str) -> tuple[StepModel, ...]:
    model, cluster, wishes = TRIPLES[name]
    return tuple(StepModel(a_run(model, cluster, wish)) for wish in wishes)


@cache
def weak() -> tuple[StepModel, ...]:
    """Three runs that differ in batch only: their steps are multiples of one another."""
    plan = {"tp": 8, "sequence_parallel": True}
    wishes = [(4096, batch, 4, plan) for batch in (64, 128, 256)]
    return tuple(StepModel(a_run(LLAMA, "1x8 h100-sxm", wish)) for wish in wishes)


def measured(models: Sequence[StepModel], steps: Sequence[float]) -> list[Measured]:
    return [
        Measured(name=f"run{i}", model=model, step_s=step)
        for i, (model, step) in enumerate(zip(models, steps, strict=True))
    ]


def noisy(models: Sequence[StepModel], truth: Adjustments, seed: object) -> Fit:
    noise = random.Random(str(seed))
    steps = [model.step_s(truth) * exp(noise.gauss(0.0, 0.02)) for model in models]
    return fit(measured(models, steps))


def a_factor(seed: object) -> float:
    """20 to 50 % off, either way."""
    return 1.0 + random.Random(str(seed)).choice((-1, 1)) * random.Random(f"{seed}x").uniform(
        0.2, 0.5
    )


# -- several runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRIPLES)
def test_a_planted_constant_is_named_in_nine_of_ten_cases(name: str):
    right = wrong = cases = 0
    for constant in CONSTANTS:
        for seed in range(10):
            factor = a_factor((name, constant, seed))
            found = noisy(models(name), Adjustments(**{constant: factor}), (constant, seed))
            cases += 1
            right += found.named == constant
            wrong += found.named not in (None, constant)
    assert right >= 0.9 * cases
    assert wrong <= 0.05 * cases


@pytest.mark.parametrize("constant", CONSTANTS)
def test_without_noise_the_planted_value_is_found(constant: str):
    for factor in (0.6, 1.4):
        found = fit(
            measured(
                models("a100"),
                [m.step_s(Adjustments(**{constant: factor})) for m in models("a100")],
            )
        )
        best = found.of(constant)
        assert found.named == constant
        assert best.factor == pytest.approx(factor, rel=0.06)
        assert best.low < factor < best.high


def slower_machine(run: RunSpec, constant: str) -> RunSpec:
    """The run on hardware that is worse by itself, not by a factor on prices."""
    cluster = run.cluster
    if constant == "nic":
        return replace(run, cluster=replace(cluster, nic_bandwidth=0.6 * cluster.nic_bandwidth))
    if constant == "scaleup":
        slow = replace(cluster, scaleup_bandwidth=0.55 * cluster.scaleup_bandwidth)
        return replace(run, cluster=slow)
    if constant == "host":
        stack = run.stack
        slow_stack = replace(
            stack,
            host_launch_us=1.4 * stack.host_launch_us,
            host_op_us=1.4 * stack.host_op_us,
            host_comm_us=1.4 * stack.host_comm_us,
        )
        return replace(run, stack=slow_stack)
    device = cluster.device
    peaks = {dtype: 0.65 * peak for dtype, peak in device.peak_flops.items()}
    slow_device = replace(device, peak_flops=peaks, memory_bandwidth=0.65 * device.memory_bandwidth)
    return replace(run, cluster=replace(cluster, device=slow_device))


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_machine_with_slower_parts_is_recognised(constant: str):
    noise = random.Random(constant)
    steps = [
        StepModel(slower_machine(m.run, constant)).base_s * (1.0 + noise.gauss(0.0, 0.01))
        for m in models("a100")
    ]
    assert fit(measured(models("a100"), steps)).named == constant


@pytest.mark.parametrize("constant", ["compute", "scaleup"])
def test_runs_that_do_not_differ_are_not_told_apart(constant: str):
    """Any step can be had with faster operators or with faster links: nothing may be named."""
    for seed in range(5):
        found = noisy(weak(), Adjustments(**{constant: 0.6}), (constant, seed))
        assert found.verdict == "tied"
        assert set(found.tied) >= {"compute", "scaleup"}


def test_steps_within_the_noise_need_no_cause():
    """Three draws of noise are larger than usual now and then: one alarm in fifty."""
    verdicts = [noisy(models("a100"), Adjustments(), seed).verdict for seed in range(50)]
    assert verdicts.count("agrees") >= 47


def test_contradicting_steps_have_no_single_cause():
    steps = [
        model.base_s * factor for model, factor in zip(models("a100"), (1.5, 0.6, 1.5), strict=True)
    ]
    found = fit(measured(models("a100"), steps))
    assert (found.verdict, found.named) == ("none", None)


def test_runs_of_different_machines_are_refused():
    other = replace(weak()[0].run, stack=replace(weak()[0].run.stack, name="other"))
    runs = measured([models("a100")[0], StepModel(other)], [1.0, 1.0])
    with pytest.raises(InputError) as caught:
        fit(runs)
    text = str(caught.value)
    assert "device" in text
    assert "stack" in text


# -- one run ---------------------------------------------------------------------------------------


def test_one_run_lists_every_constant_and_names_none():
    model = models("h100")[0]
    found = fit(measured([model], [1.1 * model.base_s]))
    assert (found.verdict, found.named, found.tied) == ("one run", None, ())
    assert {e.constant for e in found.explanations} == set(CONSTANTS)
    able = [e for e in found.explanations if e.factor is not None]
    assert {e.constant for e in able} >= {"compute", "scaleup", "nic"}
    for e in able:
        adjusted = model.step_s(Adjustments(**{e.constant: e.factor or 1.0}))
        assert adjusted == pytest.approx(1.1 * model.base_s, rel=1e-3)
        assert (e.factor or 0.0) < 1.0 or e.constant == "host"


@pytest.mark.parametrize("gap", [0.8, 0.95, 1.05, 1.3])
def test_one_run_is_never_named_for(gap: float):
    """Every constant has a value that gives the measured step and its plausibility, or a reason."""
    for model in models("a100"):
        found = fit(measured([model], [gap * model.base_s]))
        assert found.verdict == "one run"
        assert found.named is None
        assert sorted(e.constant for e in found.explanations) == sorted(CONSTANTS)
        for e in found.explanations:
            if e.factor is None:
                assert e.reason
                continue
            assert e.plausibility in ("plausible", "unlikely", "implausible")
            assert e.low <= e.factor <= e.high
            adjusted = model.step_s(Adjustments(**{e.constant: e.factor}))
            assert adjusted == pytest.approx(gap * model.base_s, rel=1e-3)
        distances = [e.distance for e in found.explanations]
        assert distances == sorted(distances)


def test_plausibility_compares_with_the_band():
    model = models("h100")[1]
    near = fit(measured([model], [model.step_s(Adjustments(compute=0.9))])).of("compute")
    far = fit(measured([model], [model.step_s(Adjustments(compute=0.2))])).of("compute")
    assert near.factor == pytest.approx(0.9, rel=0.01)
    assert far.factor == pytest.approx(0.2, rel=0.01)
    assert near.plausibility == "plausible"
    assert far.plausibility == "implausible"
    assert abs(log(0.9)) < log(near.band) < abs(log(0.2))


def test_what_cannot_explain_a_gap_says_why():
    found = fit(measured([weak()[0]], [0.7 * weak()[0].base_s]))
    assert found.of("nic").factor is None
    assert found.of("nic").reason == "nothing is sent over the NICs"
    assert "faster" in found.of("host").reason


def test_another_plan_is_proposed_that_tells_apart():
    found = noisy(weak(), Adjustments(scaleup=0.6), 1)
    options = [e for e in found.explanations if e.constant in ("compute", "scaleup")]
    proposal = separate(found.runs, options)
    assert proposal is not None
    assert max(proposal.distances) > CLEAR * NOISE
    assert proposal.plan.changes
    assert set(proposal.steps_s) == {"compute", "scaleup"}


def test_nothing_is_proposed_for_a_single_explanation():
    found = noisy(weak(), Adjustments(compute=0.6), 1)
    assert separate(found.runs, [found.of("compute")]) is None


# -- adjusted prices -------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_better_constant_never_slows_the_step(constant: str):
    factors = (0.5, 0.8, 1.0, 1.25, 2.0)
    for model in models("a100"):
        steps = [model.step_s(Adjustments(**{constant: factor})) for factor in factors]
        assert steps == sorted(steps, reverse=constant != "host")


def test_the_step_model_is_what_predict_says():
    for model in models("a100"):
        adjust = Adjustments(compute=0.8, nic=0.7, host=1.3)
        predicted = predict(model.run, adjust=adjust)
        assert model.step_s(adjust) == pytest.approx(predicted.step_time_s.value, rel=1e-12)
        assert any("nic x 0.7" in text for text in predicted.assumptions)
        assert not any("adjusted" in text for text in predict(model.run).assumptions)


def test_noise_is_two_per_cent():
    assert NOISE == 0.02
