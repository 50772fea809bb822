"""Plans worth measuring: valid, different, reachable with --set, and as telling as they say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from foretrain.analysis.fit import NOISE, fit
from foretrain.analysis.fit_plans import OtherPlan, other_plans, spread
from foretrain.analysis.fit_probes import extremes, probing_plans, shorter_plans
from foretrain.analysis.fit_quick import QuickModel, quick_model
from foretrain.analysis.fit_response import CONSTANTS, StepModel
from foretrain.analysis.fit_search import Measured
from foretrain.analysis.fit_suggest import Suggestion, forecast, suggest
from foretrain.cli.main import main
from foretrain.cost.adjust import Adjustments
from foretrain.errors import InputError
from foretrain.predict import predict
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec

JOB: dict[str, Any] = {
    "model": {"family": "gpt", "layers": 4, "hidden": 2048, "heads": 16, "vocab": 51200},
    "training": {"sequence": 1024, "global_batch": 32, "microbatch": 1, "optimizer": "adamw"},
    "plan": {"preset": "megatron", "zero": 1},
    "cluster": "2x4 a100-sxm-80gb, 1x100G ib",
}


def a_fault(draw: random.Random) -> float:
    return 1.0 + draw.choice((-1, 1)) * draw.uniform(0.2, 0.5)


@cache
def job() -> RunSpec:
    return load_run(JOB)


@cache
def suggestion() -> Suggestion:
    return suggest(job())


@cache
def usual() -> tuple[StepModel, ...]:
    """Plans of the job as people run them."""
    node = job().cluster.devices_per_node
    plans = [plan for plan in other_plans(job()) if plan.run.plan.tp <= node]
    random.Random(3).shuffle(plans)
    return tuple(StepModel(plan.run) for plan in plans[:6])


def named(models: tuple[StepModel, ...], constant: str, draw: random.Random) -> tuple[str, float]:
    """What `fit` names (or '-') for a planted fault, and how far it moves a step."""
    truth = Adjustments(**{constant: a_fault(draw)})
    steps = [model.step_s(truth) for model in models]
    runs = [
        Measured(name="run", model=model, step_s=step * exp(draw.gauss(0.0, NOISE)))
        for model, step in zip(models, steps, strict=True)
    ]
    effect = max(abs(log(s / m.base_s)) for s, m in zip(steps, models, strict=True))
    return fit(runs).named or "-", effect


# -- other plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        JOB,
        JOB | {"plan": {"preset": "megatron", "tp": 2, "pp": 2, "dp": 2, "interleave": 2}},
        JOB | {"plan": {"preset": "deepspeed", "zero": 2}},
        JOB | {"plan": {"preset": "fsdp"}, "cluster": "1x8 h100-sxm"},
    ],
)
def test_settings_lead_to_the_plan(given: dict[str, Any]):
    plans = other_plans(load_run(given))
    assert len(plans) > 5
    assert plans[0].changes == {}
    for plan in spread(plans, 12):
        again = load_run(given, overrides=plan.changes)
        assert again.plan == plan.run.plan
        assert again.training == plan.run.training
        assert again.model == plan.run.model


@pytest.mark.parametrize(
    "given",
    [
        JOB | {"plan": {"preset": "megatron", "tp": 2, "dp": 4}},
        JOB | {"plan": {"preset": "deepspeed", "zero": 3}},
        JOB | {"plan": {"preset": "fsdp"}},
    ],
)
def test_settings_lead_to_a_probe(given: dict[str, Any]):
    plans = probing_plans(load_run(given))
    probes = plans[len(other_plans(load_run(given))) :]
    assert all("plan.shard" in plan.changes for plan in probes)
    assert bool(probes) == (given["plan"]["preset"] != "megatron")
    for plan in (*probes, *extremes(plans), *shorter_plans(load_run(given))):
        again = load_run(given, overrides=plan.changes)
        assert again.plan == plan.run.plan
        assert again.training == plan.run.training


def test_only_the_plan_differs():
    for plan in other_plans(job()):
        assert plan.run.cluster == job().cluster
        assert plan.run.training.global_batch == job().training.global_batch
        assert plan.run.training.sequence == job().training.sequence


def test_plans_are_spread_out():
    plans = other_plans(job())
    few = spread(plans, 12)
    assert few[0] is plans[0]
    assert len({id(plan) for plan in few}) == 12
    assert {plan.run.plan.tp for plan in few} >= {1, 8}
    assert {plan.run.plan.pp for plan in few} >= {1, 4}
    assert len(spread(plans, 10_000)) == len(plans)


def test_a_given_tree_has_no_other_plans():
    tree = {"tree": {"module": "model"}}
    run = job()
    with_tree = type(run)(
        model=run.model,
        training=run.training,
        plan=type(run.plan)(**{**vars_of(run.plan), **tree}),
        cluster=run.cluster,
        stack=run.stack,
    )
    assert other_plans(with_tree) == [OtherPlan(run=with_tree, changes={})]


def vars_of(plan: Any) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__slots__}


# -- steps continued in a straight line ------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        {"preset": "fsdp", "tp": 2},
        {"preset": "megatron", "zero": 3, "tp": 4},
        {"preset": "deepspeed", "zero": 2},
    ],
)
def test_a_continued_step_is_the_whole_one(plan: dict[str, Any]):
    training = JOB["training"] | {"global_batch": 128}
    run = load_run(JOB | {"plan": plan, "training": training})
    quick, whole = quick_model(run), StepModel(run)
    assert isinstance(quick, QuickModel)
    assert quick.num_tasks < whole.num_tasks / 2
    assert quick.event_counts() == pytest.approx(dict(whole.event_counts()))
    short, long = predict(quick.short).memory, predict(run).memory
    assert short.device_used_bytes <= long.device_used_bytes * (1 + 1e-9)
    for adjust in (Adjustments(), Adjustments(nic=0.6), Adjustments(host=1.5, compute=1.3)):
        assert quick.step_s(adjust) == pytest.approx(whole.step_s(adjust), rel=5e-4)


# -- suggestions -----------------------------------------------------------------------------------


def test_three_different_plans_that_fit():
    found = suggestion()
    assert len(found.plans) == len(found.steps_s) == 3
    assert all(a.changes != b.changes for a, b in combinations(found.plans, 2))
    for plan, step in zip(found.plans, found.steps_s, strict=True):
        result = predict(plan.run)
        assert result.fits
        assert result.step_time_s.value == pytest.approx(step, rel=1e-9)


def test_suggested_runs_name_nine_faults_of_ten_where_they_say_so():
    """The forecast is kept: new faults, new noise, exact responses instead of straight lines."""
    models = tuple(StepModel(plan.run) for plan in suggestion().plans)
    draw = random.Random(1)
    strong = [c for c in CONSTANTS if suggestion().named[c] >= 0.9]
    assert len(strong) >= 2
    found = {c: [named(models, c, draw)[0] for _ in range(10)] for c in CONSTANTS}
    right = sum(found[c].count(c) for c in strong)
    wrong = sum(name not in ("-", c) for c in CONSTANTS for name in found[c])
    assert right >= 0.9 * 10 * len(strong)
    assert all(found[c].count(c) >= 10 * suggestion().named[c] - 3 for c in CONSTANTS)
    assert wrong <= 1


def test_suggested_plans_tell_more_than_usual_ones():
    rivals = [sum(forecast(triple).values()) for triple in list(combinations(usual(), 3))[:8]]
    assert sum(suggestion().named.values()) >= max(rivals) - 0.1


def test_random_plans_name_most_clear_faults_and_few_wrong_ones():
    draw = random.Random(5)
    outcomes = []
    for triple in draw.sample(list(combinations(usual(), 3)), 9):
        for constant in CONSTANTS:
            name, effect = named(triple, constant, draw)
            outcomes.append((name == constant, name not in ("-", constant), effect))
    clear = [right for right, _, effect in outcomes if effect > 0.06]
    assert len(clear) >= 10
    assert sum(clear) >= 0.8 * len(clear)
    assert sum(wrong for _, wrong, _ in outcomes) <= 1


def test_what_no_plan_shows_a_shorter_sequence_does():
    """Launches hide behind the kernels of a slow device in every plan of this job."""
    model = JOB["model"] | {"hidden": 1536}
    run = load_run(JOB | {"model": model, "cluster": "2x4 a10g, 1x50G efa"})
    light = replace(run.stack, host_op_us=22.0, p2p_sync=False)
    found = suggest(replace(run, stack=light))
    sequences = [plan.run.training.sequence for plan in found.plans]
    assert sequences.count(JOB["training"]["sequence"]) == 2
    assert found.named["host"] > 0.9


def test_one_plan_alone_is_refused():
    small = JOB | {
        "cluster": "1x1 a100-sxm-80gb",
        "training": {"sequence": 1024, "global_batch": 1, "microbatch": 1},
    }
    with pytest.raises(InputError) as caught:
        suggest(load_run(small))
    assert "--suggest" in str(caught.value)


# -- command line ----------------------------------------------------------------------------------

RUN = """
model: {family: gpt, layers: 4, hidden: 1024, heads: 8, vocab: 51200}
training: {sequence: 512, global_batch: 16, microbatch: 1, precision: bf16, optimizer: adamw}
plan: {preset: megatron}
cluster: 1x4 a100-sxm-80gb
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(RUN)
    return str(path)


def test_suggestions_on_the_command_line(
    run_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "plans.json"
    assert main(["fit", run_file, "--suggest", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    form = json.loads(target.read_text())
    assert len(form["plans"]) == 3
    assert "nic" not in form["named_share"]
    assert "no plan uses it" in out
    for plan in form["plans"]:
        again = predict(load_run(run_file, overrides=plan["set"]))
        assert again.step_time_s.value == pytest.approx(plan["step_time_s"], rel=1e-9)


def test_suggestions_take_one_run_and_no_measurement(
    run_file: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["fit", run_file, "--suggest", "--measured", "1s"]) == 1
    assert "--suggest" in capsys.readouterr().err


@pytest.mark.parametrize("noise", ["much", "0", "2", "-1%", "nan"])
def test_a_scatter_that_is_none_is_refused(
    run_file: str, noise: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["fit", run_file, "--measured", "1s", "--noise", noise]) == 1
    assert "--noise" in capsys.readouterr().err


def test_the_scatter_is_used(run_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["fit", run_file, "--measured", "1s", "--noise", "5%", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["noise"] == 0.05
