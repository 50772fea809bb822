"""Prices: what the cost model answers for a list of events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROVENANCE = ("measured", "fitted", "spec", "guess")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """One entry per event, in seconds.

    `value_s` = `latency_s` (never stretched by sharing or overlap) + the fluid rest. `low_s` and
    `high_s` bound the 90 % interval. `host_s` is the host time to launch the event, `kernels` its
    number of launches. `link` is the bottleneck: "" (none), "scaleup", "pcie" or "nic". `family`
    groups events whose errors share constants (gemm, attention, memory, scaleup, nic, ...).
    `travel_s` is the part of the latency of a message in which it holds no link (None: nowhere).
    `out_s` and `in_s` are the seconds that an event keeps the link between device and node, in
    either direction, if nothing else bounds it (None: nowhere).
    `synced` says that the host waits for the device after every block, `blocking` that it does
    after every launch.
    """

    value_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    kernels: NDArray[np.float64]
    link: tuple[str, ...]
    family: tuple[str, ...]
    provenance: tuple[str, ...]
    formula: tuple[str, ...]
    travel_s: NDArray[np.float64] | None = None
    out_s: NDArray[np.float64] | None = None
    in_s: NDArray[np.float64] | None = None
    synced: bool = False
    blocking: bool = False
