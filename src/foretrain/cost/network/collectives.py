"""The price of a communication event: inside a node or over the fabric, with its bottleneck.

The part of the time that is not fluid (`latency_s`) is alpha, or the whole time when that is
smaller: sharing a link slows bytes, not latency. Explained in docs/explain/network.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import load
from foretrain.cost.network.curve import bus_factor
from foretrain.cost.network.fabric import (
    Span,
    all_to_all_seconds,
    fabric_curve,
    send_seconds,
)
from foretrain.cost.network.node import node_curve
from foretrain.hardware.cluster import Cluster, GroupLayout
from foretrain.program import CommEvent
from foretrain.units import GB, MIB, US

_LARGE = 32 * MIB
_MID = 1 * MIB


def price(event: CommEvent, cluster: Cluster) -> Answer:
    """Returns the time of `event.count` collectives of one group."""
    num_ranks = len(event.ranks)
    if num_ranks <= 1:
        return _answer(event, 0.0, 0.0, link="", row="measured", mark="spec", text="one rank")
    layout = cluster.layout(event.ranks)
    if layout.inside_node or layout.inside_scaleup_domain:
        node = node_curve(cluster, event.collective, event.ranks)
        seconds = node.curve.seconds(event.bytes, bus_factor(event.collective, num_ranks))
        text = (
            f"{event.collective} x{num_ranks} in a node: S f/B (1+(S0/S)^p), "
            f"alpha {node.curve.alpha_s / US:.1f} us, B {node.curve.bandwidth / GB:.0f} GB/s"
        )
        return _answer(
            event,
            seconds,
            node.curve.alpha_s,
            link=node.link,
            row=node.constants.row,
            mark=node.constants.provenance,
            text=text,
        )
    return _over_nodes(event, cluster, layout)


def _over_nodes(event: CommEvent, cluster: Cluster, layout: GroupLayout) -> Answer:
    fabric = _fabric(cluster)
    span = _span(event, cluster, layout)
    link = "nic"
    if event.collective == "all_to_all":
        seconds = all_to_all_seconds(event.bytes, span, fabric)
        alpha = all_to_all_seconds(0.0, span, fabric)
        rate = fabric["e_all_to_all"] * span.nic_bytes_s / span.per_node
    elif event.collective == "send_recv":
        seconds = send_seconds(event.bytes, span, fabric)
        alpha = send_seconds(0.0, span, fabric)
        rate = event.bytes / max(seconds - alpha, 1e-12)
    else:
        curve = fabric_curve(event.collective, span, fabric)
        seconds = curve.seconds(event.bytes, bus_factor(event.collective, layout.num_ranks))
        alpha, rate = curve.alpha_s, curve.bandwidth
    text = (
        f"{event.collective} x{layout.num_ranks} over {span.nodes} nodes ({cluster.fabric}, "
        f"{event.sharers} sharing): alpha {alpha / US:.0f} us, B {rate / GB:.1f} GB/s"
    )
    row = "fitted" if fabric["mark"] in ("measured", "fitted") else "generation"
    return _answer(event, seconds, alpha, link=link, row=row, mark=fabric["mark"], text=text)


def _fabric(cluster: Cluster) -> Mapping[str, Any]:
    """Returns the constants of the cluster's fabric, as measured with its device generation."""
    fabrics: Mapping[str, Mapping[str, Any]] = load("network")["fabric"]
    base = fabrics.get(cluster.fabric, fabrics["ethernet"])
    return {**base, **base.get("generation", {}).get(cluster.device.generation.lower(), {})}


def _span(event: CommEvent, cluster: Cluster, layout: GroupLayout) -> Span:
    """Returns the group in plain numbers; a scale-up domain over several nodes counts as one."""
    wide = cluster.island_size > cluster.devices_per_node
    size = cluster.island_size if wide else cluster.devices_per_node
    per_node = max(layout.islands) if wide else layout.max_per_node
    sharers = max(1, event.sharers)
    if wide and sharers > 1:
        sharers = max(1, size // per_node)
    first = event.ranks[0]
    together = [rank for rank in event.ranks if rank // size == first // size]
    inner = None
    if len(together) > 1 and event.collective != "send_recv":
        inner = node_curve(cluster, event.collective, together).curve
    return Span(
        ranks=layout.num_ranks,
        nodes=len(layout.islands) if wide else layout.num_nodes,
        per_node=per_node,
        devices_per_node=size,
        nics=cluster.nics_per_node * size / cluster.devices_per_node,
        nic=cluster.nic_bandwidth,
        sharers=sharers,
        inner=inner,
        extra_latency_s=cluster.extra_latency_s,
        oversubscription=cluster.oversubscription,
    )


def _answer(
    event: CommEvent, seconds: float, alpha: float, *, link: str, row: str, mark: str, text: str
) -> Answer:
    size = "large" if event.bytes >= _LARGE else "mid" if event.bytes >= _MID else "small"
    count = max(1, event.count)
    return Answer(
        value_s=count * seconds,
        latency_s=count * min(alpha, seconds),
        factor=width(row, f"comm_{size}"),
        kernels=float(count) if link else 0.0,
        family=link or "none",
        provenance=mark,
        formula=text if count == 1 else f"{count} x {text}",
        link=link,
    )
