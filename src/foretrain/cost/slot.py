"""What crosses the link between a device and its node: copies to the host, and messages to NICs.

    out_s = bytes that leave the device / link      in_s = bytes that enter it / link

in seconds that the link alone would need; over the time of a transfer it is the share of the link
that the transfer fills. A PCIe slot joins a device to the host and to the NICs, and to the other
devices where no scale-up network does. On Grace superchips it is NVLink-C2C: NICs hang on the CPU.
Explained in docs/explain/network.md.
"""

from __future__ import annotations

from foretrain.cost.network.curve import bus_factor
from foretrain.hardware.cluster import Cluster, GroupLayout
from foretrain.program import CommEvent


def crossing_s(event: CommEvent, cluster: Cluster) -> float:
    """Returns the seconds that what a device sends in a collective keeps its link, zero on NVLink.

    It receives as much. A ring enters an island of devices with a scale-up network once and leaves
    it once: its channels divide over the members that have a NIC of their own.
    """
    if len(event.ranks) < 2:
        return 0.0
    layout = cluster.layout(event.ranks)
    if layout.inside_scaleup_domain:
        return 0.0
    size = layout.num_ranks
    sent = event.count * event.bytes * bus_factor(event.collective, size)
    if event.collective == "all_to_all":  # each pair of devices on its own
        sent *= (size - max(layout.islands)) / (size - 1)
    else:
        sent /= _doors(layout, cluster)
    return sent / cluster.device.host_bandwidth


def _doors(layout: GroupLayout, cluster: Cluster) -> int:
    """Returns how many devices of the smallest island pass on what leaves it."""
    members = min(layout.islands)
    return members if layout.inside_node else max(1, min(members, cluster.nics_per_node))
