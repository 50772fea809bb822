"""Groups over several nodes: what the NICs allow, and how latency grows with the nodes.

For a group of N ranks on n nodes, up to `ppn` of them on one node:

- the NICs it may use are those of its own devices on the node that has the fewest of them,
  nics x members / devices per node (at least one), no more than its share of all NICs of the node,
  nics / sharers, and no more than its members' PCIe slots carry;
- gathers and scatters (and all-reduce over many nodes) run at e x NICs, but not faster than inside
  a node; over two nodes an all-reduce sends each byte once over the NICs (a tree), so its bus
  bandwidth may reach 2 (N - 1) / N times the NICs, as long as the tree inside the node keeps up
  (`tree_share` of a ring where the switch does not reduce);
- an all-to-all sends (N - ppn) / N of a rank's buffer over its NIC and the rest inside the node;
- alpha grows with log2 of the nodes, and linearly in peers for all-to-all;
- the knee moves to larger messages as the group grows: S0 = B tau N**growth for all-reduce (a root
  beyond 128 ranks, where trees take over), B tau_ring N for gathers and scatters.

Constants: [fabric.*] of catalog/calibration/network.toml, fitted by studies/costs/fit_network.py.
Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrain.cost.calibration import load
from foretrain.cost.network.curve import Curve, Curves, Value, bus_factor
from foretrain.units import GB, MIB, US

#: NCCL knows no other way than a ring for these.
RINGS = ("all_gather", "reduce_scatter", "broadcast", "reduce")
#: A curve and the bus factor that it takes.
Part = tuple[Curve, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A group over nodes, or a table of groups, in plain numbers; bandwidths in bytes/s.

    `inner` is the curve inside one node: None when every node holds one rank, any in the rows of a
    table where `per_node` is 1. `nic` is one NIC, `nics` those of a node, `slot` what one device's
    slot passes to NICs. `multicast`: the switch in the node reduces.
    """

    ranks: Value
    nodes: Value
    per_node: Value
    fewest_per_node: Value
    devices_per_node: int
    nics: float
    nic: float
    sharers: Value
    inner: Curve | Curves | None
    slot: float = float("inf")
    multicast: bool = False
    extra_latency_s: float = 0.0
    oversubscription: float = 1.0

    @property
    def nic_bytes_s(self) -> Value:
        """Returns what the NICs of one node carry for this group, one direction."""
        members = self.fewest_per_node
        own = np.maximum(1.0, self.nics * members / self.devices_per_node)
        share = np.minimum(own, self.nics / self.sharers) * self.nic
        return np.minimum(share, members * self.slot) / self.oversubscription


def fabric_parts(
    collective: str, span: Span, fabric: Mapping[str, Any]
) -> tuple[tuple[Curves, Value], ...]:
    """Returns the curves of a collective over nodes; its time is the largest of theirs."""
    if collective == "all_to_all":
        return _all_to_all(span, fabric)
    if collective == "send_recv":
        return ((_send(span, fabric), 1.0),)
    return ((fabric_curve(collective, span, fabric), bus_factor(collective, span.ranks)),)


def fabric_curve(collective: str, span: Span, fabric: Mapping[str, Any]) -> Curves:
    """Returns the curve of a ring or tree collective over several nodes."""
    doublings = np.maximum(0.0, np.log2(span.nodes / 2.0))
    alpha = fabric["alpha_us"] * US + fabric["alpha_doubling_us"] * US * doublings
    if span.inner is not None:
        alpha = alpha + np.where(span.per_node == 1, 0.0, span.inner.alpha_s)
    alpha = alpha + span.extra_latency_s * _hops(collective, span.nodes)
    bandwidth = _bandwidth(collective, span, fabric)
    return Curves(
        alpha_s=alpha,
        bandwidth=bandwidth,
        half_bytes=bandwidth * _knee_s(collective, span.ranks, fabric),
        p=float(fabric["p_ring" if collective in RINGS else "p"]),
        r=float(fabric["r"]),
        low_bytes=fabric["low_mib"] * MIB,
    )


def _bandwidth(collective: str, span: Span, fabric: Mapping[str, Any]) -> Value:
    """Returns the bus bandwidth of a large ring or tree collective."""
    nics = span.nic_bytes_s
    single = _carried("e_single", nics, fabric)
    if span.inner is None:
        return single
    inside = np.minimum(span.inner.peak, span.inner.bandwidth)
    if collective != "all_reduce":
        wide = np.minimum(_carried("e_ring", nics, fabric), inside)
    else:
        wide = np.minimum(_carried("e_tree", nics, fabric), inside)
        once = (span.ranks - 1) / span.ranks
        tree = inside if span.multicast else load("network")["rules"]["tree_share"] * inside * once
        two = np.maximum(wide, np.minimum(fabric["e_two"] * nics * 2.0 * once, tree))
        wide = np.where(span.nodes > 2, wide, two)
    return np.where(span.per_node == 1, single, wide)


def _carried(share: str, nics: Value, fabric: Mapping[str, Any]) -> Value:
    """Returns what NICs carry: a share of a fast link, of a slow one all but the headers.

    Slow is what a core of the host keeps up with (`socket_gbs`, where the host moves the data).
    """
    slow = np.minimum(fabric.get("socket_gbs", 0.0) * GB, fabric.get("payload", 0.9) * nics)
    return np.maximum(fabric[share] * nics, slow)


def _knee_s(collective: str, ranks: Value, fabric: Mapping[str, Any]) -> Value:
    """Returns S0 / B in seconds."""
    if collective in RINGS:
        return fabric["tau_ring_us"] * US * ranks
    limit = float(load("network")["rules"]["growth_ranks"])
    near = np.minimum(ranks, limit) ** fabric["growth"]
    return fabric["tau_us"] * US * near * np.sqrt(np.maximum(1.0, ranks / limit))


def _hops(collective: str, nodes: Value) -> Value:
    """Returns the crossings of the fabric that follow one another."""
    if collective in RINGS:
        return nodes - 1.0
    doublings = np.frexp(nodes - 1.0)[1].astype(np.float64)  # log2 of the nodes, rounded up
    if collective == "all_reduce":
        return 2.0 * doublings
    return 1.0


def _all_to_all(span: Span, fabric: Mapping[str, Any]) -> tuple[tuple[Curves, Value], ...]:
    """An all-to-all, a buffer of a rank each: over the NIC and inside the node at once."""
    rate = fabric["e_all_to_all"] * span.nic_bytes_s / span.per_node
    alpha = fabric["alpha_us"] * US + fabric["alpha_peer_us"] * US * (span.ranks - 1)
    outside = Curves(
        alpha_s=alpha + span.extra_latency_s,
        bandwidth=rate,
        half_bytes=rate * fabric["tau_all_to_all_us"] * US * np.sqrt(span.ranks),
        p=float(fabric["p_all_to_all"]),
        low_bytes=fabric["low_mib"] * MIB,
    )
    parts: list[tuple[Curves, Value]] = [(outside, (span.ranks - span.per_node) / span.ranks)]
    inner = span.inner
    if inner is not None:
        same = {name: getattr(inner, name) for name in inner.__slots__}
        alone = span.per_node == 1
        same["alpha_s"] = np.where(alone, 0.0, inner.alpha_s)
        parts.append((Curves(**same), (span.per_node - 1) / span.ranks))
    return tuple(parts)


def _send(span: Span, fabric: Mapping[str, Any]) -> Curves:
    """One message between two nodes while `span.sharers` pairs do the same.

    A single pair of NCCL ranks drives about half of a fast NIC (24.9 of 50 GB/s), a slow one fully;
    where all ranks of several nodes send around a ring, those at the edge get `e_send_ring`. Over
    sockets the hosts of Volta move a pair's chunks at `pair_gbs`, far below a ring, and chunks pass
    hosts and wire one after another in part: `p_pair`, without it the slower of the two decides.
    """
    payload = float(fabric.get("payload", 0.9))
    pair: float = max(fabric["e_pair"] * span.nic, fabric["pair_gbs"] * GB)
    share = payload * span.nics * span.nic / span.sharers / span.oversubscription
    wire = np.minimum(payload * span.nic, share)
    p = fabric.get("p_pair")
    alone = np.minimum(pair, wire) if p is None else (pair**-p + wire**-p) ** (-1.0 / p)
    ring = float(fabric["e_send_ring"]) * span.nic
    rate = np.where(span.per_node > 1, ring, alone)
    alpha = fabric["alpha_pair_us"] * US + span.extra_latency_s
    return Curves(alpha_s=alpha, bandwidth=np.minimum(rate, span.slot))
