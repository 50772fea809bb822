"""Comparison and statistics on made-up predictions, against figures worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from foretrain.units import GIB
from foretrain.validation.accuracy_page import accuracy_page
from foretrain.validation.compare import Comparison, compare, measured_step
from foretrain.validation.memory_report import memory_page, verdicts
from foretrain.validation.outcomes import Outcome, Prediction
from foretrain.validation.ranking import rank_statistics, regret, spearman
from foretrain.validation.report import build_report, reasons, render, short_reason, to_json
from foretrain.validation.rows import Measured, Row
from foretrain.validation.statistics import quantile, statistics_of


def row(name: str, **fields: object) -> Row:
    base = {"family": "made", "model": "m", "model_class": "llm_dense", "quality": "A", "gbs": 8}
    return Row(id=name, **{**base, "seq_len": 100, "n_gpus": 8, **fields})  # pyright: ignore[reportArgumentType]


def predicted(step: float, *, fits: bool = True, gib: float = 10.0) -> Prediction:
    return Prediction(
        step_s=step,
        low_s=0.9 * step,
        high_s=1.1 * step,
        allocated_bytes=gib * GIB,
        reserved_bytes=(gib + 1) * GIB,
        device_used_bytes=(gib + 2) * GIB,
        first_reserved_bytes=(gib - 1) * GIB,
        usable_bytes=40 * GIB,
        fits=fits,
        microbatches=1,
    )


def outcome(name: str, step: float, *, fits: bool = True, **fields: object) -> Outcome:
    made = row(name, **fields)
    return Outcome(row=made, status="ok", prediction=predicted(step, fits=fits))


def timed(name: str, step: float, measured: float, **fields: object) -> Comparison:
    (item,) = compare([outcome(name, step, **fields)], [Measured(iter_time_s=measured)])
    return item


@pytest.mark.parametrize(
    ("measured", "fields", "seconds"),
    [
        (Measured(iter_time_s=2.0, tokens_per_s=1.0), {}, 2.0),
        (Measured(tokens_per_s=400.0), {}, 2.0),
        (Measured(samples_per_s=4.0, samples_unit="sequences"), {}, 2.0),
        (Measured(samples_per_s=4.0, samples_unit="images"), {}, 2.0),
        (Measured(samples_per_s=4.0, samples_unit="4K-token samples"), {}, None),
        (Measured(samples_per_s=4.0, samples_unit="audio samples/s"), {}, None),
        (Measured(samples_per_s=4.0), {}, None),
        (Measured(tokens_per_s=400.0), {"gbs": None}, None),
        (Measured(tokens_per_s=400.0), {"seq_len": None}, None),
        (
            Measured(iter_time_s=2.0),
            {"notes": "iteration = one MICRO-batch; x", "ga_steps": 3},
            6.0,
        ),
        (Measured(), {}, None),
    ],
)
def test_measured_step(measured: Measured, fields: dict[str, object], seconds: float) -> None:
    assert measured_step(row("a", **fields), measured) == seconds


def test_errors_by_hand() -> None:
    items = [
        timed("a", 1.1, 1.0, config_group="x"),
        timed("b", 0.8, 1.0, config_group="x"),
        timed("c", 0.7, 1.0, config_group="x"),
        timed("d", 1.0, 1.0, config_group="y"),
    ]
    time = statistics_of(items).time
    assert time.n == 4
    assert time.median == pytest.approx(0.15)
    assert time.mean == pytest.approx(0.15)
    assert time.max == pytest.approx(0.3)
    assert time.p90 == pytest.approx(0.27)
    assert time.bias == pytest.approx(-0.1)
    # groups: x has errors 0.1, 0.2, 0.3 and y 0
    assert time.group_median == pytest.approx(0.1)
    assert time.groups == 2
    # 1.1 reaches down to 0.99 and 1.0 is in its own band
    assert time.in_band == pytest.approx(0.5)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([], 0.9) is None


def test_nothing_measured_gives_no_figures() -> None:
    made = Outcome(row=row("a"), status="unsupported", reason="r")
    stats = statistics_of(compare([made], [Measured()]))
    assert (stats.rows, stats.predicted, stats.time.n) == (1, 0, 0)
    assert stats.time.median is stats.time.bias is stats.time.group_median is None


@pytest.mark.parametrize(
    ("fields", "printed", "gib"),
    [
        ({"notes": "mem column is nvidia-smi style"}, 12.0, 12.0),
        ({"framework": "torchtitan"}, 11.0, 11.0),
        ({"framework": "nanotron", "notes": "memory printed in GB by nanotron"}, 9.0, 9.0),
        ({"notes": "memory printed in GB (nvidia-smi)"}, 12.0, 12.0),
        ({}, 10.0, 10.0),
        ({"notes": "memory in GB (1e9), max allocated"}, 10.73741824, 10.0),
    ],
)
def test_memory_is_compared_with_what_the_source_prints(
    fields: dict[str, object], printed: float, gib: float
) -> None:
    (item,) = compare([outcome("a", 1.0, **fields)], [Measured(peak_mem_gib=printed)])
    assert item.measured_gib == pytest.approx(gib)
    assert item.memory_ratio == pytest.approx(1.0)


def test_memory_that_a_source_modelled_is_no_measurement() -> None:
    made = outcome("a", 1.0, notes="MODELLED memory")
    (item,) = compare([made], [Measured(peak_mem_gib=10.0)])
    assert item.measured_gib is None


def test_out_of_memory_is_counted_in_four_boxes() -> None:
    failed = {"task": "pretrain FAILED(oom)"}
    outcomes = [
        outcome("a", 1.0, fits=False, **failed),
        outcome("b", 1.0, fits=True, **failed),
        outcome("c", 1.0, fits=False),
        outcome("d", 1.0, fits=True),
        outcome("e", 1.0, fits=True),  # nothing measured: no verdict
    ]
    measured = [Measured(), Measured(), Measured(iter_time_s=1), Measured(iter_time_s=1)]
    oom = statistics_of(compare(outcomes, [*measured, Measured()])).oom
    assert (oom.tp, oom.fn, oom.fp, oom.tn) == (1, 1, 1, 1)


def test_verdicts_with_assumed_settings_stand_apart() -> None:
    worked = Measured(iter_time_s=1.0)
    guessed = replace(outcome("a", 1.0, fits=False), assumed=("microbatch (not stated)",))
    known = replace(
        outcome("b", 1.0, fits=False),
        assumed=("global_batch = microbatch x dp x accumulation (not stated)",),
    )
    items = compare([guessed, known], [worked, worked])
    parts = verdicts(items)
    assert (parts["stated"].fp, parts["assumed"].fp) == (1, 1)
    text = "\n".join(memory_page([*items, failed_and_refused()]).splitlines())
    assert "settings stated (1), GiB to spare:\n\nb (" in text
    assert "settings assumed (1), GiB to spare:\n\na (" in text


def failed_and_refused() -> Comparison:
    made = outcome("z", 1.0, fits=False, task="pretrain FAILED(oom)")
    return compare([made], [Measured()])[0]


CRASH = {"task": "pretrain FAILED(oom/crash)"}


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({"mbs": 8, "tp": 2}, None),  # the same run worked
        ({"mbs": 16, "tp": 1}, None),  # a more demanding one worked
        ({"mbs": 4, "tp": 2}, False),  # a smaller one tells nothing
        ({"mbs": 16, "tp": 4}, False),  # neither does one that is larger and smaller
        ({"mbs": 8, "tp": 2, "model": "other"}, False),
        ({"mbs": 8, "tp": 2, "gpu_norm": "other"}, False),
    ],
)
def test_a_crash_is_out_of_memory_unless_a_larger_run_worked(
    other: dict[str, object], verdict: bool | None
) -> None:
    crashed = outcome("a", 1.0, mbs=8, tp=2, **CRASH)
    worked = outcome("b", 1.0, **other)
    items = compare([crashed, worked], [Measured(), Measured(iter_time_s=1.0)])
    assert [item.fits_measured for item in items] == [verdict, True]


def test_a_crash_of_an_invalid_plan_tells_nothing() -> None:
    made = Outcome(row=row("a", **CRASH), status="unsupported", reason="pp above layers")
    (item,) = compare([made], [Measured()])
    assert item.fits_measured is None


def test_spearman_by_hand() -> None:
    # ranks 1 2 3 4 5 against 2 1 4 3 5: sum of d^2 is 4, 1 - 6 x 4 / (5 x 24) = 0.8
    pairs = [(1.0, 20.0), (2.0, 10.0), (3.0, 40.0), (4.0, 30.0), (5.0, 50.0)]
    assert spearman(pairs) == pytest.approx(0.8)
    assert spearman(pairs[:4]) is None
    assert spearman([(1.0, float(i)) for i in range(5)]) is None


def test_spearman_gives_ties_their_mean_rank() -> None:
    # x: 1.5 1.5 3 4 5, y: 1 2 3 4 5; covariance 9.5, spreads 9.5 and 10
    pairs = [(1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 5.0)]
    assert spearman(pairs) == pytest.approx(9.5 / (9.5 * 10) ** 0.5)


def test_regret_is_what_the_chosen_plan_costs() -> None:
    assert regret([(1.0, 12.0), (2.0, 10.0), (3.0, 30.0)]) == pytest.approx(0.2)


def test_strategy_groups_hold_three_distinct_plans_of_one_situation() -> None:
    items = [
        timed("a", 1.0, 3.0, tp=1),
        timed("b", 2.0, 2.0, tp=2),
        timed("c", 3.0, 4.0, tp=4),
        timed("d", 9.0, 9.0, tp=4),  # equal plan: merged with c by median
        timed("e", 1.0, 1.0, tp=1, gbs=16),  # another situation, one plan
        timed("f", 1.0, 1.0, tp=2, gbs=16),
    ]
    rank = rank_statistics(items)
    assert rank.groups == 1
    assert rank.median_regret == pytest.approx(0.5)
    assert rank.top1_within_5 == 0.0
    assert rank.spearman is None


def test_families_count_alike_in_ranking() -> None:
    items: list[Comparison] = []
    for family, groups, bad in (("big", 5, 0.0), ("small", 1, 1.0)):
        for group in range(groups):
            fields = {"family": family, "gbs": group + 1}
            items += [
                timed(f"{family}{group}a", 1.0, 1.0 + bad, tp=1, **fields),
                timed(f"{family}{group}b", 2.0, 1.0, tp=2, **fields),
                timed(f"{family}{group}c", 3.0, 3.0, tp=4, **fields),
            ]
    assert rank_statistics(items).median_regret == pytest.approx(0.5)


LOW = {"family": "ultrascale_playbook"}


def test_glitches_are_shown_apart_and_not_counted() -> None:
    outcomes = [outcome("a", 1.0, **LOW), outcome("b", 1.0, **LOW)]
    measured = [Measured(iter_time_s=50.0, mfu_pct=1.0), Measured(iter_time_s=1.0, mfu_pct=40.0)]
    report = build_report(compare(outcomes, measured))
    assert report.overall.time.n == 1
    assert report.overall.rows == 2
    apart = report.groups["subset"]["shown apart: MFU under 5 %"]
    assert (apart.rows, apart.time.n) == (1, 1)
    assert apart.time.median == pytest.approx(0.98)


@pytest.fixture
def report_items() -> list[Comparison]:
    refused = Outcome(
        row=row("c", model_class="llm_moe"),
        status="unsupported",
        reason="plan.pp: pp 3 = 3 stages do not divide the 32 layers (got 3); allowed: 1, 2",
    )
    fault = Outcome(row=row("d"), status="error", reason="KeyError in x.py:1: 'y'")
    guess = Outcome(
        row=row("b", precision="FP8"),
        status="ok",
        assumed=("network: the usual node of h100-sxm", "zero = 1 (not stated)"),
        prediction=predicted(2.0),
    )
    outcomes = [outcome("a", 1.0), guess, refused, fault]
    return compare(outcomes, [Measured(iter_time_s=1.25, peak_mem_gib=8.0), *[Measured()] * 3])


def test_json_has_the_documented_names(report_items: list[Comparison]) -> None:
    form = to_json(build_report(report_items))
    json.dumps(form, allow_nan=False)
    assert form["schema"] == 1
    assert {"family", "gpu", "scale", "model_class"} <= set(form["groups"])
    assert set(form["overall"]) == {"rows", "predicted", "time", "memory", "oom", "rank"}
    wanted = {"n", "median", "mean", "p90", "max", "bias", "in_band", "group_median"}
    assert wanted <= set(form["overall"]["time"])
    assert set(form["overall"]["rank"]) == {
        "groups",
        "spearman",
        "median_regret",
        "top1_within_5",
    }
    first, second, third, fourth = form["rows"]
    assert first["step_time_s"] == {
        "measured": 1.25,
        "value": 1.0,
        "low": 0.9,
        "high": 1.1,
        "error": pytest.approx(0.2),
    }
    assert first["peak_gib"] == {
        "measured": 8.0,
        "value": 10.0,
        "error": 0.25,
        "quantity": "allocated",
    }
    assert first["fits"] == {"measured": True, "value": True, "margin_gib": 28.0}
    assert (second["status"], second["step_time_s"]["measured"]) == ("ok", None)
    assert second["assumed"] == ["network: the usual node of h100-sxm", "zero = 1 (not stated)"]
    nothing = {"measured": None, "value": None, "margin_gib": None}
    assert (third["status"], third["fits"]) == ("unsupported", nothing)
    assert fourth["status"] == "error"


def test_statistics_without_assumptions_are_kept_apart(report_items: list[Comparison]) -> None:
    form = to_json(build_report(report_items))
    assert form["overall"]["predicted"] == 2
    assert form["without_assumptions"]["predicted"] == 1


def test_reasons_count_equal_causes_together() -> None:
    one = "plan.pp: pp 3 = 3 stages do not divide the 32 layers (got 3); allowed: 1"
    two = "plan.pp: pp 5 = 5 stages do not divide the 24 layers (got 5); allowed: 1"
    assert short_reason(one) == short_reason(two)
    assert short_reason("T5 comes with a later version") == "T5 comes with a later version"
    outcomes = [Outcome(row=row(r), status="unsupported", reason=r) for r in (one, two)]
    items = compare(outcomes, [Measured(), Measured()])
    assert reasons(items) == [("plan.pp: pp N = N stages do not divide the N layers", 2)]


def test_the_text_names_faults_and_reasons(report_items: list[Comparison]) -> None:
    text = render(build_report(report_items))
    assert "4 rows: 2 predicted, 1 unsupported, 1 errors" in text
    assert "d: KeyError in x.py:1: 'y'" in text
    assert "1  plan.pp: pp N = N stages" in text


def test_the_page_is_deterministic_and_complete(report_items: list[Comparison]) -> None:
    page = accuracy_page(build_report(report_items))
    assert page == accuracy_page(build_report(report_items))
    assert "dense decoders in FP8 or less, grade A or A-" in page
    assert "1 of 2 predicted rows rest on one assumption or more" in page
    assert "| 1 | network: the usual node of the device |" in page
    assert "Faults of ours: 1." in page
    assert not [line for line in page.splitlines() if line.endswith(" ")]
    assert "\n\n\n" not in page
