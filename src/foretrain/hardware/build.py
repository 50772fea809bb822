"""From what a person states about a cluster to a Cluster: usual node, checks, notes."""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.errors import Problem
from foretrain.hardware.cluster import Cluster, exact, island_size, plain, usual_domain
from foretrain.hardware.device import Device, Scaleup
from foretrain.hardware.topology import Topology, usual_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What was stated; None = not stated, the device's usual node decides."""

    device: Device
    nodes: int
    devices_per_node: int
    nics_per_node: int | None = None
    nic_bandwidth: float | None = None
    fabric: str | None = None
    scaleup: Scaleup | None = None
    scaleup_bandwidth: float | None = None
    nvl_domain: int | None = None
    extra_latency_s: float = 0.0
    p2p: bool | None = None
    oversubscription: float = 1.0
    host_memory_bytes: float | None = None
    topology: Topology | None = None


def build_cluster(request: ClusterRequest, *, name: str = "") -> tuple[Cluster, list[Problem]]:
    """Returns the cluster and what is wrong with it (an empty list: nothing)."""
    device, usual = request.device, request.device.node
    notes: list[str] = []
    nics, nic_bandwidth, fabric = _network(request, notes)
    scaleup = _scaleup(request, notes)
    topology = request.topology
    if topology is None and scaleup == "mesh":
        topology = usual_topology(device.name, request.devices_per_node)
    domain = request.nvl_domain or usual_domain(device, request.devices_per_node)
    if scaleup in ("none", "pairs"):
        domain = island_size(scaleup, domain)
    bandwidth = request.scaleup_bandwidth or device.scaleup_bandwidth
    cluster = Cluster(
        name=name,
        device=device,
        nodes=request.nodes,
        devices_per_node=request.devices_per_node,
        nics_per_node=nics,
        nic_bandwidth=nic_bandwidth,
        fabric=fabric,
        scaleup=scaleup,
        scaleup_bandwidth=0.0 if scaleup == "none" else bandwidth,
        nvl_domain=domain,
        extra_latency_s=request.extra_latency_s,
        p2p=usual.p2p if request.p2p is None else request.p2p,
        oversubscription=request.oversubscription,
        host_memory_bytes=request.host_memory_bytes,
        topology=topology,
        notes=tuple(notes),
    )
    return cluster, _problems(request, scaleup)


def _network(request: ClusterRequest, notes: list[str]) -> tuple[int, float, str]:
    """Returns NICs per node, bytes/s of one NIC, and the fabric."""
    usual = request.device.node
    if request.nics_per_node and request.nic_bandwidth and request.fabric:
        return request.nics_per_node, request.nic_bandwidth, request.fabric
    if request.nodes == 1:
        for stated, word in (
            (request.extra_latency_s, "latency"),
            (request.oversubscription != 1.0, "oversubscribed"),
        ):
            if stated:
                notes.append(f"the option {word!r} has no effect on one node")
        return 0, 0.0, "none"
    name = request.device.name
    nics = _usual_nics(request)
    rate = plain(exact(usual.nic_bandwidth) * 8 / 10**9)
    text = f"the usual node of {name} has {nics} x {rate} Gb/s {usual.fabric}"
    if nics != usual.nics:
        text += f" per {request.devices_per_node} devices"
    notes.append(f"NICs not stated: {text}")
    return nics, usual.nic_bandwidth, usual.fabric


def _usual_nics(request: ClusterRequest) -> int:
    """Returns the NICs of the usual node, scaled to the node's devices where each has its own."""
    usual = request.device.node
    if usual.nics < usual.devices:
        return usual.nics
    return max(1, usual.nics * request.devices_per_node // usual.devices)


def _scaleup(request: ClusterRequest, notes: list[str]) -> Scaleup:
    device = request.device
    if request.scaleup is not None:
        return request.scaleup
    if request.topology is not None:
        return _drawn_scaleup(request.topology, device)
    bridged = device.scaleup_link != "none" and device.node.scaleup == "none"
    if bridged and request.devices_per_node > 1:
        notes.append(
            f"{device.name} can be bridged in pairs; no bridge assumed (write [nvlink pairs])"
        )
    return device.node.scaleup


def _drawn_scaleup(topology: Topology, device: Device) -> Scaleup:
    """The scale-up network that a matrix of links shows."""
    size = range(topology.devices)
    partners = [[b for b in size if topology.nvlinks(a, b)] for a in size]
    if not any(partners):
        return "none"
    if all(len(found) == topology.devices - 1 for found in partners):
        return device.node.scaleup if device.node.scaleup in ("nvswitch", "mesh") else "mesh"
    return "pairs" if all(found == [a ^ 1] for a, found in enumerate(partners)) else "mesh"


def _problems(request: ClusterRequest, scaleup: Scaleup) -> list[Problem]:
    device, per_node = request.device, request.devices_per_node
    problems: list[Problem] = []
    if scaleup != "none" and device.scaleup_link == "none":
        problems.append(
            Problem(
                what=f"{device.name} has no scale-up link",
                value=f"nvlink {scaleup}",
                way_out="leave the option out",
            )
        )
    stated = request.nvl_domain or request.scaleup_bandwidth
    if scaleup == "none" and stated:
        problems.append(
            Problem(
                what=f"nodes of {device.name} without a scale-up network have no domain or rate",
                value=stated,
                way_out="add [nvlink pairs], [nvlink mesh] or [nvlink nvswitch], or leave it out",
            )
        )
    domain = request.nvl_domain
    if domain and scaleup in ("nvswitch", "mesh") and domain % per_node and per_node % domain:
        problems.append(
            Problem(
                what="the scale-up domain must be whole nodes, or divide one",
                value=f"nvl {domain}",
                allowed=f"multiples or divisors of {per_node} devices per node",
            )
        )
    if domain and scaleup == "pairs" and domain != 2:
        problems.append(Problem(what="bridged pairs join 2 devices", value=f"nvl {domain}"))
    topology = request.topology
    if topology is not None and topology.devices != per_node:
        problems.append(
            Problem(
                what="the topology is of another node",
                value=f"{topology.name}: {topology.devices} devices",
                allowed=f"{per_node} devices per node",
            )
        )
    return problems
