"""The result of `validate network`: as JSON (schema 1) and as text, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from foretrain.units import US
from foretrain.validation.network.compare import BANDS, BandStats, Outcome, by_fabric, by_system
from foretrain.validation.report import percent, short_reason, signed

SCHEMA = 1


def to_json(items: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the JSON form, docs/reference/json.md."""
    systems = by_system(items)
    return {
        "schema": SCHEMA,
        "fabrics": [
            {"fabric": fabric, "band": band, **asdict(stats)}
            for (fabric, band), stats in sorted(by_fabric(systems).items())
        ],
        "systems": [
            {"fabric": fabric, "system": system, "band": band, **asdict(stats)}
            for (fabric, system, band), stats in sorted(systems.items())
        ],
        "rows": [_row(item) for item in items],
    }


def _row(item: Outcome) -> dict[str, Any]:
    ratio = item.ratio
    return {
        "id": item.row.id,
        "status": "unsupported" if item.value_s is None else "ok",
        "reason": item.reason or None,
        "assumed": list(item.row.assumed),
        "time_us": {
            "measured": item.row.time_us,
            "value": None if item.value_s is None else item.value_s / US,
            "low": None if item.low_s is None else item.low_s / US,
            "high": None if item.high_s is None else item.high_s / US,
            "error": None if ratio is None else abs(ratio - 1.0),
        },
    }


def render(items: Sequence[Outcome]) -> str:
    """Returns the tables for a terminal: fabrics, then systems, the worst first."""
    known = [item for item in items if item.value_s is not None]
    timed = [item for item in known if item.ratio is not None]
    systems = by_system(items)
    lines = [
        f"{len(items):,} rows: {len(known):,} predicted, {len(items) - len(known):,} unsupported, "
        f"{len(timed):,} compared. Error: median over sizes of each size's median, in brackets the "
        "bias; fabrics: median over systems."
    ]
    fabrics = {(fabric, "", band): stats for (fabric, band), stats in by_fabric(systems).items()}
    lines += ["", *_table("Fabric", fabrics), "", *_table("System", systems)]
    reasons = Counter(short_reason(item.reason) for item in items if item.reason)
    if reasons:
        lines += ["", "Not predicted:"]
        lines += [f"  {count:6,d}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _table(title: str, stats: Mapping[tuple[str, str, str], BandStats]) -> list[str]:
    """One line per fabric or system, its bands side by side."""
    names: dict[tuple[str, str], dict[str, BandStats]] = {}
    for (fabric, system, band), item in stats.items():
        names.setdefault((fabric, system), {})[band] = item
    bands = [name for _, _, name in BANDS]
    worst = sorted(names.items(), key=lambda pair: -max(item.median for item in pair[1].values()))
    labels = {key: f"{key[0]}: {key[1]}" if key[1] else key[0] for key in names}
    width = max([len(title), *(len(text) for text in labels.values())])
    head = f"{title:{width}s}" + "".join(f"{band:>18s}" for band in bands) + "  systems"
    lines = [head]
    for key, found in worst:
        cells = (_cell(found.get(band)) for band in bands)
        count = max(item.systems for item in found.values())
        lines.append(f"{labels[key]:{width}s}" + "".join(cells) + f"{count:9d}")
    return lines


def _cell(stats: BandStats | None) -> str:
    if stats is None:
        return f"{'-':>18s}"
    return f"{percent(stats.median):>9s} ({signed(stats.bias)})".rjust(18)
