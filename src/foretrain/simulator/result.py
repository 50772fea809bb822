"""The Result of a prediction: times with bands, memory with parts, ranks, timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrain.program import Event, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A value with its 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Where the step of the last-finishing rank class went, in seconds; sums to the step."""

    compute: float
    recompute: float
    optimizer: float
    exposed_communication: Mapping[str, float]  # keys tp, cp, ep, pp, dp, copy
    bubble: float
    host: float
    wait: float
    other: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return (
            self.compute
            + self.recompute
            + self.optimizer
            + sum(self.exposed_communication.values())
            + self.bubble
            + self.host
            + self.wait
            + self.other
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """The peak of the worst rank. `parts` (bytes) add up to `device_used_bytes`."""

    capacity_bytes: float
    usable_bytes: float
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    device_used_bytes: float
    worst_rank: int
    moment: str
    parts_bytes: Mapping[str, float]
    band: float = 1.0  # factor (x/) of the 90 % interval of what is used
    host_used_bytes: float = 0.0  # of the fullest node, what is offloaded to it
    host_capacity_bytes: float | None = None  # of one node, None: not stated

    @property
    def host_fits(self) -> bool:
        """Returns whether what is offloaded fits into the host, True where its size is unknown."""
        return self.host_capacity_bytes is None or self.host_used_bytes <= self.host_capacity_bytes

    @property
    def fits(self) -> bool:
        """Returns whether device and host hold what is asked of them."""
        return self.device_used_bytes <= self.usable_bytes and self.host_fits

    @property
    def missing_bytes(self) -> float:
        """Returns the bytes that are lacking: of a node's host where it is short, else a device."""
        if not self.host_fits:
            return self.host_used_bytes - (self.host_capacity_bytes or 0.0)
        return max(self.device_used_bytes - self.usable_bytes, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """One class of equal ranks."""

    name: str
    stage: int
    ranks: tuple[int, ...]
    busy_s: float
    exposed_s: float
    idle_s: float
    bubble_s: float
    parts: TimeParts
    peak_allocated_bytes: float
    peak_parts_bytes: Mapping[str, float]
    moment: str
    peak_reserved_bytes: float = 0.0
    device_used_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One box of the timeline: what ran on which stream of which class, from when to when."""

    rank_class: int
    stream: str
    label: str
    category: str
    start_s: float
    finish_s: float
    key: str | None = None  # joins the members of one collective or transfer
    detail: Mapping[str, str | float] = field(default_factory=dict[str, "str | float"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCost:
    """A unique event with its price and how often it happens (per rank of each class, summed)."""

    event: Event
    label: str
    count: int
    value_s: float
    low_s: float
    high_s: float
    provenance: str
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything a report needs. FLOP counts follow docs/explain/flops.md."""

    step_time_s: Band
    samples_per_s: float
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    model_flops_per_step: float
    model_flops_full_attention: float
    hardware_flops_per_step: float
    peak_flops_per_device: float
    peak_dtype: str
    mfu: float
    hfu: float
    fits: bool
    bubble_fraction: float
    memory: MemoryResult
    time_parts: TimeParts
    last_class: int
    classes: tuple[ClassResult, ...]
    events: tuple[EventCost, ...]
    timeline: tuple[Slice, ...]
    memory_timeline: tuple[tuple[tuple[float, float], ...], ...]  # per class: (time s, bytes)
    program: Program
    provenance: Mapping[str, float]  # source -> share of the step's summed event time
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    mode: str  # hierarchical or flat
    simulation_s: float = 0.0
    sample_word: str = "samples"  # what a sample is called: samples, images
