"""Statistics over comparisons: errors of time and memory, group medians, out-of-memory, ranking.

Errors are |predicted / measured - 1|; bias is the median of predicted / measured - 1, so that it
has a sign. A group median counts every configuration once, however many rows it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from foretrain.validation.compare import Comparison
from foretrain.validation.ranking import RankStats, rank_statistics
from foretrain.validation.subsets import SUBSETS, subset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Errors of one quantity over `n` rows; None without rows. `in_band` for times only."""

    n: int
    median: float | None
    mean: float | None
    p90: float | None
    max: float | None
    bias: float | None
    in_band: float | None
    group_median: float | None
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomStats:
    """How out-of-memory was foretold: positive means that the run did not fit."""

    tp: int
    fp: int
    fn: int
    tn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Everything about one set of rows."""

    rows: int
    predicted: int
    time: ErrorStats
    memory: ErrorStats
    oom: OomStats
    rank: RankStats


Grouping = Callable[[Comparison], str]

#: Device counts of the scale groups: (first, last, name).
SCALES = (
    (1, 1, "1"),
    (2, 8, "2-8"),
    (9, 64, "9-64"),
    (65, 256, "65-256"),
    (257, 1024, "257-1024"),
    (1025, 10**9, "over 1024"),
)


def scale_of(item: Comparison) -> str:
    """Returns the name of the range that the number of devices falls into."""
    count = item.row.n_gpus or 0
    return next((name for low, high, name in SCALES if low <= count <= high), "not stated")


#: The groups of the JSON form: name -> which group a row belongs to.
GROUPINGS: dict[str, Grouping] = {
    "family": lambda item: item.row.family or "other",
    "gpu": lambda item: item.row.gpu_norm or item.row.gpu or "not stated",
    "scale": scale_of,
    "model_class": lambda item: item.row.model_class or "not stated",
    "subset": subset_of,
}
_ORDER = {name: place for place, name in enumerate((*(name for *_, name in SCALES), *SUBSETS))}


def statistics_of(items: Sequence[Comparison], *, counted_only: bool = True) -> Stats:
    """Returns the statistics of some rows; those that do not count are left out of errors."""
    counted = [item for item in items if item.counted or not counted_only]
    return Stats(
        rows=len(items),
        predicted=sum(item.outcome.status == "ok" for item in items),
        time=error_stats(counted, lambda c: c.time_ratio, lambda c: c.in_band),
        memory=error_stats(counted, lambda c: c.memory_ratio, lambda c: None),
        oom=oom_stats(items),
        rank=rank_statistics(counted),
    )


def grouped(items: Iterable[Comparison], key: Grouping) -> dict[str, list[Comparison]]:
    """Returns the rows of each group, in order of scale or subset, else of name."""
    result: dict[str, list[Comparison]] = defaultdict(list)
    for item in items:
        result[key(item)].append(item)
    return dict(sorted(result.items(), key=lambda pair: (_ORDER.get(pair[0], -1), pair[0])))


def error_stats(
    items: Sequence[Comparison],
    ratio: Callable[[Comparison], float | None],
    in_band: Callable[[Comparison], bool | None],
) -> ErrorStats:
    """Returns the errors of the rows that have both a prediction and a measurement."""
    pairs = [(item, value) for item in items if (value := ratio(item)) is not None]
    errors = [abs(value - 1) for _, value in pairs]
    groups: dict[str, list[float]] = defaultdict(list)
    for (item, _), error in zip(pairs, errors, strict=True):
        groups[item.row.config_group or item.row.id].append(error)
    inside = [answer for item, _ in pairs if (answer := in_band(item)) is not None]
    return ErrorStats(
        n=len(pairs),
        median=median(errors) if errors else None,
        mean=fmean(errors) if errors else None,
        p90=quantile(errors, 0.9),
        max=max(errors, default=None),
        bias=median(value - 1 for _, value in pairs) if pairs else None,
        in_band=fmean(inside) if inside else None,
        group_median=median(median(g) for g in groups.values()) if groups else None,
        groups=len(groups),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns a quantile, linear between neighbours; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def oom_stats(items: Iterable[Comparison]) -> OomStats:
    """Returns how often "does not fit" was foretold and true, foretold only, missed, neither."""
    counts = {(True, True): 0, (True, False): 0, (False, True): 0, (False, False): 0}
    for item in items:
        prediction = item.outcome.prediction
        if prediction is not None and item.fits_measured is not None:
            counts[not prediction.fits, not item.fits_measured] += 1
    return OomStats(
        tp=counts[True, True],
        fp=counts[True, False],
        fn=counts[False, True],
        tn=counts[False, False],
    )
