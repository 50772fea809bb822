"""The Chrome trace: what viewers need (names, lanes without overlap, arrows), and its limits."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError, InternalError
from foretrain.report.trace import trace_events, write_trace
from foretrain.report.trace_boxes import boxes_of, fewer
from foretrain.simulator.result import Slice
from report_sample import sample_result

NASTY = 'all-reduce "grad"\n\\ <b>λ</b> \ud800'


def part(rank_class: int, stream: str, start_s: float, finish_s: float, **more: Any) -> Slice:
    fields = {"label": "gemm", "category": "compute"} | more
    return Slice(rank_class=rank_class, stream=stream, start_s=start_s, finish_s=finish_s, **fields)


TIMELINE = (
    part(0, "host", 0.0, 1e-5, label="launch", category="host"),
    part(0, "compute", 1e-5, 0.01, detail={"segment": "layers.0"}),
    part(0, "compute", 0.01, 0.02, label=NASTY),
    part(0, "tp", 0.005, 0.01, category="tp"),
    part(0, "pp send forward", 0.02, 0.021, category="pp", key="F0.0"),
    part(1, "pp recv forward", 0.02, 0.021, category="pp", key="F0.0"),
    part(1, "compute", 0.021, 0.03),
    part(1, "pp send backward", 0.03, 0.031, category="pp", key="B0.0"),
    part(0, "pp recv backward", 0.03, 0.031, category="pp", key="B0.0"),
)


def events(timeline: tuple[Slice, ...] = TIMELINE, **options: Any) -> list[dict[str, Any]]:
    return trace_events(sample_result(timeline=timeline), **options)["traceEvents"]


def of(found: list[dict[str, Any]], phase: str, name: str | None = None) -> list[dict[str, Any]]:
    return [e for e in found if e["ph"] == phase and name in (None, e["name"])]


def check_lanes(found: list[dict[str, Any]]) -> None:
    """Times are finite and not negative; boxes of one lane do not overlap."""
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found:
        if event["ph"] == "M":
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        lane.sort()
        for (_, end), (start, _) in pairwise(lane):
            assert start >= end - 1e-12 * max(1.0, end)


def test_every_process_and_thread_has_a_name() -> None:
    found = events()
    processes = {e["pid"]: e["args"]["name"] for e in of(found, "M", "process_name")}
    assert processes == {1: "stage 0 (ranks 0-1)", 2: "stage 1 (ranks 2-3)"}
    threads = {(e["pid"], e["tid"]) for e in of(found, "M", "thread_name")}
    assert {e["pid"] for e in found} <= set(processes)
    assert {(e["pid"], e["tid"]) for e in found if e["ph"] in "Xsf"} == threads
    # a viewer takes the thread with the number of its process for the main thread
    assert not {tid for _, tid in threads} & set(processes)


def test_lanes_stand_in_a_useful_order() -> None:
    streams = ("host", "pp send forward", "gather", "tp", "zzz", "compute", "dp")
    found = events(tuple(part(0, stream, 0.0, 1.0) for stream in streams))
    place = {e["tid"]: e["args"]["sort_index"] for e in of(found, "M", "thread_sort_index")}
    named = {e["args"]["name"]: place[e["tid"]] for e in of(found, "M", "thread_name")}
    assert sorted(named, key=lambda name: named[name]) == [
        "compute", "tp", "dp", "gather", "pp send forward", "zzz", "host"
    ]  # fmt: skip


def test_slices_are_in_microseconds_with_category_and_details() -> None:
    box = of(events(), "X", "gemm")[0]
    assert (box["ts"], box["dur"], box["cat"]) == (10.0, 9990.0, "compute")
    assert box["args"] == {"segment": "layers.0"}
    assert len(of(events(), "X")) == len(TIMELINE)
    check_lanes(events())


def test_arrows_lead_from_the_sender_to_the_receiver() -> None:
    found = events()
    ends = {(e["name"], e["ph"]): e for e in found if e["ph"] in "sf"}
    assert {key: e["pid"] for key, e in ends.items()} == {
        ("F0.0", "s"): 1,
        ("F0.0", "f"): 2,
        ("B0.0", "s"): 2,
        ("B0.0", "f"): 1,
    }
    for key in ("F0.0", "B0.0"):
        start, end = ends[key, "s"], ends[key, "f"]
        assert start["id"] == end["id"]
        assert end["ts"] >= start["ts"]
        assert end["bp"] == "e"
    assert ends["F0.0", "s"]["id"] != ends["B0.0", "s"]["id"]


def test_arrows_of_a_collective_start_at_its_first_member_and_reach_each_class_once() -> None:
    members = (
        part(1, "dp", 0.0, 3.0, key="norm"),
        part(0, "dp", 1.0, 3.0, key="norm"),
        part(0, "dp", 4.0, 5.0, key="norm"),
        part(1, "dp", 4.0, 5.0, key="alone"),
    )
    arrows = [(e["ph"], e["pid"], e["ts"]) for e in events(members) if e["ph"] in "sf"]
    assert arrows == [("s", 2, 0.0), ("f", 1, 1e6)]


def test_memory_is_a_counter_per_class_in_gib() -> None:
    counters = [(e["pid"], e["ts"], e["args"]["GiB"]) for e in of(events(), "C")]
    assert counters == [(1, 0.0, 4.0), (1, 10000.0, 5.0), (2, 0.0, 5.0)]


def test_slices_at_the_same_time_get_lanes_of_their_own() -> None:
    found = events((part(0, "dp", 0.0, 2.0), part(0, "dp", 1.0, 3.0), part(0, "dp", 2.0, 4.0)))
    assert [e["args"]["name"] for e in of(found, "M", "thread_name")] == ["dp", "dp (2)"]
    check_lanes(found)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["compute", "dp", "host"]),
            st.floats(0.0, 100.0),
            st.floats(0.0, 10.0),
        ),
        max_size=30,
    ),
    st.integers(1, 40),
)
def test_any_timeline_gives_lanes_without_overlap(
    rows: list[tuple[int, str, float, float]], most: int
) -> None:
    timeline = tuple(part(c, stream, at, at + dur) for c, stream, at, dur in rows)
    found = events(timeline, max_slices=most)
    check_lanes(found)
    assert len(of(found, "X")) <= most
    names = {(e["pid"], e["tid"]) for e in of(found, "M", "thread_name")}
    assert {(e["pid"], e["tid"]) for e in of(found, "X")} == names


@pytest.mark.parametrize("times", [(-1.0, 1.0), (0.0, math.nan), (2.0, 1.0), (0.0, math.inf)])
def test_impossible_times_are_an_internal_error(times: tuple[float, float]) -> None:
    with pytest.raises(InternalError, match="bad times of slice 'gemm'"):
        events((part(0, "compute", *times),))


# ---------------------------------------------------------------------------- too many slices
def test_short_equal_neighbours_are_merged_and_long_ones_stay() -> None:
    short = tuple(part(0, "compute", i * 1e-4, i * 1e-4 + 5e-5) for i in range(100))
    long = part(0, "compute", 1.0, 2.0, label="long")
    found = of(events((*short, long), max_slices=10), "X")
    assert len(found) <= 10
    assert found[-1]["name"] == "long"
    assert sum(e["args"]["merged slices"] for e in found[:-1]) == 100
    assert found[0]["name"].endswith(" x gemm")
    assert sum(e["args"]["busy us"] for e in found[:-1]) == pytest.approx(100 * 50.0)
    assert found[-2]["ts"] + found[-2]["dur"] == pytest.approx(9950.0)


def test_merging_does_not_cross_categories_lanes_or_keys() -> None:
    timeline = (
        part(0, "compute", 0.0, 1e-6),
        part(0, "compute", 1e-6, 2e-6, label="norm"),
        part(0, "compute", 2e-6, 3e-6, category="recompute"),
        part(0, "compute", 3e-6, 4e-6, key="F0.0"),
        part(0, "tp", 0.0, 1e-6),
        part(0, "compute", 1.0, 2.0),
    )
    boxes, note = fewer(boxes_of(timeline), 5, one_rank=False)
    labels = [(box.label, box.category) for box in boxes]
    assert labels[:2] == [("2 x compute", "compute"), ("gemm", "recompute")]
    assert len(boxes) == 5
    assert note.startswith("5 of 6 slices: neighbours of one category shorter than")


def test_in_flat_mode_one_rank_per_class_remains() -> None:
    ranks = tuple(part(0, "compute", t, t + 1.0) for t in (0.0, 1.0) for _ in range(8))
    result = sample_result(timeline=ranks, mode="flat")
    assert len(of(trace_events(result)["traceEvents"], "X")) == 16
    trace = trace_events(result, max_slices=4)
    assert [(e["ts"], e["dur"]) for e in of(trace["traceEvents"], "X")] == [(0, 1e6), (1e6, 1e6)]
    assert trace["otherData"]["note"] == "2 of 16 slices: one rank per class"


def test_what_cannot_be_merged_is_left_out_shortest_first() -> None:
    keyed = tuple(part(0, "dp", i, i + 0.1 + 0.01 * i, key=f"k{i}") for i in range(9))
    trace = trace_events(sample_result(timeline=keyed), max_slices=3)
    kept = of(trace["traceEvents"], "X")
    assert [e["args"]["key"] for e in kept] == ["k6", "k7", "k8"]
    assert "the shortest left out" in trace["otherData"]["note"]


# --------------------------------------------------------------------------------- the file
def test_files_hold_the_events_and_gzip_follows_the_name(tmp_path: Path) -> None:
    result = sample_result(timeline=TIMELINE)
    write_trace(result, tmp_path / "t.json")
    write_trace(result, tmp_path / "t.json.gz")
    text = (tmp_path / "t.json").read_bytes()
    packed = (tmp_path / "t.json.gz").read_bytes()
    assert gzip.decompress(packed) == text
    assert json.loads(text) == trace_events(result)
    assert NASTY in {e["name"] for e in json.loads(text)["traceEvents"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.gz"]
    write_trace(result, tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == packed


def test_an_empty_timeline_is_a_valid_file(tmp_path: Path) -> None:
    result = sample_result(timeline=(), memory_timeline=(), classes=())
    write_trace(result, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


def test_more_events_than_one_chunk(tmp_path: Path) -> None:
    many = tuple(part(0, "compute", i * 1e-3, (i + 1) * 1e-3) for i in range(25_000))
    write_trace(sample_result(timeline=many), tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len(of(found, "X")) == 25_000


def test_a_file_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the trace"):
        write_trace(sample_result(), tmp_path / "no such folder" / "t.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write the trace"):
        write_trace(sample_result(), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_failed_trace_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    with pytest.raises(InternalError):
        write_trace(sample_result(timeline=(part(0, "compute", 1.0, 0.0),)), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
