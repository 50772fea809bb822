"""Runs side by side: equal columns, the winner named, and only what differs listed."""

from __future__ import annotations

from dataclasses import replace

from foretrain.report.compare import render_comparison, run_differences
from foretrain.simulator.result import Band
from report_sample import sample_memory, sample_result, sample_run

FAST = Band(value=0.08, low=0.079, high=0.081)
SLOW = Band(value=0.1, low=0.099, high=0.101)


def test_rows_hold_one_value_per_run_and_the_fastest_is_named():
    slow = ("slow", sample_run(), sample_result(step_time_s=SLOW))
    quick = sample_result(step_time_s=FAST, tokens_per_s_per_device=51200.0)
    text = render_comparison([slow, ("quick", sample_run(tp=4, pp=1), quick)])
    first = text.splitlines()[0]
    assert first.startswith("Fastest that fits, per GPU: quick with 51,200 tok/s/GPU, 25.0 % more")
    assert "overlap" not in first
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()[3:]}
    assert rows["step time"] == ["100", "ms", "80", "ms"]
    assert rows["relative to the first"] == ["1.000x", "1.250x"]
    assert "plan.tp" in text
    assert "plan.sequence_parallel" not in text


def test_overlapping_bands_are_said():
    wide = Band(value=0.1, low=0.07, high=0.14)
    slow = ("slow", sample_run(), sample_result(step_time_s=wide))
    quick = sample_result(step_time_s=FAST, tokens_per_s_per_device=51200.0)
    assert "bands overlap" in render_comparison([slow, ("quick", sample_run(), quick)])


def test_a_run_that_does_not_fit_never_wins():
    big = sample_result(fits=False, memory=sample_memory(90.0), tokens_per_s_per_device=9e4)
    items = [("big", sample_run(), big), ("small", sample_run(), sample_result())]
    assert "Fastest that fits, per GPU: small" in render_comparison(items)
    assert render_comparison(items[:1]).startswith("None of the runs fits.")


def test_equal_runs_are_called_equal():
    items = [(name, sample_run(), sample_result()) for name in ("a", "b")]
    assert "The runs are equal." in render_comparison(items)


def test_differences_name_the_field_and_every_value():
    rows = run_differences([sample_run(), sample_run(zero=1), sample_run()])
    assert rows == [["plan.zero", "0", "1", "0"]]


def test_different_models_are_told_apart_by_name():
    other = sample_run()
    other = replace(other, model=replace(other.model, name="gpt-other", layers=8))
    rows = run_differences([sample_run(), other])
    assert rows == [["model.name", "gpt-tiny", "gpt-other"]]


def test_runs_of_different_models_have_no_fastest():
    other = sample_run()
    other = replace(other, model=replace(other.model, name="gpt-other", layers=8))
    items = [("a", sample_run(), sample_result()), ("b", other, sample_result())]
    text = render_comparison(items)
    assert text.startswith("All runs fit. They train different models")
    assert "Fastest" not in text
    row = next(line for line in text.splitlines() if "relative to the first" in line)
    assert row.split()[-2:] == ["1.000x", "-"]
