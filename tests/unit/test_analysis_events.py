"""Event shares, baselines and bottlenecks against the sample's numbers by hand."""

from __future__ import annotations

import pytest

from foretrain.analysis.events import (
    bottleneck_shares,
    class_events,
    event_shares,
    naive_baseline,
    stream_times,
)
from report_sample import sample_program, sample_result


def test_shares_are_counts_times_prices_and_sum_to_one():
    shares = event_shares(sample_result())
    assert [round(1e3 * row.total_s) for row in shares] == [15, 10, 5, 2]
    assert [row.kind for row in shares] == ["compute", "communication", "compute", "communication"]
    assert sum(row.share for row in shares) == pytest.approx(1.0)
    assert shares[0].share == pytest.approx(15 / 32)


def test_events_of_a_class_are_counted_through_its_segments():
    program = sample_program()
    counts = class_events(program, program.classes[1])
    assert counts == {("pp", 3): 1, ("compute", 0): 3, ("compute", 1): 3, ("tp", 2): 3}


def test_counts_of_all_classes_are_those_of_the_program():
    program = sample_program()
    total: dict[int, int] = {}
    for rank_class in program.classes:
        for (_, event), count in class_events(program, rank_class).items():
            total[event] = total.get(event, 0) + count
    assert total == program.event_counts()


def test_baselines_are_the_longest_stream_and_the_sum_of_the_busiest_class():
    result = sample_result()
    # stage 1: three layers of 3 + 1 ms compute and 2 ms reduction, and 1 ms of transfer
    times = stream_times(result, result.program.classes[1])
    assert times == pytest.approx({"compute": 0.012, "tp": 0.006, "pp": 0.001})
    base = naive_baseline(result)
    assert base.perfect_overlap_s == pytest.approx(0.012)
    assert base.no_overlap_s == pytest.approx(0.019)


def test_bottlenecks_sum_to_one_and_split_computation_by_its_events():
    shares = bottleneck_shares(sample_result())
    assert sum(shares.values()) == pytest.approx(1.0)
    busy = 1 / 3 + 1 / 9 + 1 / 9
    assert shares["matrix products"] == pytest.approx(busy * 3 / 4)
    assert shares["memory-bound kernels"] == pytest.approx(busy / 4)
    assert shares["exposed communication"] == pytest.approx(1 / 9 + 1 / 27)
    assert shares["pipeline bubble and waiting"] == pytest.approx(6 / 27)


def test_a_result_without_events_has_no_shares():
    result = sample_result(events=())
    assert event_shares(result) == ()
    assert naive_baseline(result).no_overlap_s == 0.0
