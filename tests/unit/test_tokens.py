"""Token budgets: steps, days, device-hours and money by hand, with dates and marks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretrain.analysis.cost_of_run import cost_of_run, parse_tokens, token_budget
from foretrain.cli.main import main
from foretrain.errors import InputError
from foretrain.hardware import find_price
from foretrain.report.tokens import token_json, token_lines
from foretrain.simulator.result import Band
from report_sample import sample_result, sample_run

STEP = Band(value=2.0, low=1.0, high=4.0)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1T", 1e12),
        ("300B", 3e11),
        ("300 bn", 3e11),
        ("20m", 2e7),
        ("1.5e12", 1.5e12),
        ("15,000,000", 1.5e7),
        ("0.5k", 500.0),
        ("7", 7.0),
    ],
)
def test_counts(text: str, tokens: float):
    assert parse_tokens(text) == pytest.approx(tokens)


@pytest.mark.parametrize("text", ["", "0", "-1T", "many", "1X", "1,5T", "nan", "1e400"])
def test_no_counts(text: str):
    with pytest.raises(InputError, match="1T, 300B"):
        parse_tokens(text)


def test_a_budget_by_hand():
    run = sample_run()
    result = sample_result(step_time_s=STEP, tokens_per_s=500.0)  # 1000 tokens a step
    cost = cost_of_run(result, run, 43_200_000.0)
    world = run.cluster.world_size
    assert cost.steps == 43_200
    assert (cost.days.low, cost.days.value, cost.days.high) == pytest.approx((0.5, 1.0, 2.0))
    assert cost.device_hours.value == pytest.approx(24.0 * world)
    price = find_price(run.cluster.device.name)
    assert price is not None
    assert cost.usd is not None
    assert cost.usd.value == pytest.approx(24.0 * world * price.usd_per_hour)
    assert cost.usd.high == pytest.approx(2.0 * cost.usd.value)


def test_a_step_that_is_begun_counts_whole():
    result = sample_result(step_time_s=STEP, tokens_per_s=500.0)
    assert cost_of_run(result, sample_run(), 1.0).steps == 1
    assert cost_of_run(result, sample_run(), 1001.0).steps == 2
    assert cost_of_run(result, sample_run(), 2000.0).steps == 2


def test_dates_and_marks_are_shown():
    run = sample_run()
    cost = cost_of_run(sample_result(step_time_s=STEP, tokens_per_s=500.0), run, 1e9)
    assert cost.price is not None
    for verified in (True, False):
        price = replace(
            cost.price, verified=verified, as_of="2024-25", source="a list (unverified)"
        )
        text = "\n".join(token_lines(replace(cost, price=price), run))
        assert ("unverified" in text) is not verified
        assert "price as of: 2024-25" in text
        assert token_json(replace(cost, price=price))["price"]["verified"] is verified


def test_a_device_without_a_price_costs_no_invented_money():
    run = sample_run()
    cost = cost_of_run(sample_result(step_time_s=STEP, tokens_per_s=500.0), run, 1e9)
    free = replace(cost, price=None, usd=None)
    assert "the catalog has no price" in "\n".join(token_lines(free, run))
    assert token_json(free)["usd"] is None


def test_a_model_without_tokens_is_refused():
    run = sample_run()
    images = replace(run, training=replace(run.training, sequence=None))
    with pytest.raises(InputError, match="no tokens"):
        token_budget("1T", images)


def test_the_command_adds_the_section_and_the_json(
    examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = tmp_path / "run.json"
    run = str(examples / "llama2-7b-fsdp.yaml")
    assert main(["predict", run, "--tokens", "300B", "--json", str(target)]) == 0
    assert "For 300 B tokens" in capsys.readouterr().out
    form = json.loads(target.read_text())
    step, budget = form["step_time_s"], form["token_budget"]
    assert budget["steps"] == 1_144_410  # 300e9 / (64 x 4096)
    assert budget["days"]["high"] == pytest.approx(budget["steps"] * step["high"] / 86400)


def test_without_the_option_nothing_is_said(examples: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", str(examples / "llama2-7b-fsdp.yaml"), "--json", "-"]) == 0
    assert "token_budget" not in json.loads(capsys.readouterr().out)


def test_a_bad_count_is_bad_input(examples: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", str(examples / "llama2-7b-fsdp.yaml"), "--tokens", "lots"]) == 1
    assert "--tokens" in capsys.readouterr().err
