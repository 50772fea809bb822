"""What copying kernels and host memory allow inside a node, for fit_network.py.

Three constants are medians over systems, not curves: `most_gbs` of a row of [[node]] (the bus
bandwidth at which NCCL's channels stop however wide the link is), `no_p2p_gbs` (through host
memory) and `pairs_ring` (the share of a PCIe slot that a ring over bridged pairs reaches).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from network_data import Group

from foretrain.cost import calibration
from foretrain.cost.network import curve, node

#: Messages that fill the pipeline.
LARGE_BYTES = 32e6
#: A link counts as wider than that of a row from this ratio on.
WIDER = 1.05


def entry_of(group: Group, table: Mapping[str, Any]) -> Any:
    """Returns the entry of [[node]] that a group inside a node is priced by, None without one."""
    path = node._path(group.cluster, group.ranks, 1)
    entries = [e for e in table["node"] if path.kind in e["scaleup"]]
    found = calibration.find(entries, group.cluster.device)
    return next((e for e in entries if found is not None and found.values is e), None)


def fit_limits(groups: Sequence[Group], table: dict[str, Any]) -> None:
    """Fits `no_p2p_gbs`, `pairs_ring` and `most_gbs` on `groups`, in place.

    What no system shows is left as it is, but a limit that no system shows is removed.
    """
    inside = [g for g in groups if g.fabric in ("pcie", "pairs")]
    slots = [g for g in inside if g.fabric == "pcie"]
    bounced = _of_systems(g for g in slots if not g.cluster.p2p)
    if bounced:
        table["rules"]["no_p2p_gbs"] = round(median(bounced), 2)
    rings = _of_systems(
        (g for g in slots if g.cluster.scaleup == "pairs" and len(g.ranks) % 2 == 0), slot=True
    )
    if rings:
        table["rules"]["pairs_ring"] = round(min(1.1, median(rings)), 2)
    for entry in (e for e in table["node"] if "most_gbs" in e):
        for size in list(entry["most_gbs"]):
            reached = _limited(inside, entry, int(size))
            if reached:
                entry["most_gbs"][size] = round(median(reached), 1)
            else:
                del entry["most_gbs"][size]


def _limited(groups: Iterable[Group], entry: Mapping[str, Any], size: int) -> list[float]:
    """Returns what the systems reached whose links are wider than that of the row, GB/s."""
    own = [
        g
        for g in groups
        if g.collective == "all_reduce"
        and len(g.ranks) >= size
        and g.cluster.p2p
        and node._path(g.cluster, g.ranks, 1).kind in entry["scaleup"]
        and (g.fabric == "pairs" or g.cluster.scaleup == "none")
        and link_gbs(g) > WIDER * float(entry["link_gbs"])
    ]
    return _of_systems(own)


def link_gbs(group: Group) -> float:
    """Returns the rate of the links that join a group in a node, GB/s per device and direction."""
    wide = group.cluster.scaleup_bandwidth if group.fabric != "pcie" else 0.0
    return (wide or group.cluster.device.pcie_bandwidth) / 1e9


def busbw(group: Group) -> float:
    """Returns the bus bandwidth of large messages (their median; the largest without any), GB/s."""
    factor = curve.bus_factor(group.collective, len(group.ranks))
    rates = group.sizes * factor / group.seconds / 1e9
    large = group.sizes >= LARGE_BYTES
    return float(np.median(rates[large])) if large.any() else float(rates.max())


def _of_systems(groups: Iterable[Group], *, slot: bool = False) -> list[float]:
    """Returns the median of every system, as a share of the slot if asked for."""
    rates: dict[str, list[float]] = defaultdict(list)
    for g in groups:
        rates[g.system].append(busbw(g) / (link_gbs(g) if slot else 1.0))
    return [median(values) for values in rates.values()]
