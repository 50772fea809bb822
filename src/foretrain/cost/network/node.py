"""Groups inside one node (or one scale-up domain): NVSwitch, meshes, bridged pairs, PCIe.

The curves of [[node]] in catalog/calibration/network.toml are keyed by device and group size, and
scale with the device's own link. Where the links of a node are not all alike (the hybrid cube mesh
of a DGX-1, a matrix of `nvidia-smi topo -m`), B scales with the NVLink rings over the group's
devices, and the slowest of the groups that work side by side counts: all wait for it in the end.
A bridge joins two devices: larger groups, and pairs that are not neighbours, run at PCIe speed;
without peer-to-peer access traffic bounces through host memory. However wide the link is, NCCL's
channels copy no more than `most_gbs`: on a wide bridge, and over PCIe between sockets, where it
runs two of them. Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.network.curve import Curve, curve_from_row, interpolate
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.topology import Topology, tile
from foretrain.units import GB

#: How links are written.
_LINKS = {"nvlink": "NVLink", "xgmi": "xGMI"}
_SAME_AS = {"broadcast": "all_gather", "reduce": "all_gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCurve:
    """The curve of a group inside a node, where its constants come from, and its link.

    `where` names the bottleneck in words, `spread` widens the band.
    """

    curve: Curve
    constants: Constants
    link: str
    where: str
    spread: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """What joins a group: `kind` of network, NVLink `rings` (0: not known), `share` of a link.

    `where` is the bottleneck in words; `far` tells whether PCIe traffic crosses sockets (None: not
    known, which counts as crossing where `most_gbs` starts).
    """

    kind: str
    where: str
    rings: int = 0
    share: float = 1.0
    far: bool | None = None


def node_curve(
    cluster: Cluster, collective: str, ranks: Sequence[int], *, sharers: int = 1
) -> NodeCurve:
    """Returns the curve of `collective` over `ranks` that share a node or scale-up domain.

    With `sharers` above 1 its sibling groups work at the same time: the slowest one counts.
    """
    rules: Mapping[str, float] = load("network")["rules"]
    path = _path(cluster, ranks, sharers)
    entries: list[Mapping[str, Any]] = [
        e for e in load("network")["node"] if path.kind in e["scaleup"]
    ]
    found = find(entries, cluster.device)
    if found is None:
        found = Constants(values=entries[0], provenance="guess", row="other")
    curves = found.values["curves"]
    rows = curves[collective if collective in curves else _SAME_AS[collective]]
    row = interpolate(rows, len(ranks), doubling_us=rules["tree_doubling_us"])
    scale = _scale(cluster, path, found, len(ranks), row[1])
    link = "pcie" if path.kind == "none" else "scaleup"
    where, spread = path.where, 1.0
    if path.kind == "none" and not cluster.p2p:
        row[2] *= min(1.0, scale)  # a slow pipeline of as many steps fills with fewer bytes
        # the host decides and not the device, and its settings are not known
        found = Constants(values=found.values, provenance="guess", row="other")
        where, spread = "the host's memory", rules["no_p2p_spread"]
    curve = curve_from_row(row, scale=scale, headroom=rules["peak_headroom"])
    return NodeCurve(curve=curve, constants=found, link=link, where=where, spread=spread)


def _scale(cluster: Cluster, path: _Path, found: Constants, size: int, row_gbs: float) -> float:
    """Returns the group's bandwidth over that of the row."""
    rules: Mapping[str, float] = load("network")["rules"]
    link = cluster.device.pcie_bandwidth if path.kind == "none" else cluster.scaleup_bandwidth
    scale = link / (float(found.values["link_gbs"]) * GB) if link > 0.0 else 1.0
    if path.rings and "rings" in found.values:
        known = {int(n): float(count) for n, count in found.values["rings"].items()}
        scale *= path.rings / known[min(known, key=lambda n: abs(n - size))]
    if path.kind == "none" and not cluster.p2p:
        return rules["no_p2p_gbs"] / row_gbs * path.share
    if path.kind == "none" and cluster.scaleup == "pairs" and size > 2 and size % 2 == 0:
        scale = rules["pairs_ring"] * link / GB / row_gbs  # every other hop is a bridge
    return min(scale, max(1.0, _most_gbs(found, size, path) / row_gbs)) * path.share


def _most_gbs(found: Constants, size: int, path: _Path) -> float:
    """Returns what NCCL's channels copy on links of any width; infinite where the link decides.

    Over PCIe that is where a ring crosses sockets: NCCL then runs two channels.
    """
    limits = {int(n): float(most) for n, most in found.values.get("most_gbs", {}).items()}
    known = [n for n in limits if n <= size]
    if not known or (path.kind == "none" and path.far is False):
        return float("inf")
    return limits[max(known)]


def _path(cluster: Cluster, ranks: Sequence[int], sharers: int) -> _Path:
    """Returns what joins the group; kind "none" where only PCIe does."""
    layout = cluster.layout(ranks)
    kind = cluster.scaleup if layout.inside_scaleup_domain else "none"
    topology = cluster.topology
    if topology is None or not layout.inside_node:
        what = "PCIe" if kind == "none" else cluster.device.scaleup_link
        return _Path(kind=kind, where=f"{what} of each device")
    members = [rank % cluster.devices_per_node for rank in ranks]
    if kind == "nvswitch":
        return _Path(kind=kind, where=f"{cluster.device.scaleup_link} of each device")
    groups = tile(members, topology.devices) if sharers > 1 else (tuple(sorted(members)),)
    return _drawn(topology, groups, kind, _LINKS.get(cluster.device.scaleup_link, "NVLink"))


def _drawn(topology: Topology, groups: Sequence[tuple[int, ...]], kind: str, link: str) -> _Path:
    """What joins a group by the matrix of links; `groups` work at the same time."""
    rings = {group: topology.rings(group) for group in groups}
    slowest = min(groups, key=lambda group: rings[group])
    if rings[slowest]:
        words = "-".join(str(member) for member in slowest)
        where = f"{rings[slowest]} {link} rings over devices {words}"
        return _Path(kind="mesh" if kind == "none" else kind, where=where, rings=rings[slowest])
    sharers = topology.sharers(groups)
    worst = max(range(len(groups)), key=lambda i: sharers[i])
    uses = topology.links(groups[worst])
    far = any(link.kind == "socket" for link in uses)
    what = "the link between sockets" if far else "PCIe of each device"
    if sharers[worst] > 1:
        what += f", {sharers[worst]} groups share it"
    return _Path(kind="none", where=what, share=1.0 / sharers[worst], far=far)
