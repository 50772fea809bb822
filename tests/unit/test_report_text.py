"""The text report: verdict first, tables that add up as printed, nothing left out."""

from __future__ import annotations

import re

import pytest

from foretrain.analysis.lever import Lever
from foretrain.report.tables import parts_table, round_to_sum
from foretrain.report.text import render
from foretrain.report.words import rank_ranges
from foretrain.simulator.result import Band
from foretrain.units import GIB
from report_sample import sample_memory, sample_parts, sample_result, sample_run


def section(text: str, title: str) -> list[str]:
    """The lines of the section that starts with `title`."""
    found = [part for part in text.split("\n\n") if part.startswith(title)]
    assert len(found) == 1, f"{title!r} stands {len(found)} times"
    return found[0].splitlines()


def columns(lines: list[str], until: str) -> tuple[list[list[float]], list[float]]:
    """The numbers of a parts table: its rows, and its total (the row called `until`)."""
    rows: list[list[float]] = []
    for line in lines[2:]:
        match = re.match(r"  (\S.*?)\s{2,}(-?[\d.]+)\s+(-?[\d.]+)$", line)
        if match and match[1] == until:
            return rows, [float(match[2]), float(match[3])]
        if match:
            rows.append([float(match[2]), float(match[3])])
    raise AssertionError("no total")


def test_the_first_line_is_the_verdict_with_margin_and_band():
    first = render(sample_result(), sample_run()).splitlines()[0]
    assert first == (
        "Fits: stage 0 (ranks 0-1) uses 61.3 GiB of 76.0 GiB GPU memory, 14.7 GiB to spare. "
        "Expect 40,960 tok/s/GPU (90 % band 32,770 to 51,200)."
    )


def test_a_run_that_does_not_fit_says_by_how_much_where_and_when():
    result = sample_result(fits=False, memory=sample_memory(80.5))
    first = render(result, sample_run()).splitlines()[0]
    assert first.startswith(
        "Does not fit by 4.50 GiB: stage 0 (ranks 0-1) uses 80.5 GiB of 76.0 GiB GPU memory in "
        "backward of microbatch 0."
    )


def test_little_room_is_called_tight():
    result = sample_result(memory=sample_memory(74.0))
    assert render(result, sample_run()).startswith("Fits, but it is tight")


@pytest.mark.parametrize("step", [0.1, 0.0123456, 7.77777, 123.456])
def test_both_columns_of_the_time_table_add_up_as_printed(step: float):
    result = sample_result(
        step_time_s=Band(value=step, low=0.9 * step, high=1.1 * step), time_parts=sample_parts(step)
    )
    rows, total = columns(section(render(result, sample_run()), "Where the step goes"), "step")
    for i in (0, 1):
        assert sum(row[i] for row in rows) == pytest.approx(total[i], abs=1e-9)
    assert total[1] == 100.0
    assert total[0] == pytest.approx(step if step >= 10 else 1e3 * step, rel=1e-3)


def test_the_memory_table_adds_up_to_what_the_device_shows():
    lines = section(render(sample_result(), sample_run()), "Memory of the fullest GPU")
    rows, total = columns(lines, "device used")
    assert sum(row[0] for row in rows) == pytest.approx(total[0], abs=1e-9)
    assert total == [61.30, 100.0]
    text = "\n".join(lines)
    for word in ("max_memory_allocated", "max_memory_reserved", "nvidia-smi"):
        assert word in text


def test_the_triple_and_the_formula_of_mfu_stand_together():
    text = render(sample_result(), sample_run())
    assert "tok/s/GPU" in text
    assert "100 ms (80 ms to 125 ms), 90 % band" in text
    assert "8 samples = 16.4 k tokens (microbatch 1, accumulation 8)" in text
    assert "40.0 % = model FLOP / (step x 4 GPUs x 312 TFLOP/s dense bf16)" in text
    assert "HFU" in text


def test_hfu_is_left_out_when_it_is_mfu():
    assert "HFU" not in render(sample_result(hfu=0.4), sample_run())


def test_fp8_names_both_peaks():
    result = sample_result(peak_dtype="fp8", peak_flops_per_device=624e12, mfu=0.2, hfu=0.2)
    text = render(result, sample_run())
    assert "624 TFLOP/s dense fp8" in text
    assert "40.0 % over the bf16 peak (312 TFLOP/s)" in text


def test_without_tokens_samples_take_their_place():
    result = sample_result(tokens_per_s=None, tokens_per_s_per_device=None)
    text = render(result, sample_run())
    assert "20 samples/s/GPU" in text.splitlines()[0]
    assert "tok/s" not in text


def test_assumptions_warnings_levers_and_sources_are_printed():
    lever = Lever(
        title="microbatch 1 -> 2",
        gain=0.07,
        step_before_s=0.1,
        step_after_s=0.0935,
        memory_before_bytes=61.3 * GIB,
        memory_after_bytes=80.0 * GIB,
        fits_before=True,
        fits_after=False,
        missing_after_bytes=4.0 * GIB,
    )
    text = render(sample_result(), sample_run(), [lever])
    for words in (
        "- links at full rate",
        "- the NIC count was guessed",
        "1. microbatch 1 -> 2",
        "+7.0 % throughput",
        "61.3 GiB -> 80.0 GiB  does not fit by 4.00 GiB",
        "fitted 46.9%",
    ):
        assert words in text


def test_the_report_is_plain_ascii_and_deterministic():
    text = render(sample_result(), sample_run())
    assert text.isascii()
    assert "\x1b" not in text
    assert text == render(sample_result(simulation_s=3.0), sample_run())


def test_stages_are_listed_only_with_a_pipeline():
    result = sample_result()
    stages = section(render(result, sample_run()), "Stages")
    assert stages[2].split() == [
        "stage", "0", "0-1", "55.6", "ms", "14.8", "ms", "18.5", "ms", "11.1", "ms", "58.3", "GiB",
    ]  # fmt: skip
    single = sample_result(classes=result.classes[:1], last_class=0)
    text = render(single, sample_run())
    assert "Stages" not in text
    assert "every rank uses 61.3 GiB" in text


def test_rounding_gives_the_missing_units_to_the_largest_remainders():
    assert round_to_sum([1 / 3, 1 / 3, 1 / 3], 1) == [0.4, 0.3, 0.3]
    assert round_to_sum([0.26, 0.26, 0.48], 1) == [0.3, 0.2, 0.5]
    assert round_to_sum([], 2) == []


def test_zero_parts_are_not_printed():
    lines = parts_table([("a", 1.0), ("nothing", 0.0)], unit="s", total_name="sum")
    assert not any("nothing" in line for line in lines)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"),
        (tuple(range(8)), "0-7"),
        ((0, 1, 4, 5), "0-1,4-5"),
        (tuple(range(0, 64, 8)), "0-56 step 8"),
        ((0, 2, 4, 6, 9, 12), "0,2,4,6,..."),
    ],
)
def test_ranks_are_printed_as_ranges(ranks: tuple[int, ...], text: str):
    assert rank_ranges(ranks) == text
