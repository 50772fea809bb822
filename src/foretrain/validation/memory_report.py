"""Memory against measurements: error by family in the quantity each prints, and verdicts.

Rows that rest on an assumed recompute, ZeRO, optimizer or micro-batch setting stand apart: their
memory is that of another run, maybe, and that the run worked then refutes the assumption, not the
prediction. A verdict is positive when a run is said not to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from foretrain.units import GIB
from foretrain.validation.compare import Comparison
from foretrain.validation.statistics import OomStats, error_stats, oom_stats
from foretrain.validation.subsets import DENSE, subset_of

#: Words of assumptions about settings that decide memory.
DECIDING = ("recompute", "zero", "optimizer", "microbatch (not stated)")
#: Families with fewer distinct configurations are shown, and say little.
MIN_GROUPS = 5
QUANTITIES = {
    "used": "device used",
    "reserved": "reserved",
    "first reserved": "reserved, first stage",
    "allocated": "allocated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyMemory:
    """The memory errors of one family in one quantity; shares."""

    family: str
    quantity: str
    stated: bool
    rows: int
    groups: int
    median: float
    p90: float
    bias: float


def memory_families(items: Sequence[Comparison]) -> list[FamilyMemory]:
    """Returns errors of dense decoders of good grade by family, rows with stated settings first."""
    keys: dict[tuple[bool, str, str], list[Comparison]] = {}
    for item in items:
        if item.memory_ratio is None or subset_of(item) != DENSE:
            continue
        key = (not stated(item), item.row.family, QUANTITIES[item.memory_quantity])
        keys.setdefault(key, []).append(item)
    found: list[FamilyMemory] = []
    for (assumed, family, quantity), rows in sorted(keys.items()):
        stats = error_stats(rows, lambda c: c.memory_ratio, lambda c: None)
        found.append(
            FamilyMemory(
                family=family,
                quantity=quantity,
                stated=not assumed,
                rows=stats.n,
                groups=stats.groups,
                median=stats.median or 0.0,
                p90=stats.p90 or 0.0,
                bias=stats.bias or 0.0,
            )
        )
    return found


def stated(item: Comparison) -> bool:
    """Returns whether nothing that decides memory was assumed for a row."""
    return not any(word in line for line in item.outcome.assumed for word in DECIDING)


def recall(stats: OomStats) -> float | None:
    """Returns the share of runs that failed which are said not to fit."""
    failed = stats.tp + stats.fn
    return stats.tp / failed if failed else None


def precision(stats: OomStats) -> float | None:
    """Returns the share of runs said not to fit that failed."""
    refused = stats.tp + stats.fp
    return stats.tp / refused if refused else None


def margin_gib(item: Comparison) -> float:
    """Returns what a run has to spare in GiB by the prediction, negative when it does not fit."""
    prediction = item.outcome.prediction
    if prediction is None:
        return 0.0
    return (prediction.usable_bytes - prediction.device_used_bytes) / GIB


def wrong_verdicts(items: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """Returns runs that worked and are said not to fit, and failures said to fit; worst first."""
    impossible: list[Comparison] = []
    missed: list[Comparison] = []
    for item in items:
        prediction = item.outcome.prediction
        if prediction is None or item.fits_measured is None:
            continue
        if item.fits_measured and not prediction.fits:
            impossible.append(item)
        elif not item.fits_measured and prediction.fits:
            missed.append(item)
    impossible.sort(key=lambda item: (margin_gib(item), item.row.id))
    missed.sort(key=lambda item: (-margin_gib(item), item.row.id))
    return impossible, missed


def left_out(items: Sequence[Comparison]) -> list[Comparison]:
    """Returns the crashes that cannot be memory (validation/failed_runs.py)."""
    return [
        item
        for item in items
        if "failed(oom/crash)" in item.row.task.lower() and item.fits_measured is None
    ]


def summary_lines(items: Sequence[Comparison]) -> list[str]:
    """Returns the memory part of the text report; empty where nothing was measured."""
    families = memory_families(items)
    lines: list[str] = []
    if families:
        lines.append(
            "Memory of dense decoders, grade A and A-, in the quantity each source prints:"
        )
        for f in families:
            apart = "" if f.stated else "  (settings assumed: apart)"
            lines.append(
                f"  {f.family:22s} {f.quantity:22s} {f.rows:5,d} rows {f.groups:4,d} conf. "
                f"median {f.median:6.1%}  p90 {f.p90:6.1%}  bias {f.bias:+6.1%}{apart}"
            )
        counted = [f for f in families if f.stated]
        if counted:
            middle = median(f.median for f in counted)
            tail = fmean(f.p90 for f in counted)
            lines.append(f"  median of the families {middle:.1%}, mean p90 {tail:.1%}")
    stats = oom_stats(items)
    if stats.tp + stats.fn:
        lines += ["", *_verdict_lines(items, stats)]
    return lines


def verdicts(items: Sequence[Comparison]) -> dict[str, OomStats]:
    """Returns the verdicts over runs whose settings are stated, and over the others."""
    return {
        "stated": oom_stats([item for item in items if stated(item)]),
        "assumed": oom_stats([item for item in items if not stated(item)]),
    }


def _verdict_lines(items: Sequence[Comparison], stats: OomStats) -> list[str]:
    impossible, missed = wrong_verdicts(items)
    parts = verdicts(items)
    return [
        f"Out of memory, all runs: {_rates(stats)};",
        f"  settings stated: {_rates(parts['stated'])};",
        f"  settings assumed: {_rates(parts['assumed'])};",
        f"  {len(left_out(items)):,} crashes that cannot be memory are left out.",
        *_listed("Worked, and said not to fit", impossible),
        *_listed("Failed, and said to fit", missed),
    ]


def _rates(stats: OomStats) -> str:
    """Recall and precision with their counts."""
    found, sure = recall(stats), precision(stats)
    return (
        f"recall {'-' if found is None else f'{found:.3f}'} of {stats.tp + stats.fn:,} failures, "
        f"precision {'-' if sure is None else f'{sure:.3f}'} of {stats.tp + stats.fp:,} refused"
    )


def _listed(title: str, items: Sequence[Comparison], most: int = 12) -> list[str]:
    if not items:
        return []
    lines = [f"  {title} ({len(items):,}), GiB to spare:"]
    lines += [f"    {margin_gib(item):+8.1f}  {_named(item)}" for item in items[:most]]
    if len(items) > most:
        lines.append(f"    ... all {len(items):,} are on the accuracy page (--report)")
    return lines


def _named(item: Comparison) -> str:
    return item.row.id if stated(item) else f"{item.row.id} (settings assumed)"


def memory_page(items: Sequence[Comparison]) -> str:
    """Returns the memory section of the accuracy page (Markdown)."""
    lines = ["## Memory", "", _INTRO, "", _HEAD, "|---|---|---:|---:|---:|---:|---:|---|"]
    for f in memory_families(items):
        apart = "stated" if f.stated else "assumed"
        cells = (
            f"{f.rows:,} | {f.groups:,} | {f.median:.1%} | {f.p90:.1%} | {f.bias:+.1%} | {apart}"
        )
        lines.append(f"| {f.family} | {f.quantity} | {cells} |")
    stats = oom_stats(items)
    if stats.tp + stats.fn:
        out = left_out(items)
        parts = verdicts(items)
        lines += [
            "",
            "Out of memory, positive where a run is said not to fit:",
            "",
            "| settings | rightly refused | wrongly | missed | rightly fits | verdicts |",
            "|---|---:|---:|---:|---:|---|",
            *(
                f"| {name} | {s.tp:,} | {s.fp:,} | {s.fn:,} | {s.tn:,} | {_rates(s)} |"
                for name, s in (*parts.items(), ("all", stats))
            ),
            "",
            "A run whose recompute, ZeRO stage, optimizer or micro-batch is not stated worked with "
            "settings that fit: refused, it refutes what was assumed.",
            "",
            f"{len(out):,} of the runs that failed are left out, because it cannot have been "
            "memory: more stages than layers, or a run of the same model and pp worked that has "
            "no larger tp and dp and no smaller micro-batch and in-flight count:",
            "",
            ", ".join(item.row.id for item in out) or "none",
        ]
        for title, rows in zip(_TITLES, wrong_verdicts(items), strict=True):
            for name, part in (
                ("stated", [r for r in rows if stated(r)]),
                ("assumed", [r for r in rows if not stated(r)]),
            ):
                lines += ["", f"{title}, settings {name} ({len(part):,}), GiB to spare:", ""]
                listed = ", ".join(f"{r.row.id} ({margin_gib(r):+.1f})" for r in part)
                lines.append(listed or "none")
    return "\n".join(lines) + "\n"


_INTRO = (
    "Dense decoders of grade A and A-, each compared in the quantity that its source prints. Rows\n"
    "whose recompute, ZeRO stage, optimizer or micro-batch is assumed stand apart."
)
_HEAD = "| family | quantity | rows | configurations | median | p90 | bias | settings |"
_TITLES = ("Runs that worked and are said not to fit", "Failures that are said to fit")
