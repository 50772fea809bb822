"""Groups over several nodes: what the NICs allow, and how latency grows with the nodes.

For a group of N ranks on n nodes, up to `ppn` of them on one node:

- the NICs it may use are those of its own devices, nics x ppn / devices per node (at least one),
  and no more than its share of all NICs of the node, nics / sharers;
- gathers and scatters (and all-reduce over many nodes) run at e x NICs, but not faster than inside
  a node; over two nodes an all-reduce sends each byte once over the NICs (a tree), so its bus
  bandwidth may reach 2 (N - 1) / N times the NICs;
- an all-to-all sends (N - ppn) / N of a rank's buffer over its NIC and the rest inside the node;
- alpha grows with log2 of the nodes, and linearly in peers for all-to-all;
- the knee moves to larger messages as the group grows: S0 = B tau N**growth for all-reduce (a root
  beyond 128 ranks, where trees take over), B tau_ring N for gathers and scatters.

Constants: [fabric.*] of catalog/calibration/network.toml. Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2, sqrt

from foretrain.cost.calibration import load
from foretrain.cost.network.curve import Curve
from foretrain.units import GB, US

RINGS = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A group over nodes in plain numbers; bandwidths in bytes/s, `inner` inside one node.

    `inner` is None when every node holds one rank. `nic` is one NIC, `nics` those of a node.
    """

    ranks: int
    nodes: int
    per_node: int
    devices_per_node: int
    nics: float
    nic: float
    sharers: int
    inner: Curve | None
    extra_latency_s: float = 0.0
    oversubscription: float = 1.0

    @property
    def nic_bytes_s(self) -> float:
        """Returns what the NICs of one node carry for this group, one direction."""
        own = max(1.0, self.nics * self.per_node / self.devices_per_node)
        share = self.nics / self.sharers
        return min(own, share) * self.nic / self.oversubscription


def fabric_curve(collective: str, span: Span, fabric: Mapping[str, float]) -> Curve:
    """Returns the curve of a ring or tree collective over several nodes."""
    nics, rules = span.nic_bytes_s, load("network")["rules"]
    doublings = max(0.0, log2(span.nodes / 2.0))
    if span.per_node == 1:
        bandwidth = fabric["e_single"] * nics
    elif collective == "all_reduce" and span.nodes == 2:
        bandwidth = fabric["e_two"] * nics * 2.0 * (span.ranks - 1) / span.ranks
    elif collective == "all_reduce":
        bandwidth = fabric["e_tree"] * nics
    else:
        bandwidth = fabric["e_ring"] * nics
    alpha = fabric["alpha_us"] * US + fabric["alpha_doubling_us"] * US * doublings
    if span.inner is not None:
        bandwidth = min(bandwidth, span.inner.peak, span.inner.bandwidth)
        alpha += span.inner.alpha_s
    alpha += span.extra_latency_s * _hops(collective, span.nodes)
    return Curve(
        alpha_s=alpha,
        bandwidth=bandwidth,
        half_bytes=bandwidth * _knee_s(collective, span.ranks, fabric),
        p=rules["ring_p"] if collective in RINGS else fabric["p"],
        r=fabric["r"],
    )


def _knee_s(collective: str, ranks: int, fabric: Mapping[str, float]) -> float:
    """Returns S0 / B in seconds."""
    if collective in RINGS:
        return fabric["tau_ring_us"] * US * ranks
    limit = load("network")["rules"]["growth_ranks"]
    near = min(float(ranks), limit) ** fabric["growth"]
    return fabric["tau_us"] * US * near * sqrt(max(1.0, ranks / limit))


def _hops(collective: str, nodes: int) -> float:
    """Returns the crossings of the fabric that follow one another."""
    if collective == "all_reduce":
        return 2.0 * ceil(log2(nodes))
    if collective in RINGS:
        return float(nodes - 1)
    return float(ceil(log2(nodes))) if collective == "broadcast" else 1.0


def all_to_all_seconds(num_bytes: float, span: Span, fabric: Mapping[str, float]) -> float:
    """Returns the time of an all-to-all over several nodes, a buffer of `num_bytes` per rank."""
    rate = fabric["e_all_to_all"] * span.nic_bytes_s / span.per_node
    outside = (span.ranks - span.per_node) / span.ranks
    alpha = fabric["alpha_us"] * US + fabric["alpha_peer_us"] * US * (span.ranks - 1)
    alpha += span.extra_latency_s
    curve = Curve(
        alpha_s=alpha,
        bandwidth=rate,
        half_bytes=rate * fabric["tau_us"] * US * sqrt(span.ranks),
        p=fabric["p"],
        r=1.0,
    )
    seconds = curve.seconds(num_bytes, outside)
    if span.inner is not None:
        inside = (span.per_node - 1) / span.ranks
        seconds = max(seconds, span.inner.seconds(num_bytes, inside))
    return seconds


def send_seconds(num_bytes: float, span: Span, fabric: Mapping[str, float]) -> float:
    """Returns the time of one message between two nodes while `span.sharers` pairs do the same.

    A single pair of NCCL ranks drives about half of a fast NIC (24.9 of 50 GB/s), a slow one fully.
    """
    pair = max(fabric["e_pair"] * span.nic, min(fabric["pair_gbs"] * GB, 0.9 * span.nic))
    share = 0.9 * span.nics * span.nic / span.sharers / span.oversubscription
    alpha = fabric["alpha_pair_us"] * US + span.extra_latency_s
    return alpha + num_bytes / min(pair, share)
