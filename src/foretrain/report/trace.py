"""The timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

One process per rank class, one thread per stream; arrows join the members of a transfer or
collective that lie in different classes; a counter shows the live memory of each class.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from foretrain.errors import InputError, Problem
from foretrain.report.trace_boxes import Box, Lane, boxes_of, fewer, lane_order
from foretrain.report.words import ranks_text
from foretrain.simulator.result import Result
from foretrain.units import GIB

#: Viewers slow down above this number of slices.
MAX_SLICES = 1_000_000

Event = dict[str, Any]


def write_trace(result: Result, path: Path | str) -> None:
    """Returns nothing; writes the trace to `path`, gzipped when the name ends in .gz.

    Equal results give equal files. A file appears whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    path = Path(path)
    special = path.exists() and not path.is_file()  # a pipe or device is written to, not replaced
    target = path if special else path.with_name(f".{path.name}.part")
    try:
        with target.open("wb") as raw:
            if path.suffix == ".gz":
                packed = gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0)
                with packed:
                    _write(result, cast("IO[bytes]", packed))
            else:
                _write(result, raw)
        if target != path:
            target.replace(path)
    except OSError as error:
        what = f"cannot write the trace: {error.strerror or error}"
        raise InputError(Problem(what=what, where=str(path))) from None
    finally:
        if target != path:
            target.unlink(missing_ok=True)


def trace_events(result: Result, *, max_slices: int = MAX_SLICES) -> dict[str, Any]:
    """Returns the trace as a JSON value: `traceEvents` and, in `otherData`, what it shows.

    Times are microseconds from the start of the step. Above `max_slices` slices are merged and
    left out, and `otherData.note` says how.
    """
    head, events = _contents(result, max_slices)
    return {**head, "traceEvents": list(events)}


def _contents(result: Result, max_slices: int) -> tuple[Event, Iterator[Event]]:
    """Returns the fields beside the events, and the events one by one: they need not all live."""
    flat = result.mode == "flat"
    boxes, note = fewer(boxes_of(result.timeline), max_slices, one_rank=flat)
    about: Event = {
        "program": "foretrain",
        "mode": result.mode,
        "step_time_s": result.step_time_s.value,
    }
    if note:
        about["note"] = note
    lanes = sorted({box.lane for box in boxes}, key=lane_order)
    first = len(result.classes) + 1  # no thread has the number of a process: viewers sort those up
    threads = {lane: first + i for i, lane in enumerate(lanes)}
    events = chain(
        _names(result, threads),
        (_slice(box, threads[box.lane]) for box in boxes),
        _arrows(boxes, threads),
        _memory(result),
    )
    return {"displayTimeUnit": "ms", "otherData": about}, events


def _names(result: Result, threads: dict[Lane, int]) -> Iterator[Event]:
    for index, rank_class in enumerate(result.classes):
        name = f"{rank_class.name} ({ranks_text(rank_class.ranks)})"
        yield _meta(index, 0, "process_name", {"name": name})
        yield _meta(index, 0, "process_sort_index", {"sort_index": index})
    for (index, stream, copy), thread in threads.items():
        name = f"{stream} ({copy + 1})" if copy else stream
        yield _meta(index, thread, "thread_name", {"name": name})
        yield _meta(index, thread, "thread_sort_index", {"sort_index": thread})


def _meta(index: int, thread: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": index + 1, "tid": thread, "name": name, "args": args}


def _slice(box: Box, thread: int) -> Event:
    event: Event = {
        "ph": "X",
        "pid": box.lane[0] + 1,
        "tid": thread,
        "ts": box.start_ns / 1e3,
        "dur": (box.end_ns - box.start_ns) / 1e3,
        "name": box.label,
        "cat": box.category,
    }
    if box.detail or box.key is not None:
        event["args"] = dict(box.detail) if box.key is None else {**box.detail, "key": box.key}
    return event


def _arrows(boxes: list[Box], threads: dict[Lane, int]) -> Iterator[Event]:
    """Yields one arrow from the sender (else the first to start) to each other class of a key."""
    members: dict[str, list[Box]] = {}
    for box in boxes:
        if box.key is not None:
            members.setdefault(box.key, []).append(box)
    number = 0
    for key, joined in members.items():
        joined.sort(key=lambda box: ("send" not in box.lane[1], box.start_ns, box.lane[0]))
        source = joined[0]
        reached = {source.lane[0]}
        for box in joined[1:]:
            if box.lane[0] in reached:
                continue
            reached.add(box.lane[0])
            number += 1
            start_ns = source.start_ns
            both = {"cat": box.category, "name": key, "id": number}
            yield {"ph": "s", **both, **_at(source, threads, start_ns)}
            # a viewer draws an arrow forward in time only, and ties it to the box around its end
            end_ns = min(max(box.start_ns, start_ns), max(box.end_ns, start_ns))
            yield {"ph": "f", "bp": "e", **both, **_at(box, threads, end_ns)}


def _at(box: Box, threads: dict[Lane, int], time_ns: int) -> Event:
    return {"pid": box.lane[0] + 1, "tid": threads[box.lane], "ts": time_ns / 1e3}


def _memory(result: Result) -> Iterator[Event]:
    for index, points in enumerate(result.memory_timeline):
        for time_s, num_bytes in points:
            yield {
                "ph": "C",
                "pid": index + 1,
                "ts": round(time_s * 1e9) / 1e3,
                "name": "live memory (GiB)",
                "args": {"GiB": round(num_bytes / GIB, 6)},
            }


def _write(result: Result, stream: IO[bytes]) -> None:
    """Returns nothing; events in chunks, which bound the memory of the text, one chunk per line."""
    head, events = _contents(result, MAX_SLICES)
    stream.write(_json(head)[:-1] + b',"traceEvents":[\n')
    separator = b""
    while chunk := list(islice(events, 10_000)):
        stream.write(separator + _json(chunk)[1:-1])
        separator = b",\n"
    stream.write(b"\n]}\n")


def _json(value: Event | list[Event]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
