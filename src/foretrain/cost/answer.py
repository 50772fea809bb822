"""The answer of a provider for one event, and its 90 % interval."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.cost.calibration import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Time of one event in seconds.

    `latency_s` is the part of `value_s` that neither sharing nor overlap stretches; `factor` the
    half-width of the 90 % interval as a factor; `kernels` the launches; `link` the bottleneck.
    `travel_s` is the part of `latency_s` in which a message is on a long way and holds no link.
    `out_s`, `in_s`: how long the link of the device to host and NICs alone would need (slot.py).
    """

    value_s: float
    latency_s: float
    factor: float
    kernels: float
    family: str
    provenance: str
    formula: str
    link: str = ""
    travel_s: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0


def width(row: str, family: str) -> float:
    """Returns the interval factor of `family` for constants known as well as `row` says.

    Source: catalog/calibration/intervals.toml.
    """
    return float(load("intervals")[row][family])
