"""The price of a communication event: inside a node or over the fabric, with its bottleneck.

The part of the time that is not fluid (`latency_s`) is alpha, or the whole time when that is
smaller: sharing a link slows bytes, not latency. Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import load
from foretrain.cost.network.curve import Curve, Curves, Value, bus_factor
from foretrain.cost.network.fabric import Part, Span, fabric_parts
from foretrain.cost.network.measured import MeasuredCurve, find_curve
from foretrain.cost.network.node import node_curve
from foretrain.cost.slot import crossing_s
from foretrain.hardware.cluster import Cluster, GroupLayout
from foretrain.program import CommEvent
from foretrain.units import GB, MIB, US

_LARGE = 32 * MIB
_MID = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """What a collective of one group costs by size: the largest of `parts`, or a measured curve.

    `link` is the bottleneck (scaleup, pcie, nic), `row` how well the constants are known
    (intervals.toml), `mark` their provenance, `spread` widens the band over many nodes.
    """

    parts: tuple[Part, ...]
    link: str
    row: str
    mark: str
    text: str
    spread: float = 1.0
    measured: MeasuredCurve | None = None

    @property
    def alpha_s(self) -> float:
        """Returns the time of a tiny message."""
        if self.measured is not None:
            return self.measured.latency_s
        return max((curve.alpha_s for curve, _ in self.parts), default=0.0)

    def seconds(self, num_bytes: float) -> float:
        """Returns the time of one collective."""
        if self.measured is not None:
            return float(self.many(np.array([num_bytes]))[0])
        return max((curve.seconds(num_bytes, factor) for curve, factor in self.parts), default=0.0)

    def many(self, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the times of many sizes at once."""
        if self.measured is None:
            return self._modelled(num_bytes)
        times = self.measured.seconds(num_bytes)
        below = num_bytes < self.measured.smallest
        if self.measured.plateau or not below.any():
            return times
        edge = np.array([self.measured.smallest])
        ratio = float(self.measured.seconds(edge)[0]) / float(self._modelled(edge)[0])
        return np.where(below, ratio * self._modelled(num_bytes), times)

    def _modelled(self, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        times = np.zeros_like(num_bytes)
        for curve, factor in self.parts:
            times = np.maximum(times, curve.many(num_bytes, factor))
        return times


def price(event: CommEvent, cluster: Cluster, cost: GroupCost) -> Answer:
    """Returns the time of `event.count` collectives of a group that costs `cost`."""
    seconds = cost.seconds(event.bytes)
    size = "large" if event.bytes >= _LARGE else "mid" if event.bytes >= _MID else "small"
    count = max(1, event.count)
    crossing = crossing_s(event, cluster)
    row = cost.row
    if cost.measured is not None and not cost.measured.covers(event.bytes):
        row = "fitted"  # beyond what was measured
    return Answer(
        value_s=count * seconds,
        latency_s=count * min(cost.alpha_s, seconds),
        factor=width(row, f"comm_{size}") * cost.spread,
        kernels=float(count) if cost.link else 0.0,
        family=cost.link or "none",
        provenance=cost.mark,
        formula=cost.text if count == 1 else f"{count} x {cost.text}",
        link=cost.link,
        travel_s=count * min(_travel_s(event, cluster, cost), seconds),
        out_s=crossing,
        in_s=crossing,
    )


def _travel_s(event: CommEvent, cluster: Cluster, cost: GroupCost) -> float:
    """A message that is under way over a distance does not keep the next one from leaving."""
    alone = event.collective == "send_recv" and cost.link == "nic" and cost.measured is None
    return cluster.extra_latency_s if alone else 0.0


def measured_curve(
    event: CommEvent, cluster: Cluster, curves: Sequence[MeasuredCurve]
) -> MeasuredCurve | None:
    """Returns the measured curve that prices an event, None where the model does."""
    if not curves or len(event.ranks) <= 1:
        return None
    layout = cluster.layout(event.ranks)
    return find_curve(curves, event.collective, layout, cluster, event.sharers)


def collective_seconds(
    collective: str,
    num_bytes: NDArray[np.float64],
    ranks: Sequence[int],
    cluster: Cluster,
    *,
    sharers: int = 1,
) -> NDArray[np.float64]:
    """Returns the times of collectives of many sizes (bytes as nccl-tests prints them), seconds.

    One group, priced once: 1e6 sizes take a fraction of a second.
    """
    cost = group_cost(collective, tuple(ranks), cluster, sharers=sharers)
    return cost.many(np.asarray(num_bytes, dtype=np.float64))


def group_cost(
    collective: str,
    ranks: tuple[int, ...],
    cluster: Cluster,
    *,
    sharers: int = 1,
    curves: Sequence[MeasuredCurve] = (),
) -> GroupCost:
    """Returns the cost by size of a collective over `ranks` of `cluster`.

    `sharers` sibling groups use the NICs of a node at the same time (this one included). A curve
    of `curves` that was measured on this cluster with as many ranks wins.
    """
    if len(ranks) <= 1:
        return GroupCost(parts=(), link="", row="measured", mark="spec", text="one rank")
    layout = cluster.layout(ranks)
    inside = layout.inside_node or layout.inside_scaleup_domain
    cost = (_inside if inside else _over_nodes)(collective, ranks, cluster, layout, sharers)
    known = find_curve(curves, collective, layout, cluster, sharers)
    if known is None:
        return cost
    return GroupCost(
        parts=cost.parts,
        link=cost.link,
        row="measured",
        mark="measured",
        text=f"{collective} x{len(ranks)}: {known.text}",
        measured=known,
    )


def _inside(
    collective: str, ranks: tuple[int, ...], cluster: Cluster, layout: GroupLayout, sharers: int
) -> GroupCost:
    node = node_curve(cluster, collective, ranks, sharers=sharers)
    return GroupCost(
        parts=((node.curve, bus_factor(collective, layout.num_ranks)),),
        link=node.link,
        row=node.constants.row,
        mark=node.constants.provenance,
        text=(
            f"{collective} x{layout.num_ranks} in a node: S f/B (1+(S0/S)^p), alpha "
            f"{node.curve.alpha_s / US:.1f} us, B {node.curve.bandwidth / GB:.0f} GB/s, "
            f"bottleneck {node.where}"
        ),
        spread=node.spread,
    )


def _over_nodes(
    collective: str, ranks: tuple[int, ...], cluster: Cluster, layout: GroupLayout, sharers: int
) -> GroupCost:
    fabric = fabric_constants(cluster)
    span = span_of(collective, ranks, cluster, layout, sharers)
    parts = tuple(
        (curves.single(), float(factor))
        for curves, factor in fabric_parts(collective, span, fabric)
    )
    curve = parts[0][0]
    inner = span.inner.bandwidth if span.inner is not None else float("inf")
    nodes = int(span.nodes)
    narrow = "inside the node" if curve.bandwidth >= inner else f"the NICs ({cluster.fabric})"
    return GroupCost(
        parts=parts,
        link="nic",
        row="fitted" if fabric["mark"] in ("measured", "fitted") else "generation",
        mark=fabric["mark"],
        text=(
            f"{collective} x{layout.num_ranks} over {nodes} nodes ({cluster.fabric}, "
            f"{sharers} sharing): alpha {curve.alpha_s / US:.0f} us, B "
            f"{curve.bandwidth / GB:.1f} GB/s, bottleneck {narrow}"
        ),
        spread=node_spread(fabric, nodes),
    )


def node_spread(fabric: Mapping[str, Any], nodes: int) -> float:
    """Returns the factor by which a group over nodes widens the band of a collective.

    `spread` is how much wider the runs of a fabric scatter, `spread_doubling` the growth of the
    half-width per doubling beyond two nodes.
    """
    doublings = max(0.0, np.log2(nodes / 2.0))
    return float(fabric["spread"] * (1.0 + fabric["spread_doubling"]) ** doublings)


def fabric_constants(cluster: Cluster) -> Mapping[str, Any]:
    """Returns the constants of the cluster's fabric, as measured with its device generation."""
    fabrics: Mapping[str, Mapping[str, Any]] = load("network")["fabric"]
    base = fabrics.get(cluster.fabric, fabrics["ethernet"])
    return {**base, **base.get("generation", {}).get(cluster.device.generation.lower(), {})}


def span_of(
    collective: str, ranks: tuple[int, ...], cluster: Cluster, layout: GroupLayout, sharers: int
) -> Span:
    """Returns the group in plain numbers; a scale-up domain over several nodes counts as one."""
    size = span_size(cluster)
    first = ranks[0]
    together = [rank for rank in ranks if rank // size == first // size]
    inner = None
    if len(together) > 1 and collective != "send_recv":
        inner = node_curve(cluster, collective, together).curve
    wide = size > cluster.devices_per_node
    members = layout.islands if wide else (layout.max_per_node, layout.min_per_node)
    return plain_span(
        cluster,
        nodes=len(layout.islands) if wide else layout.num_nodes,
        ranks=layout.num_ranks,
        per_node=max(members),
        fewest_per_node=min(members),
        sharers=sharers,
        inner=inner,
    )


def span_size(cluster: Cluster) -> int:
    """Returns the devices behind one set of NICs: a node, or a scale-up domain of several nodes."""
    return max(cluster.devices_per_node, cluster.island_size)


def plain_span(
    cluster: Cluster,
    *,
    nodes: Value,
    ranks: Value,
    per_node: Value,
    fewest_per_node: Value,
    sharers: Value,
    inner: Curve | Curves | None,
) -> Span:
    """Returns groups whose part on one node follows `inner`; a node as `span_size` has it."""
    rules = load("network")["rules"]
    size = span_size(cluster)
    sharers = np.maximum(1, sharers)
    if size > cluster.devices_per_node:
        sharers = np.where(sharers > 1, np.maximum(1, size // per_node), 1)
    device = cluster.device
    return Span(
        ranks=ranks,
        nodes=nodes,
        per_node=per_node,
        fewest_per_node=fewest_per_node,
        devices_per_node=size,
        nics=cluster.nics_per_node * size / cluster.devices_per_node,
        nic=cluster.nic_bandwidth,
        sharers=sharers,
        inner=inner,
        slot=rules["slot_to_nic_gbs"][f"gen{device.pcie_gen}"] * GB,
        multicast=cluster.scaleup == "nvswitch" and device.generation in rules["multicast"],
        extra_latency_s=cluster.extra_latency_s,
        oversubscription=cluster.oversubscription,
    )
