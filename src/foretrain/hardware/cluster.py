"""A cluster of equal nodes, and where the ranks of a group lie in it.

Rank r sits on node r // devices_per_node, at local rank r % devices_per_node. An *island* is a set
of devices that one scale-up network (NVLink, xGMI, ICI) joins: a node, several nodes (NVL72), a
bridged pair, or a single device where there is no such network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from foretrain.errors import InputError, Problem
from foretrain.hardware.device import Device, Scaleup
from foretrain.hardware.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Where the ranks of one group lie.

    `islands` counts the members in every scale-up island that the group touches, in order of first
    appearance. `inside_scaleup_domain`: all members share one island, no NIC and no PCIe needed.
    """

    num_ranks: int
    num_nodes: int
    max_per_node: int
    min_per_node: int
    islands: tuple[int, ...]

    @property
    def inside_scaleup_domain(self) -> bool:
        """Returns whether the scale-up network alone joins all members."""
        return len(self.islands) == 1

    @property
    def inside_node(self) -> bool:
        """Returns whether all members sit in one node."""
        return self.num_nodes == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` equal nodes of `devices_per_node` devices, joined by NICs and a fabric.

    Bandwidths in bytes/s of one direction: `nic_bandwidth` of one NIC, `scaleup_bandwidth` of all
    scale-up links of one device. `nvl_domain` is the number of consecutive devices that one
    scale-up network joins. `extra_latency_s` is added to every message between nodes.
    `oversubscription` 2 means that the fabric carries half of what the NICs can send. `notes` lists
    what was assumed. One node has fabric "none" and no NICs, unless stated. `topology` holds the
    links between the devices of a node where they are not all alike.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    nics_per_node: int = 0
    nic_bandwidth: float = 0.0
    fabric: str = "none"
    scaleup: Scaleup = "none"
    scaleup_bandwidth: float = 0.0
    nvl_domain: int = 1
    extra_latency_s: float = 0.0
    p2p: bool = True
    oversubscription: float = 1.0
    host_memory_bytes: float | None = None
    topology: Topology | None = None
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Returns the number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def island_size(self) -> int:
        """Returns the number of devices that one scale-up network joins (1: there is none)."""
        return min(island_size(self.scaleup, self.nvl_domain), self.world_size)

    @property
    def node_bandwidth(self) -> float:
        """Returns what all NICs of one node carry in one direction, bytes/s."""
        return self.nics_per_node * self.nic_bandwidth

    @property
    def text(self) -> str:
        """Returns the cluster in the cluster grammar, e.g. '8x8 h100-sxm, 8x400G ib'."""
        return _text(self)

    def node_of(self, rank: int) -> int:
        """Returns the node of a global rank."""
        return rank // self.devices_per_node

    def layout(self, ranks: Iterable[int]) -> GroupLayout:
        """Returns where the ranks of a group lie; answers are remembered.

        Raises:
            InputError: a rank does not exist, or the group is empty.
        """
        group = tuple(ranks)
        found = _layout(self.world_size, self.devices_per_node, self.island_size, group)
        if found is None:
            raise InputError(
                Problem(
                    what=f"the group does not lie on {self.text}",
                    value=group[:8],
                    allowed=f"ranks 0 to {self.world_size - 1}, at least one",
                )
            )
        return found


def island_size(scaleup: Scaleup, domain: int) -> int:
    """Returns the devices per scale-up network: a bridged pair, a domain, or 1 without one."""
    return {"none": 1, "pairs": 2}.get(scaleup, domain)


@lru_cache(maxsize=4096)
def _layout(
    world_size: int, devices_per_node: int, island: int, ranks: tuple[int, ...]
) -> GroupLayout | None:
    if not ranks or min(ranks) < 0 or max(ranks) >= world_size:
        return None
    nodes = Counter(rank // devices_per_node for rank in ranks)
    if island < devices_per_node:  # several islands in a node; none crosses its edge
        per_node = -(-devices_per_node // island)
        islands = Counter(
            rank // devices_per_node * per_node + rank % devices_per_node // island
            for rank in ranks
        )
    else:
        islands = Counter(rank // island for rank in ranks)
    return GroupLayout(
        num_ranks=len(ranks),
        num_nodes=len(nodes),
        max_per_node=max(nodes.values()),
        min_per_node=min(nodes.values()),
        islands=tuple(islands.values()),
    )


def exact(value: float) -> Decimal:
    """Returns the shortest decimal that reads back as `value`."""
    return Decimal(repr(float(value)))


def plain(value: Decimal) -> str:
    """Returns a decimal without exponent and trailing zeros, e.g. '400' or '0.5'."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@lru_cache(maxsize=256)
def _text(cluster: Cluster) -> str:
    device = cluster.device
    parts = [f"{cluster.nodes}x{cluster.devices_per_node} {device.origin or device.name}"]
    if cluster.nics_per_node:
        rate = plain(exact(cluster.nic_bandwidth) * 8 / 10**9)
        parts.append(f", {cluster.nics_per_node}x{rate}G {cluster.fabric}")
    parts.extend(f" [{option}]" for option in _options(cluster))
    return "".join(parts)


def _options(cluster: Cluster) -> list[str]:
    """Returns the options that differ from what the grammar assumes for the device."""
    device, options = cluster.device, list[str]()
    drawn = cluster.topology is not None and bool(cluster.topology.origin)
    if cluster.scaleup != device.node.scaleup and not drawn:
        options.append(f"nvlink {cluster.scaleup}")
    if cluster.scaleup in ("nvswitch", "mesh") and not drawn:
        usual = usual_domain(device, cluster.devices_per_node)
        if cluster.nvl_domain != usual:
            options.append(f"nvl {cluster.nvl_domain}")
    if cluster.scaleup != "none" and cluster.scaleup_bandwidth != device.scaleup_bandwidth:
        options.append(f"scaleup {plain(exact(cluster.scaleup_bandwidth) / 10**9)} GB/s")
    if cluster.extra_latency_s:
        options.append(f"latency {_duration(cluster.extra_latency_s)}")
    if cluster.host_memory_bytes is not None:
        options.append(f"host {plain(exact(cluster.host_memory_bytes / 2**30))} GiB")
    if cluster.oversubscription != 1.0:
        options.append(f"oversubscribed {plain(exact(cluster.oversubscription))}:1")
    if cluster.p2p != device.node.p2p:
        options.append("p2p" if cluster.p2p else "no p2p")
    if cluster.topology is not None and cluster.topology.origin:
        options.append(f"topology {cluster.topology.origin}")
    return options


def usual_domain(device: Device, devices_per_node: int) -> int:
    """Returns the scale-up domain of a device in nodes of this size: whole nodes, or the node.

    A domain that joins more than the usual node (72 on NVL72) spans as many whole nodes as fit; one
    that joins less divides the node where it can.
    """
    domain, usual = device.node.domain, device.node.devices
    if domain > usual and domain >= devices_per_node:
        return domain - domain % devices_per_node
    if domain < usual and devices_per_node % domain == 0:
        return domain
    return devices_per_node


def _duration(seconds: float) -> str:
    value = exact(seconds)
    for scale, unit in ((Decimal(1), "s"), (Decimal("1e-3"), "ms"), (Decimal("1e-6"), "us")):
        if value >= scale:
            return f"{plain(value / scale)}{unit}"
    return f"{plain(value * 10**6)}us"
