"""One simulation: a Program and its prices in, the Result of every rank class out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt

from foretrain.cost.prices import Prices
from foretrain.errors import InputError, Problem
from foretrain.program import CommEvent, Program, Run
from foretrain.simulator.breakdown import Booked, book_device, time_parts
from foretrain.simulator.expand import Expanded, SegmentTimes, expand_flat, expand_folded
from foretrain.simulator.memory import Peak, Profiles, memory_peak
from foretrain.simulator.reference import play
from foretrain.simulator.result import Band, ClassResult, EventCost
from foretrain.simulator.segment_play import EventTimes
from foretrain.simulator.tasks import Played
from foretrain.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one play of the program found; `peaks` has the memory of each class."""

    step_s: float
    classes: tuple[ClassResult, ...]
    peaks: tuple[Peak, ...]
    last_class: int
    expanded: Expanded
    played: Played
    segments: SegmentTimes


def event_times(
    prices: Prices, overlap: Mapping[str, tuple[float, float]], *, plain: bool
) -> EventTimes:
    """Returns prices as plain lists for the engine; `plain` leaves overlap and sharing out."""
    return EventTimes(
        value=[float(v) for v in prices.value_s],
        latency=[float(v) for v in prices.latency_s],
        host=[float(v) for v in prices.host_s],
        link=prices.link,
        overlap=overlap,
        fluid=not plain,
        synced=prices.synced,
        blocking=prices.blocking,
        travel={}
        if prices.travel_s is None
        else {i: float(v) for i, v in enumerate(prices.travel_s) if v > 0.0},
        crossing=_crossing(prices),
    )


def _crossing(prices: Prices) -> dict[int, tuple[float, float]]:
    """Returns what each event does on the link of its device, in seconds out and in."""
    if prices.out_s is None or prices.in_s is None:
        return {}
    both = zip(prices.out_s, prices.in_s, strict=True)
    return {i: (float(o), float(n)) for i, (o, n) in enumerate(both) if o > 0.0 or n > 0.0}


#: A flat simulation beyond this many tasks is refused: about half a minute of pure Python.
FLAT_LIMIT = 3_000_000


def flat_tasks(program: Program) -> int:
    """Returns about how many tasks a flat simulation has: items and launches of every rank."""
    sizes = [len(segment.items) for segment in program.segments]
    return 2 * sum(
        len(rank_class.ranks)
        * sum(
            sum(sizes[segment] for segment in entry.segments) if isinstance(entry, Run) else 1
            for entry in rank_class.entries
        )
        for rank_class in program.classes
    )


def simulate(program: Program, times: EventTimes, *, flat: bool = False) -> Simulated:
    """Returns the simulated step of a program, folded or flat.

    Raises:
        InputError: a flat simulation of more than FLAT_LIMIT tasks.
    """
    if flat and flat_tasks(program) > FLAT_LIMIT:
        raise InputError(
            Problem(
                what="the job is too large to simulate every rank and operator",
                where="--flat",
                value=f"{flat_tasks(program):,} tasks",
                allowed=f"up to {FLAT_LIMIT:,}",
                way_out="leave --flat out: the hierarchical simulation gives the same times",
            )
        )
    segments = SegmentTimes(program, times)
    expanded = (expand_flat if flat else expand_folded)(program, times, segments)
    played = play(expanded.graph, fluid=times.fluid)
    profiles = Profiles(program)
    classes: list[ClassResult] = []
    peaks: list[Peak] = []
    stages = len({rank_class.stage for rank_class in program.classes})
    for index, rank_class in enumerate(program.classes):
        device = _slowest_device(expanded, played, index)
        booked = book_device(expanded, played, device, pipeline=stages > 1)
        peak = memory_peak(expanded, played, device, rank_class, profiles)
        peaks.append(peak)
        classes.append(_class_result(program, index, booked, peak))
    return Simulated(
        step_s=played.makespan_s,
        classes=tuple(classes),
        peaks=tuple(peaks),
        last_class=_last_class(expanded, played, len(classes)),
        expanded=expanded,
        played=played,
        segments=segments,
    )


def _slowest_device(expanded: Expanded, played: Played, index: int) -> int:
    """The device of a class that ends last; all ranks of a class are equal when folded."""
    devices = [d for d, (c, _) in enumerate(expanded.devices) if c == index]
    if len(devices) == 1:
        return devices[0]
    ends = _device_ends(expanded, played)
    return max(devices, key=lambda d: (ends.get(d, 0.0), -d))


def _device_ends(expanded: Expanded, played: Played) -> dict[int, float]:
    ends: dict[int, float] = {}
    for (device, _), task in (*expanded.last_task.items(), *expanded.comm_task.items()):
        ends[device] = max(ends.get(device, 0.0), played.finish_s[task])
    return ends


def _last_class(expanded: Expanded, played: Played, num_classes: int) -> int:
    ends = _device_ends(expanded, played)
    by_class = [
        max(ends.get(d, 0.0) for d, (c, _) in enumerate(expanded.devices) if c == index)
        for index in range(num_classes)
    ]
    return max(range(num_classes), key=lambda c: (by_class[c], -c))


def _class_result(program: Program, index: int, booked: Booked, peak: Peak) -> ClassResult:
    parts = time_parts(booked)
    rank_class = program.classes[index]
    exposed = sum(parts.exposed_communication.values())
    return ClassResult(
        name=rank_class.name,
        stage=rank_class.stage,
        ranks=rank_class.ranks,
        busy_s=parts.compute + parts.recompute + parts.optimizer,
        exposed_s=exposed,
        idle_s=parts.bubble + parts.wait + parts.host + parts.other,
        bubble_s=parts.bubble,
        parts=parts,
        peak_allocated_bytes=peak.total,
        peak_parts_bytes=peak.parts,
        moment=peak.moment,
    )


def event_costs(program: Program, prices: Prices) -> tuple[EventCost, ...]:
    """Returns every unique event with its label, count over all classes, and price."""
    counts = program.event_counts()
    labels = _labels(program)
    return tuple(
        EventCost(
            event=event,
            label=labels.get(i, ""),
            count=counts.get(i, 0),
            value_s=float(prices.value_s[i]),
            low_s=float(prices.low_s[i]),
            high_s=float(prices.high_s[i]),
            provenance=prices.provenance[i],
            formula=prices.formula[i],
        )
        for i, event in enumerate(program.events)
    )


def _labels(program: Program) -> dict[int, str]:
    """A name for every event: the first operator that causes it, or what a transfer serves."""
    labels: dict[int, str] = {}

    def name(event: int, label: str, category: str) -> None:
        if event in labels:
            return
        found = program.events[event]
        if isinstance(found, CommEvent):
            kind = found.collective.replace("_", "-")
            times = f"{found.count:,} x " if found.count != 1 else ""
            label = f"{category} {kind} {times}{format_bytes(found.bytes)}"
        labels[event] = label

    for segment in program.segments:
        parts = segment.name.split()[0].split(".")
        scope = ".".join("*" if part.isdigit() else part for part in parts)
        inner = "*" in scope
        for item in segment.items:
            whole = f"{scope}.{item.label}" if inner else item.label
            name(item.event, whole, item.category)
    for rank_class in program.classes:
        for entry in rank_class.entries:
            if not isinstance(entry, Run):
                name(entry.event, entry.label, entry.category)
    return labels


def step_band(
    program: Program, prices: Prices, simulated: Simulated, *, run_band: float
) -> tuple[Band, dict[str, float]]:
    """Returns the step time with its 90 % interval, and the share of event time by provenance.

    Errors of events that share constants (one family) move together and add up; families are
    independent and combine in quadrature (cost_model: intervals), also with the factor `run_band`
    that whole runs add. Communication counts with the share of it that is exposed.
    """
    step = simulated.step_s
    counts = program.class_counts(simulated.last_class)
    exposed = sum(simulated.classes[simulated.last_class].parts.exposed_communication.values())
    seconds = {i: n * float(prices.value_s[i]) for i, n in counts.items()}
    comm = sum(s for i, s in seconds.items() if prices.family[i] in COMM_FAMILIES)
    scale = min(1.0, exposed / comm) if comm > 0 else 0.0
    families: dict[str, float] = {}
    sources: dict[str, float] = {}
    for i, s in seconds.items():
        value, high = float(prices.value_s[i]), float(prices.high_s[i])
        weight = s * (scale if prices.family[i] in COMM_FAMILIES else 1.0)
        sources[prices.provenance[i]] = sources.get(prices.provenance[i], 0.0) + weight
        if value > 0.0 and high > value:
            families[prices.family[i]] = families.get(prices.family[i], 0.0) + weight * log(
                high / value
            )
    events = sqrt(sum(v * v for v in families.values())) / step if step > 0 else 0.0
    width = sqrt(events**2 + log(run_band) ** 2)
    total = sum(sources.values()) or 1.0
    band = Band(value=step, low=step * exp(-width), high=step * exp(width))
    return band, {name: value / total for name, value in sorted(sources.items())}


COMM_FAMILIES = frozenset({"scaleup", "pcie", "nic", "network"})
