"""Memory over time: live bytes of a device by part, in the order the simulation found.

Every segment has a profile (net change, highest point inside, parts at that point); chains compose.
Entries add what communication allocates and frees. The peak is the highest sum at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrain.program import Comm, Program, RankClass, Segment
from foretrain.simulator.expand import Expanded
from foretrain.simulator.tasks import Played

Parts = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Net change of a chain, and its highest point above its start with the parts there."""

    delta: Mapping[str, float] = field(default_factory=Parts)
    peak: Mapping[str, float] = field(default_factory=Parts)
    where: str = ""

    def then(self, other: Profile) -> Profile:
        """Returns this profile followed by another."""
        shifted = _plus(self.delta, other.peak)
        higher = sum(shifted.values()) > sum(self.peak.values())
        return Profile(
            delta=_plus(self.delta, other.delta),
            peak=shifted if higher else self.peak,
            where=other.where if higher else self.where,
        )


def _plus(a: Mapping[str, float], b: Mapping[str, float]) -> Parts:
    total = dict(a)
    for part, value in b.items():
        total[part] = total.get(part, 0.0) + value
    return total


def segment_profile(segment: Segment) -> Profile:
    """Returns the profile of one segment: during an item its outputs and its dying inputs live."""
    level: Parts = {}
    best: Parts = {}
    where = segment.name
    for item in segment.items:
        level = _plus(level, item.delta)
        during = _plus(level, item.transient)
        if sum(during.values()) > sum(best.values()):
            best, where = during, f"{segment.name}: {item.label}"
    return Profile(delta=level, peak=best, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest point of a device: bytes by part, what ran, and the level over time."""

    parts: Mapping[str, float]
    moment: str
    timeline: tuple[tuple[float, float], ...]
    in_step: bool = False  # the peak is in the optimizer step

    @property
    def total(self) -> float:
        """Returns the peak in bytes."""
        return sum(self.parts.values())


class Profiles:
    """Profiles of segments and chains, each made once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._chains: dict[tuple[int, ...], Profile] = {}

    def chain(self, segments: tuple[int, ...]) -> Profile:
        """Returns the profile of segments one after the other."""
        if segments not in self._chains:
            profile = Profile()
            for index in segments:
                key = (index,)
                if key not in self._chains:
                    self._chains[key] = segment_profile(self._program.segments[index])
                profile = profile.then(self._chains[key])
            self._chains[segments] = profile
        return self._chains[segments]


def memory_peak(
    expanded: Expanded, played: Played, device: int, rank_class: RankClass, profiles: Profiles
) -> Peak:
    """Returns the peak of a device. Frees come before allocations of the same moment."""
    events = _events(expanded, played, device, rank_class, profiles)
    events.sort(key=lambda event: event[:3])
    level: Parts = dict(rank_class.persistent)
    best, moment = dict(level), "weights and states loaded"
    running: tuple[Mapping[str, float], str] | None = None
    highest = sum(level.values())
    timeline: list[tuple[float, float]] = [(0.0, highest)]
    for time, kind, _, change, inside, label in events:
        if kind == _START_RUN:
            running = (inside, label)
        elif kind == _END_RUN:
            running = None
        for part, value in change.items():
            level[part] = level.get(part, 0.0) + value
        now = level if running is None else _plus(level, running[0])
        total = sum(now.values())
        timeline.append((time, total))
        if total > highest:
            best, highest, moment = dict(now), total, running[1] if running else label
    return Peak(
        parts={part: value for part, value in best.items() if abs(value) > 0.5},
        moment=moment,
        timeline=tuple(timeline),
        in_step=moment.startswith(_STEP) or best.get(_STEP, 0.0) > 0.0,
    )


_END_RUN, _END_COMM, _START_COMM, _START_RUN = 0, 1, 2, 3
_Event = tuple[float, int, int, Mapping[str, float], Mapping[str, float], str]


def _events(
    expanded: Expanded, played: Played, device: int, rank_class: RankClass, profiles: Profiles
) -> list[_Event]:
    events: list[_Event] = []
    for i, entry in enumerate(rank_class.entries):
        if isinstance(entry, Comm):
            task = expanded.comm_task.get((device, i))
            if task is None:
                continue
            if entry.delta_start:
                start = played.start_s[task]
                events.append((start, _START_COMM, i, entry.delta_start, {}, entry.label))
            if entry.delta_end:
                end = played.finish_s[task]
                events.append((end, _END_COMM, i, entry.delta_end, {}, entry.label))
            continue
        profile = profiles.chain(entry.segments)
        first = expanded.last_task[device, i]
        start = min(
            played.start_s[t]
            for t in range(expanded.first_task[device, i], first + 1)
            if expanded.info[t].stream != "host"
        )
        label = f"{_phase(entry.slot)} (micro-batch {entry.microbatch}), {profile.where}"
        events.append((start, _START_RUN, i, {}, profile.peak, label))
        change = _plus(profile.delta, entry.delta_end)
        events.append((played.finish_s[first], _END_RUN, i, change, {}, label))
    return events


_STEP = "optimizer step"


def _phase(slot: str) -> str:
    return {"F": "forward", "B": "backward"}.get(slot, _STEP)
