"""Does the prediction order plans as the measurement does?

A strategy group holds runs that differ in their plan only: equal model, shape, sequence, device,
device count, global batch, precision, framework version and task; at least three distinct plans.
Equal plans are merged by median. Spearman's rank correlation is taken of groups of five or more,
regret (measured time of the plan predicted best, over the best measured, - 1) of all. Figures are
medians per family, then over families: large grids must not decide alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from foretrain.validation.compare import Comparison
from foretrain.validation.rows import Row

MIN_PLANS = 3
MIN_FOR_SPEARMAN = 5
#: A plan within this of the best is as good.
CLOSE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats:
    """Figures over `groups` strategy groups; None where no group is large enough.

    `top1_within_5` is the share of groups whose plan predicted best is within 5 % of the best.
    """

    groups: int
    spearman: float | None
    median_regret: float | None
    top1_within_5: float | None


def rank_statistics(items: Iterable[Comparison]) -> RankStats:
    """Returns the ranking figures of the rows that have both times."""
    by_family: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for family, pairs in _strategy_groups(items):
        by_family[family].append(pairs)
    spearmans: list[float] = []
    regrets: list[float] = []
    within: list[float] = []
    for groups in by_family.values():
        values = [s for g in groups if (s := spearman(g)) is not None]
        if values:
            spearmans.append(median(values))
        family_regrets = [regret(group) for group in groups]
        regrets.append(median(family_regrets))
        within.append(fmean(r <= CLOSE for r in family_regrets))
    return RankStats(
        groups=sum(map(len, by_family.values())),
        spearman=median(spearmans) if spearmans else None,
        median_regret=median(regrets) if regrets else None,
        top1_within_5=median(within) if within else None,
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns the rank correlation of (predicted, measured) times, ties at their mean rank.

    None below five pairs, and where one side has a single value.
    """
    if len(pairs) < MIN_FOR_SPEARMAN:
        return None
    xs, ys = _ranks([p for p, _ in pairs]), _ranks([m for _, m in pairs])
    mean = (len(pairs) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True))
    spread = sum((x - mean) ** 2 for x in xs) * sum((y - mean) ** 2 for y in ys)
    return covariance / spread**0.5 if spread > 0 else None


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns how much slower than the best the plan is that is predicted best."""
    chosen = min(pairs)[1]
    return chosen / min(m for _, m in pairs) - 1


def _strategy_groups(
    items: Iterable[Comparison],
) -> Iterable[tuple[str, list[tuple[float, float]]]]:
    """Yields family and (predicted, measured) seconds of each plan of a strategy group."""
    groups: dict[Hashable, dict[Hashable, list[Comparison]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for item in items:
        if item.time_ratio is not None:
            groups[situation(item.row)][plan_of(item.row)].append(item)
    for plans in groups.values():
        if len(plans) >= MIN_PLANS:
            family = next(iter(plans.values()))[0].row.family
            yield family, [_merged(same) for same in plans.values()]


def _merged(same: Sequence[Comparison]) -> tuple[float, float]:
    predicted = [c.outcome.prediction.step_s for c in same if c.outcome.prediction]
    measured = [c.measured_s for c in same if c.measured_s is not None]
    return median(predicted), median(measured)


def situation(row: Row) -> Hashable:
    """Returns what the runs of a strategy group share."""
    return (
        row.family,
        row.model,
        row.n_layers,
        row.hidden,
        row.heads,
        row.ffn,
        row.vocab,
        row.seq_len,
        row.gpu_norm,
        row.gpu_mem_gb,
        row.interconnect,
        row.n_gpus,
        row.gbs,
        row.precision,
        row.framework,
        row.framework_version,
        row.task,
    )


def plan_of(row: Row) -> Hashable:
    """Returns what tells the plans of a strategy group apart."""
    return (
        row.tp,
        row.pp,
        row.dp,
        row.cp,
        row.ep,
        row.vpp,
        row.mbs,
        row.zero_stage,
        row.sharding,
        row.sp,
        row.recompute,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return ranks
