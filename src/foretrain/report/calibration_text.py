"""What `calibrate network` prints: the curves, and how far each sample lies from its curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from foretrain.cost.network.measured import MeasuredCurve
from foretrain.units import GB, US, format_bytes


class Fitted(Protocol):
    """A curve with the samples it was fitted on."""

    @property
    def curve(self) -> MeasuredCurve:
        """Returns the curve."""
        ...

    @property
    def sizes(self) -> tuple[float, ...]:
        """Returns the sizes in bytes."""
        ...

    @property
    def times_s(self) -> tuple[float, ...]:
        """Returns the measured times."""
        ...

    @property
    def doubts(self) -> tuple[str, ...]:
        """Returns what was left out, and why."""
        ...


def render_curves(fitted: Sequence[Fitted], output: str | None) -> str:
    """Returns the curves one by one with their residuals."""
    lines: list[str] = []
    for item in fitted:
        lines += [*_curve(item), ""]
    if output == "-":
        return "\n".join(lines)  # the curves themselves went to standard output
    if output is not None:
        lines.append(f"Wrote {len(fitted)} curves to {output}; use it with --calibration {output}")
    else:
        lines.append("Nothing written: give --output FILE to use the curves with --calibration.")
    return "\n".join(lines)


def _curve(item: Fitted) -> list[str]:
    curve = item.curve
    nodes = "1 node" if curve.nodes == 1 else f"{curve.nodes} nodes over {curve.fabric}"
    latency = f"{curve.latency_s / US:.1f} us" if curve.plateau else "not measured"
    lines = [
        f"{curve.collective} on {curve.ranks} x {curve.device}, {nodes} ({curve.source})",
        f"  latency {latency}; bus bandwidth of large messages {curve.bandwidth / GB:.1f} GB/s; "
        f"bends up to {format_bytes(curve.m2)}",
        f"  measured from {format_bytes(curve.smallest)} to {format_bytes(curve.largest)}; error "
        f"of the fit: mean {curve.mean_error:.1%}, largest {curve.max_error:.1%}",
    ]
    lines += [f"  {doubt}" for doubt in item.doubts]
    lines.append(f"  {'bytes':>14s}{'measured us':>14s}{'curve us':>14s}{'error':>9s}")
    sizes = np.array(item.sizes)
    for size, measured, value in zip(sizes, item.times_s, curve.seconds(sizes), strict=True):
        lines.append(
            f"  {size:14.0f}{measured / US:14.2f}{value / US:14.2f}{value / measured - 1:+9.1%}"
        )
    return lines
