"""The boxes of a trace: slices on lanes where none overlaps another, and fewer of them on demand.

Times are whole nanoseconds here, so that the end of one box and the start of the next one cannot
differ by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from foretrain.errors import InternalError, Problem
from foretrain.simulator.result import Slice

#: Order of the lanes of one process; streams with other names stand between these and the host.
LANE_ORDER = ("compute", "tp", "dp", "reduce", "gather", "feature", "cp", "ep", "pp")


Lane = tuple[int, str, int]


@dataclass(slots=True, kw_only=True)  # not frozen: a frozen one takes three times as long to make
class Box:
    """One slice with its place.

    `lane` is the class, the stream, and a number above 0 where the stream has several slices at
    the same time.
    """

    lane: Lane
    label: str
    category: str
    start_ns: int
    end_ns: int
    key: str | None = None
    detail: Mapping[str, str | float] = field(default_factory=dict[str, "str | float"])


def boxes_of(slices: Iterable[Slice]) -> list[Box]:
    """Returns the slices as boxes, by class, stream and start.

    A slice that starts before the one before it has ended goes to another copy of the lane.

    Raises:
        InternalError: a slice has a negative or non-finite time or ends before it starts.
    """
    boxes: list[Box] = []
    ends: dict[tuple[int, str], list[int]] = {}  # when the last box of each copy ends
    names: dict[Lane, Lane] = {}  # one tuple per lane, not one per box
    for part in sorted(slices, key=lambda s: (s.rank_class, s.stream, s.start_s, s.finish_s)):
        if not 0.0 <= part.start_s <= part.finish_s < inf:
            times = (part.start_s, part.finish_s)
            raise InternalError(Problem(what=f"bad times of slice {part.label!r}", value=times))
        start, end = round(part.start_s * 1e9), round(part.finish_s * 1e9)
        copies = ends.setdefault((part.rank_class, part.stream), [])
        copy = _free(copies, start)
        start = max(start, copies[copy])
        end = copies[copy] = max(start, end)
        lane = (part.rank_class, part.stream, copy)
        lane = names.setdefault(lane, lane)
        boxes.append(
            Box(
                lane=lane,
                label=part.label,
                category=part.category,
                start_ns=start,
                end_ns=end,
                key=part.key,
                detail=part.detail,
            )
        )
    return boxes


def _free(ends: list[int], start: int) -> int:
    """Returns the first copy of a lane that is free at `start`, a new one if none is."""
    for copy, end in enumerate(ends):
        if end <= start + 1:  # one nanosecond of overlap is rounding
            return copy
    ends.append(0)
    return len(ends) - 1


def lane_order(lane: Lane) -> tuple[int, int, str, int]:
    """Returns the sort key of a lane: class, compute first, the host last."""
    rank_class, stream, copy = lane
    word = stream.replace("-", " ").replace("_", " ").split(" ")[0]
    if word == "host":
        place = len(LANE_ORDER) + 1
    else:
        place = LANE_ORDER.index(word) if word in LANE_ORDER else len(LANE_ORDER)
    return (rank_class, place, stream, copy)


def fewer(boxes: list[Box], most: int, *, one_rank: bool) -> tuple[list[Box], str]:
    """Returns at most `most` boxes and what was done to them, '' if nothing.

    First, with `one_rank`, one rank per class is kept: the ranks of a class do the same, so the
    first lane of a stream shows one of them. Then short neighbours of one category on a lane are
    merged, ever longer ones. In the end the shortest boxes are left out.
    """
    if len(boxes) <= most:
        return boxes, ""
    total = len(boxes)
    done: list[str] = []
    if one_rank:
        boxes = [box for box in boxes if not box.lane[2]]
        done.append("one rank per class")
    span = max((box.end_ns for box in boxes), default=0)
    length = max(1, span // max(most, 1))
    merged = boxes
    while len(merged) > most and length <= 2 * span:
        merged = _merge(boxes, length)
        length *= 2
    if len(merged) < len(boxes):
        done.append(f"neighbours of one category shorter than {length / 2e3:g} us merged")
    if len(merged) > most:
        kept = sorted(merged, key=lambda box: box.start_ns - box.end_ns)[:most]
        merged = sorted(kept, key=lambda box: (box.lane, box.start_ns))
        done.append("the shortest left out")
    return merged, f"{len(merged)} of {total} slices: {', '.join(done)}"


def _merge(boxes: list[Box], length: int) -> list[Box]:
    """Returns boxes with runs of short neighbours replaced; boxes are sorted by lane and start."""
    out: list[Box] = []
    run: list[Box] = []
    for box in boxes:
        short = box.key is None and box.end_ns - box.start_ns <= length
        joins = (
            run
            and short
            and box.category == run[0].category
            and box.lane == run[0].lane
            and box.start_ns - run[-1].end_ns <= length
        )
        if not joins:
            out.extend(_joined(run))
            run = []
        if short:
            run.append(box)
        else:
            out.append(box)
    return [*out, *_joined(run)]


def _joined(run: list[Box]) -> list[Box]:
    if len(run) < 2:
        return run
    busy_us = sum(box.end_ns - box.start_ns for box in run) / 1e3
    same = all(box.label == run[0].label for box in run)
    what = run[0].label if same else run[0].category
    return [
        replace(
            run[0],
            label=f"{len(run)} x {what}",
            end_ns=run[-1].end_ns,
            detail={"merged slices": len(run), "busy us": busy_us},
        )
    ]
