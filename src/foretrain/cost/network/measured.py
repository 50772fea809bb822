"""Measured curves of one (cluster, group size, collective) in three segments; they win.

Below `m1` the time is `latency_s`; above `m2` it is `latency_s` + S factor / B; between them it is
S factor / busbw with busbw = 10**sig(log2 S), sig(x) = L / (1 + exp(-k (x - x0))) + b: the
transition from latency to bandwidth with its protocol switches. A curve says up to which size it
was measured; beyond, the last segment goes on. Fitted by `foretrain calibrate network`. Explained
in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.network.curve import bus_factor
from foretrain.hardware.cluster import Cluster, GroupLayout
from foretrain.units import GB, US, format_bytes

COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "reduce",
)  # fmt: skip
#: What no measurement exceeds: sizes (bytes), bandwidths (bytes/s), latencies.
_MOST, _LEAST_RATE, _MOST_RATE, _LONGEST_S = 1e18, 1e3, 1e15, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """One curve: what it was measured on, and its segments (sizes in bytes, B in bytes/s).

    `sigmoid` is (L, k, x0, b) of log10 of the bus bandwidth in GB/s, empty where no size lies
    between m1 and m2. `smallest` and `largest` bound the measured sizes; `mean_error` and
    `max_error` are those of the fit on its own data. `plateau`: messages so small that only latency
    counts were among the samples; without them latency is not known (0), and sizes below the
    smallest follow the model, scaled to meet the curve.
    """

    device: str
    nodes: int
    ranks: int
    fabric: str
    collective: str
    latency_s: float
    plateau: bool
    m1: float
    m2: float
    bandwidth: float
    sigmoid: tuple[float, ...]
    smallest: float
    largest: float
    mean_error: float
    max_error: float
    source: str

    @property
    def factor(self) -> float:
        """Returns busbw / algbw."""
        return bus_factor(self.collective, self.ranks)

    @property
    def text(self) -> str:
        """Returns what the curve is, for reports."""
        alpha = f"alpha {self.latency_s / US:.1f} us, " if self.plateau else ""
        return (
            f"measured curve ({self.source}), {format_bytes(self.smallest)} to "
            f"{format_bytes(self.largest)}, {alpha}B {self.bandwidth / GB:.1f} GB/s"
        )

    def covers(self, num_bytes: float) -> bool:
        """Returns whether a size lies within what was measured."""
        return self.smallest <= num_bytes <= self.largest

    def seconds(self, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the times of collectives of these sizes, seconds; never falling with the size."""
        size = np.asarray(num_bytes, dtype=np.float64)
        moved = size * self.factor
        times = np.where(size <= self.m1, self.latency_s, self.latency_s + moved / self.bandwidth)
        if self.sigmoid:
            between = (size > self.m1) & (size < self.m2)
            middle = moved[between] / bus_bandwidth(size[between], self.sigmoid)
            end = self.latency_s + self.m2 * self.factor / self.bandwidth
            times[between] = np.minimum(middle, end)
        return np.maximum(times, self.latency_s)


def bus_bandwidth(size: NDArray[np.float64], sigmoid: Sequence[float]) -> NDArray[np.float64]:
    """Returns the bus bandwidth (bytes/s) of the middle segment."""
    height, slope, middle, base = sigmoid
    x = np.clip(-slope * (np.log2(size) - middle), -60.0, 60.0)
    return GB * 10.0 ** (height / (1.0 + np.exp(x)) + base)


def find_curve(
    curves: Sequence[MeasuredCurve],
    collective: str,
    layout: GroupLayout,
    cluster: Cluster,
    sharers: int,
) -> MeasuredCurve | None:
    """Returns the curve that was measured for such a group alone on such nodes, or None.

    Device, number of ranks and of nodes must agree, and over several nodes the fabric; a group
    that shares NICs with siblings was not measured.
    """
    if sharers > 1:
        return None
    for curve in curves:
        same = (
            curve.collective == collective
            and curve.ranks == layout.num_ranks
            and curve.nodes == layout.num_nodes
            and curve.device == cluster.device.name
        )
        if same and (layout.num_nodes == 1 or curve.fabric == cluster.fabric):
            return curve
    return None


def curve_to_table(curve: MeasuredCurve) -> dict[str, Any]:
    """Returns the entry of a calibration file ([[network.curve]])."""
    return {
        "device": curve.device,
        "nodes": curve.nodes,
        "ranks": curve.ranks,
        "fabric": curve.fabric,
        "collective": curve.collective,
        "plateau": curve.plateau,
        "latency_us": curve.latency_s / US,
        "m1_bytes": curve.m1,
        "m2_bytes": curve.m2,
        "bandwidth_gb_s": curve.bandwidth / GB,
        "sigmoid": list(curve.sigmoid),
        "smallest_bytes": curve.smallest,
        "largest_bytes": curve.largest,
        "mean_error": curve.mean_error,
        "max_error": curve.max_error,
        "source": curve.source,
    }


def curve_from_table(entry: Mapping[str, Any]) -> MeasuredCurve:
    """Returns the curve of an entry; KeyError, TypeError or ValueError when it is malformed."""
    curve = MeasuredCurve(
        device=str(entry["device"]),
        nodes=int(entry["nodes"]),
        ranks=int(entry["ranks"]),
        fabric=str(entry["fabric"]),
        collective=str(entry["collective"]),
        latency_s=float(entry["latency_us"]) * US,
        plateau=bool(entry["plateau"]),
        m1=float(entry["m1_bytes"]),
        m2=float(entry["m2_bytes"]),
        bandwidth=float(entry["bandwidth_gb_s"]) * GB,
        sigmoid=tuple(float(value) for value in entry["sigmoid"]),
        smallest=float(entry["smallest_bytes"]),
        largest=float(entry["largest_bytes"]),
        mean_error=float(entry["mean_error"]),
        max_error=float(entry["max_error"]),
        source=str(entry["source"]),
    )
    fault = _fault(entry, curve)
    if fault:
        raise ValueError(fault)
    return curve


def _fault(entry: Mapping[str, Any], curve: MeasuredCurve) -> str:
    """Returns what is wrong with the values of an entry, or an empty text."""
    words = ("device", "fabric", "collective", "source")
    wrong = [key for key in words if not isinstance(entry[key], str)]
    wrong += [key for key in ("nodes", "ranks") if type(entry[key]) is not int]
    wrong += [key for key in ("plateau",) if not isinstance(entry[key], bool)]
    if wrong:
        return f"{wrong[0]} is {entry[wrong[0]]!r:.60}"
    if curve.collective not in COLLECTIVES:
        return f"collective is {curve.collective!r:.60}, not one of {', '.join(COLLECTIVES)}"
    if not (1 <= curve.nodes <= curve.ranks and curve.ranks >= 2):
        return f"{curve.ranks} ranks on {curve.nodes} nodes"
    if len(curve.sigmoid) not in (0, 4) or not all(abs(x) <= _MOST for x in curve.sigmoid):
        return "sigmoid holds 0 or 4 numbers"
    if not (_LEAST_RATE <= curve.bandwidth <= _MOST_RATE and 0.0 <= curve.latency_s <= _LONGEST_S):
        return "bandwidth_gb_s lies between 1e-6 and 1e6, latency_us between 0 and an hour"
    sizes = (curve.m1, curve.m2, curve.smallest, curve.largest)
    errors = (curve.mean_error, curve.max_error)
    if not all(0.0 <= value <= _MOST for value in (*sizes, *errors)):
        return "sizes and errors lie between 0 and 1e18"
    return ""
