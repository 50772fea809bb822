"""The section of `predict --tokens`: days, device-hours and money, and the same as JSON."""

from __future__ import annotations

from typing import Any

from foretrain.analysis.cost_of_run import RunCost
from foretrain.report.tables import table
from foretrain.report.words import number
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Band
from foretrain.units import format_count


def token_lines(cost: RunCost, run: RunSpec) -> list[str]:
    """Returns the lines of the section; bands are those of the step time."""
    device = run.cluster.device.name
    rows = [
        ("steps", f"{cost.steps:,} of {format_count(cost.tokens_per_step)} tokens"),
        ("days", f"{_band(cost.days)}; failures, evaluation and checkpoints come on top"),
        ("GPU-hours", _band(cost.device_hours)),
    ]
    if cost.price is None or cost.usd is None:
        rows.append(("money", f"the catalog has no price for {device}"))
    else:
        price = cost.price
        mark = "" if price.verified else ", unverified"
        rows.append(("money", f"{_band(cost.usd)} USD"))
        rows.append(("", f"at {price.usd_per_hour:g} USD per {device} and hour{mark}"))
        source = price.source.removesuffix(" (unverified)")
        rows.append(("", f"price as of: {price.as_of}; source: {source}"))
    return [f"For {format_count(cost.tokens)} tokens", *table(rows, left=(0, 1))]


def token_json(cost: RunCost) -> dict[str, Any]:
    """Returns the section as JSON values (docs/reference/json.md)."""
    price = cost.price
    return {
        "tokens": cost.tokens,
        "steps": cost.steps,
        "days": _band_json(cost.days),
        "device_hours": _band_json(cost.device_hours),
        "usd": None if cost.usd is None else _band_json(cost.usd),
        "price": None
        if price is None
        else {
            "usd_per_device_hour": price.usd_per_hour,
            "as_of": price.as_of,
            "verified": price.verified,
            "source": price.source,
        },
    }


def _band(band: Band) -> str:
    return f"{number(band.value)} ({number(band.low)} to {number(band.high)})"


def _band_json(band: Band) -> dict[str, float]:
    return {"value": band.value, "low": band.low, "high": band.high}
