"""The text form of a Program: events, segments and the launch list of every rank class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from foretrain.errors import InputError, Problem
from foretrain.program import Comm, ComputeEvent, Entry, Event, Item, Program, RankClass, Run
from foretrain.report.patterns import label_names, matches
from foretrain.report.words import gib, rank_ranges
from foretrain.units import format_bytes, format_flop


def program_text(program: Program, what: str | None = None) -> str:
    """Returns the program as lines of plain text, stable enough to diff.

    `what` keeps only what it names: a rank class ("stage 1"), or a pattern of labels
    ("layers.*.mlp", "*reduce*"); a name also keeps what lies below it.

    Raises:
        InputError: nothing has the name `what`.
    """
    classes = [rc for rc in program.classes if what is not None and matches(rc.name, what)]
    pattern = None if classes else what
    kept = classes or list(program.classes)
    segments = sorted({s for rc in kept for e in rc.entries for s in _segments(e)})
    shown = [s for s in segments if _segment_items(program, s, pattern)]
    entries = [(rc, _class_entries(program, rc, pattern)) for rc in kept]
    events = _events(program, shown, pattern, [e for _, pairs in entries for _, e in pairs])
    if pattern is not None:
        entries = [(rc, pairs) for rc, pairs in entries if pairs]
        if not entries and not shown:
            raise _nothing(program, pattern)
    mesh = " x ".join(
        f"{a} {n}" for a, n in zip(program.mesh.axes, program.mesh.sizes, strict=True)
    )
    lines = [f"mesh: {mesh} = {program.mesh.world_size} ranks"]
    lines += [f"samples per step: {program.samples_per_step}"]
    lines += [f"note: {note}" for note in program.notes]
    lines += ["", "events (distinct pieces of work)"]
    lines += [f"  e{i}  {event_text(program.events[i])}" for i in events]
    lines += ["", "segments (what a layer launches, in order)"]
    for s in shown:
        lines += [f"  s{s}  {program.segments[s].name}"]
        items = _segment_items(program, s, pattern)
        lines += [f"      {i}  {_item(item)}" for i, item in items]
    for rank_class, pairs in entries:
        lines += ["", *_class_head(rank_class)]
        lines += [f"  {i}  {_entry(entry)}" for i, entry in pairs]
    return "\n".join(lines) + "\n"


def event_text(event: Event) -> str:
    """Returns one event in one line: operator with local shape, or collective with group."""
    if isinstance(event, ComputeEvent):
        shape = " ".join(f"{name}={value:g}" for name, value in event.shape)
        work = f"{format_flop(event.flops)}, {format_bytes(event.bytes)}"
        return f"{event.op} {event.direction} {event.dtype}  {shape}  ({work})"
    more = f" x {event.count}" if event.count != 1 else ""
    shared = f", one of {event.sharers} groups of the node" if event.sharers > 1 else ""
    ranks = f"ranks {rank_ranges(event.ranks)}"
    return f"{event.collective} {format_bytes(event.bytes)} {event.dtype}{more}  {ranks}{shared}"


def _segments(entry: Entry) -> tuple[int, ...]:
    return entry.segments if isinstance(entry, Run) else ()


def _segment_items(program: Program, s: int, pattern: str | None) -> list[tuple[int, Item]]:
    segment = program.segments[s]
    path = segment.name.split(" ")[0]
    return [
        (i, item)
        for i, item in enumerate(segment.items)
        if pattern is None or matches(item.label, pattern, path=path)
    ]


def _class_entries(
    program: Program, rank_class: RankClass, pattern: str | None
) -> list[tuple[int, Entry]]:
    return [
        (i, entry)
        for i, entry in enumerate(rank_class.entries)
        if pattern is None or _entry_matches(program, entry, pattern)
    ]


def _entry_matches(program: Program, entry: Entry, pattern: str) -> bool:
    if isinstance(entry, Comm):
        return matches(entry.label, pattern)
    return matches(entry.layer, pattern) or any(
        _segment_items(program, s, pattern) for s in set(entry.segments)
    )


def _events(
    program: Program, segments: Sequence[int], pattern: str | None, entries: Sequence[Entry]
) -> list[int]:
    used = {item.event for s in segments for _, item in _segment_items(program, s, pattern)}
    used |= {entry.event for entry in entries if isinstance(entry, Comm)}
    return sorted(used)


def _nothing(program: Program, what: str) -> InputError:
    names = [rank_class.name for rank_class in program.classes[:2]]
    for segment in program.segments[:2]:
        path = segment.name.split(" ")[0]
        names += [label_names(item.label, path)[-1] for item in segment.items[:2]]
    return InputError(
        Problem(
            what="nothing in the program has this name or pattern",
            where="WHAT",
            value=what,
            way_out=f"names look like {', '.join(repr(name) for name in names)}",
        )
    )


def _item(item: Item) -> str:
    return _join(
        f"{item.label}: e{item.event}",
        f"on {item.stream}",
        item.category if item.category != item.stream else "",
        f"waits {_numbers(item.waits)}" if item.waits else "",
        _bytes("transient", item.transient),
        _bytes("keeps", item.delta),
    )


def _entry(entry: Entry) -> str:
    if isinstance(entry, Comm):
        return _join(
            f"{entry.label}: e{entry.event}",
            f"on {entry.stream}",
            f"microbatch {entry.microbatch} chunk {entry.chunk}",
            f"after {_numbers(entry.after)}" if entry.after else "",
            f"key {entry.key}" if entry.key else "",
            "posted" if entry.posted else "",
            _bytes("start", entry.delta_start),
            _bytes("end", entry.delta_end),
        )
    return _join(
        f"{entry.slot} microbatch {entry.microbatch} chunk {entry.chunk}",
        entry.layer,
        f"runs {_repeats(entry.segments)}",
        f"after {_numbers(entry.after)}" if entry.after else "",
        "host waits" if entry.host_sync else "",
        _bytes("end", entry.delta_end),
    )


def _class_head(rank_class: RankClass) -> list[str]:
    held = ", ".join(f"{name} {gib(num)}" for name, num in rank_class.persistent.items())
    return [
        f"class {rank_class.name}: ranks {rank_ranges(rank_class.ranks)}",
        f"  holds all step: {held or 'nothing'}",
    ]


def _join(*words: str) -> str:
    return ", ".join(word for word in words if word)


def _numbers(values: Sequence[int]) -> str:
    return " ".join(str(value) for value in values)


def _repeats(segments: Sequence[int]) -> str:
    """Returns segments with equal neighbours folded, e.g. 's0 s1 x4 s2'."""
    words: list[str] = []
    for s, same in groupby(segments):
        count = len(list(same))
        words.append(f"s{s}" if count == 1 else f"s{s} x{count}")
    return " ".join(words)


def _bytes(title: str, parts: Mapping[str, float]) -> str:
    words = [f"{name} {value:+,.0f} B" for name, value in parts.items() if value]
    return f"{title} {' '.join(words)}" if words else ""
