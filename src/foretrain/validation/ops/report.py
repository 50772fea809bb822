"""Errors of operators by device, operator, size class and kernel, beside their noise floor.

The noise floor of a group is the mean spread of its shapes that were measured more than once, by
other sources or kernels: mean |measured / median - 1| over the measurements of the same shape. No
model that does not know which of them ran can do better.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from foretrain.validation.ops.classes import same_work, size_class
from foretrain.validation.ops.events import DTYPES
from foretrain.validation.ops.predict import OpOutcome
from foretrain.validation.report import percent, signed
from foretrain.validation.statistics import quantile

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpResult:
    """One row: what was predicted and what was measured, in seconds."""

    outcome: OpOutcome
    measured_s: float | None
    spread: float | None  # |measured / median - 1| among the measurements of the same work

    @property
    def ratio(self) -> float | None:
        """Returns predicted / measured."""
        value = self.outcome.value_s
        return None if value is None or self.measured_s is None else value / self.measured_s

    @property
    def in_band(self) -> bool | None:
        """Returns whether the measurement lies in the 90 % interval."""
        low, high = self.outcome.low_s, self.outcome.high_s
        if low is None or high is None or self.measured_s is None:
            return None
        return low <= self.measured_s <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStats:
    """Errors |predicted / measured - 1| of a group; `noise` is its noise floor, None if unknown."""

    rows: int
    n: int
    mean: float | None
    median: float | None
    p90: float | None
    max: float | None
    bias: float | None
    in_band: float | None
    noise: float | None


def results_of(
    outcomes: Sequence[OpOutcome], measured_us: Sequence[float | None]
) -> list[OpResult]:
    """Returns outcomes and measurements side by side, with the spread of equal work."""
    same: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for outcome, value in zip(outcomes, measured_us, strict=True):
        if value is not None and outcome.status == "ok":
            same[same_work(outcome)].append(value)
    middles = {key: median(values) for key, values in same.items() if len(values) > 1}
    results: list[OpResult] = []
    for outcome, value in zip(outcomes, measured_us, strict=True):
        known = value is not None and outcome.status == "ok"
        middle = middles.get(same_work(outcome)) if known else None
        spread = None if middle is None or value is None else abs(value / middle - 1)
        seconds = None if value is None else value * 1e-6
        results.append(OpResult(outcome=outcome, measured_s=seconds, spread=spread))
    return results


def statistics_of(results: Sequence[OpResult]) -> OpStats:
    """Returns the errors of some rows."""
    ratios = [r.ratio for r in results if r.ratio is not None]
    errors = [abs(ratio - 1) for ratio in ratios]
    inside = [r.in_band for r in results if r.in_band is not None]
    spreads = [r.spread for r in results if r.spread is not None]
    return OpStats(
        rows=len(results),
        n=len(errors),
        mean=fmean(errors) if errors else None,
        median=median(errors) if errors else None,
        p90=quantile(errors, 0.9),
        max=max(errors, default=None),
        bias=median(ratios) - 1 if ratios else None,
        in_band=fmean(inside) if inside else None,
        noise=fmean(spreads) if spreads else None,
    )


def _ok(result: OpResult) -> str:
    return result.outcome.op or result.outcome.row.op or "none"


#: The groups of the JSON form; those of the text table join the first five.
GROUPINGS: dict[str, Callable[[OpResult], str]] = {
    "op": lambda r: f"{_ok(r)} {r.outcome.row.part}",
    "dtype": lambda r: DTYPES.get(r.outcome.row.dtype, r.outcome.row.dtype) or "not stated",
    "device": lambda r: r.outcome.device or r.outcome.row.device or "not stated",
    "kernel": lambda r: r.outcome.row.stack or "not stated",
    "size": lambda r: size_class(r.outcome.events[0]) if r.outcome.events else "not priced",
}


def _by_kind(results: Sequence[OpResult]) -> dict[str, list[OpResult]]:
    """Returns the rows of each operator, whatever its direction."""
    groups: dict[str, list[OpResult]] = defaultdict(list)
    for result in results:
        groups[_ok(result)].append(result)
    return dict(sorted(groups.items()))


def grouped(results: Sequence[OpResult], *keys: str) -> dict[tuple[str, ...], list[OpResult]]:
    """Returns the rows of each group of these keys, sorted."""
    groups: dict[tuple[str, ...], list[OpResult]] = defaultdict(list)
    for result in results:
        groups[tuple(GROUPINGS[key](result) for key in keys)].append(result)
    return dict(sorted(groups.items()))


def to_json(results: Sequence[OpResult]) -> dict[str, Any]:
    """Returns the JSON form, docs/reference/json.md."""
    return {
        "schema": SCHEMA,
        "overall": asdict(statistics_of(results)),
        "kinds": {kind: asdict(statistics_of(rows)) for kind, rows in _by_kind(results).items()},
        "groups": {
            name: {
                key: asdict(statistics_of(rows)) for (key,), rows in grouped(results, name).items()
            }
            for name in GROUPINGS
        },
        "rows": [_row_json(result) for result in results],
    }


def _row_json(result: OpResult) -> dict[str, Any]:
    outcome, ratio = result.outcome, result.ratio
    return {
        "id": outcome.row.id,
        "status": outcome.status,
        "reason": outcome.reason,
        "assumed": list(outcome.assumed),
        "latency_us": {
            "measured": _us(result.measured_s),
            "value": _us(outcome.value_s),
            "low": _us(outcome.low_s),
            "high": _us(outcome.high_s),
            "error": None if ratio is None else abs(ratio - 1),
        },
    }


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def render(results: Sequence[OpResult]) -> str:
    """Returns the text for a terminal.

    A headline per kind of operator (a mean over all kinds would say which kind has most rows), then
    one line per operator, dtype, device, kernel and size.
    """
    counts = Counter(result.outcome.status for result in results)
    lines = [
        f"{len(results):,} rows: {counts['ok']:,} priced, {counts['unsupported']:,} unsupported, "
        f"{counts['error']:,} errors."
    ]
    priced = [result for result in results if result.outcome.status == "ok"]
    for kind, members in _by_kind(priced).items():
        total = statistics_of(members)
        lines.append(
            f"{kind}: {total.n:,} rows, mean error {percent(total.mean)}, median "
            f"{percent(total.median)}, bias {signed(total.bias)}, {percent(total.in_band)} inside "
            "the 90 % interval."
        )
    lines += _uncompared(priced)
    lines.append("")
    keys = ("op", "dtype", "device", "kernel")
    rows: list[tuple[tuple[str, ...], OpStats]] = []
    for group, members in grouped(priced, *keys).items():
        sizes = grouped(members, "size")
        if len(sizes) > 1:
            rows.append(((*group, "all"), statistics_of(members)))
        rows += [((*group, size), statistics_of(part)) for (size,), part in sizes.items()]
    lines += _table((*keys, "size"), rows)
    assumed = Counter(words for r in priced for words in r.outcome.assumed)
    if assumed:
        lines += ["", "Assumed (not stated in the table):"]
        lines += [f"  {count:6,d}  {words}" for words, count in assumed.most_common(20)]
    for status, title in (("unsupported", "Not priced:"), ("error", "Faults of foretrain:")):
        lines += _left_out([r for r in results if r.outcome.status == status], title)
    return "\n".join(lines)


def _uncompared(priced: Sequence[OpResult]) -> list[str]:
    """Says which rows have a price and nothing to compare it with."""
    without = [result for result in priced if result.measured_s is None]
    if not without:
        return []
    return [
        f"{len(without):,} priced rows are not compared: no latency_us above zero and of at most "
        f"an hour ({_first_ids(without)})."
    ]


def _left_out(results: Sequence[OpResult], title: str) -> list[str]:
    """Returns the reasons of rows without a price, the most frequent first, with their ids."""
    by_reason: dict[str | None, list[OpResult]] = {}
    for result in results:
        by_reason.setdefault(result.outcome.reason, []).append(result)
    often = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = [f"  {len(rows):6,d}  {why} ({_first_ids(rows)})" for why, rows in often[:20]]
    return ["", title, *lines] if lines else []


def _first_ids(results: Sequence[OpResult], most: int = 3) -> str:
    names = ", ".join(result.outcome.row.id for result in results[:most])
    return f"ids {names}{', ...' if len(results) > most else ''}"


def _table(keys: Sequence[str], rows: Sequence[tuple[tuple[str, ...], OpStats]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(key), *(len(group[i]) for group, _ in rows)) for i, key in enumerate(keys)]
    columns = ("rows", "mean", "median", "p90", "bias", "in band", "noise")
    text = "  ".join(f"{key:{width}s}" for key, width in zip(keys, widths, strict=True))
    lines = [text + "".join(f"{column:>9s}" for column in columns)]
    for group, stats in rows:
        text = "  ".join(f"{cell:{width}s}" for cell, width in zip(group, widths, strict=True))
        cells = (
            f"{stats.n:,}",
            percent(stats.mean),
            percent(stats.median),
            percent(stats.p90),
            signed(stats.bias),
            percent(stats.in_band),
            percent(stats.noise),
        )
        lines.append(text + "".join(f"{cell:>9s}" for cell in cells))
    return lines
