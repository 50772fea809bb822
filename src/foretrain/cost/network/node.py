"""Groups inside one node (or one scale-up domain): NVSwitch, meshes, bridged pairs, PCIe.

The curves of [[node]] in catalog/calibration/network.toml are keyed by device and group size, and
scale with the device's own link. A bridge joins two devices: larger groups, and pairs that are not
neighbours, run at PCIe speed; without peer-to-peer access traffic bounces through host memory.
Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.network.curve import Curve, curve_from_row, interpolate
from foretrain.hardware.cluster import Cluster
from foretrain.units import GB

_SAME_AS = {"broadcast": "all_gather", "reduce": "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCurve:
    """The curve of a group inside a node, where its constants come from, and its link."""

    curve: Curve
    constants: Constants
    link: str


def node_curve(cluster: Cluster, collective: str, ranks: Sequence[int]) -> NodeCurve:
    """Returns the curve of `collective` over `ranks` that share a node or scale-up domain."""
    rules: Mapping[str, float] = load("network")["rules"]
    kind = _path(cluster, ranks)
    entries: list[Mapping[str, Any]] = [e for e in load("network")["node"] if kind in e["scaleup"]]
    found = find(entries, cluster.device)
    if found is None:
        found = Constants(values=entries[0], provenance="guess", row="other")
    rows = found.values["curves"]
    row = interpolate(
        rows[_SAME_AS.get(collective, collective)],
        len(ranks),
        doubling_us=rules["tree_doubling_us"],
    )
    link = cluster.device.pcie_bandwidth if kind == "none" else cluster.scaleup_bandwidth
    scale = link / (float(found.values["link_gbs"]) * GB) if link > 0.0 else 1.0
    if kind == "none" and not cluster.p2p:
        far = len(ranks) > 2
        scale *= (rules["no_p2p_far"] if far else rules["no_p2p"]) * link / GB / row[1] / scale
    curve = curve_from_row(row, scale=scale, headroom=rules["peak_headroom"])
    return NodeCurve(curve=curve, constants=found, link="pcie" if kind == "none" else "scaleup")


def _path(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Returns the scale-up kind that joins the group, "none" where only PCIe does."""
    return cluster.scaleup if cluster.layout(ranks).inside_scaleup_domain else "none"
