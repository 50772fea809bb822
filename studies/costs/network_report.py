"""Tables of errors of the network model by system, fabric and generation, for fit_network.py.

An error is the median over sizes (one for each collective, number of ranks and size), then over
the systems of a fabric.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np
from network_data import Group

from foretrain.validation.network.compare import BANDS, CLASSES, band_of

#: A group, and predicted over measured - 1 of each of its sizes.
Item = tuple[Group, np.ndarray]
LARGE = BANDS[0][2]
#: What a system that was left out may be off by from 32 MB on, by fabric.
LIMITS = {
    **dict.fromkeys(("nvlink", "xgmi", "pairs", "ib"), 0.20),
    **dict.fromkeys(("efa", "roce", "tcpx"), 0.30),
}
#: Fabrics that one limit is stated for.
STATED = (
    ("NVLink, NVSwitch, InfiniBand", ("nvlink", "xgmi", "pairs", "ib")),
    ("EFA, RoCE, TCPX", ("efa", "roce", "tcpx")),
)


def print_bands(title: str, items: Sequence[Item]) -> None:
    """Prints the errors of every system and fabric, a column for each band of sizes."""
    errors = _errors((g.fabric, g.system, g, e) for g, e in items)
    bands = [name for _, _, name in BANDS]
    per_fabric: dict[tuple[str, str], list[float]] = defaultdict(list)
    print(f"\n{title}: median |error| (bias), % by band: {', '.join(bands)}")
    for fabric, system in sorted({key[:2] for key in errors}):
        cells = []
        for band in bands:
            values = errors.get((fabric, system, band))
            if not values:
                cells.append("      -     ")
                continue
            error = median(abs(v) for v in values)
            cells.append(f"{error:6.1%} ({median(values):+.0%})")
            for name in dict.fromkeys((fabric, CLASSES.get(fabric, fabric))):
                per_fabric[name, band].append(error)
        print(f"  {fabric:13s} {' '.join(f'{c:16s}' for c in cells)} {system[:90]}")
    print("  medians over systems:")
    for name in dict.fromkeys(key[0] for key in per_fabric):
        cells = [
            f"{median(v):6.1%} of {len(v)}" if (v := per_fabric.get((name, band))) else "-"
            for band in bands
        ]
        print(f"  {name:24s} {' '.join(f'{c:16s}' for c in cells)}")


def print_worst_first(items: Sequence[Item]) -> None:
    """Prints every system from 32 MB on, the worst first, and the medians of the stated classes."""
    errors = _errors((g.fabric, g.system, g, e) for g, e in items)
    large = {key[:2]: values for key, values in errors.items() if key[2] == LARGE}
    lines = sorted(
        ((median(abs(v) for v in values), *key, values) for key, values in large.items()),
        reverse=True,
    )
    print(f"\nsystems left out entirely, {LARGE}, worst first")
    for error, fabric, system, values in lines:
        limit = LIMITS.get(fabric)
        over = "" if limit is None else "over" if error > limit else "within"
        print(f"  {error:6.1%} ({median(values):+.0%})  {fabric:13s} {over:7s} {system[:100]}")
    for name, fabrics in STATED:
        found = [error for error, fabric, *_ in lines if fabric in fabrics]
        limit = LIMITS[fabrics[0]]
        within = sum(error <= limit for error in found)
        print(
            f"  {name}: median {median(found):.1%} (limit {limit:.0%}), "
            f"{within} of {len(found)} systems within it"
        )


def print_generations(items: Sequence[Item]) -> None:
    """Prints the errors of every generation of devices on every fabric, from 32 MB on."""
    errors = _errors((g.fabric, g.cluster.device.generation, g, e) for g, e in items)
    systems = {
        (f, n): len(
            {g.system for g, _ in items if (g.fabric, g.cluster.device.generation) == (f, n)}
        )
        for f, n, _ in errors
    }
    large = {key[:2]: values for key, values in errors.items() if key[2] == LARGE}
    print(f"\ngenerations left out entirely, {LARGE}, worst first")
    lines = sorted(((median(abs(v) for v in values), *k, values) for k, values in large.items()))
    for error, fabric, name, values in reversed(lines):
        count = systems[fabric, name]
        print(f"  {error:6.1%} ({median(values):+.0%})  {fabric:13s} {name}, {count} systems")


def _errors(
    items: Iterable[tuple[str, str, Group, np.ndarray]],
) -> dict[tuple[str, str, str], list[float]]:
    """Returns the errors by two names and the band of sizes."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for first, second, group, ratio in items:
        for size, error in zip(group.sizes, ratio, strict=True):
            errors[first, second, band_of(float(size))].append(float(error))
    return errors
