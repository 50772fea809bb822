"""The prices of very many collectives at once: columns of groups and sizes.

The groups are regular: the same number of ranks on each of their nodes. Each different group is
priced once, then every row is evaluated with the constants of its group, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.network.collectives import fabric_constants, plain_span, span_size
from foretrain.cost.network.curve import Curve, bus_factor, curve_seconds
from foretrain.cost.network.fabric import Part, fabric_parts
from foretrain.cost.network.node import node_curve
from foretrain.errors import InputError, Problem
from foretrain.hardware.cluster import Cluster, GroupLayout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def column_seconds(
    cluster: Cluster,
    collectives: Sequence[str],
    kind: Ints,
    nodes: Ints,
    per_node: Ints,
    num_bytes: Floats,
    sharers: Ints | None = None,
) -> Floats:
    """Returns the time of every row, seconds.

    Row i is `collectives[kind[i]]` of `num_bytes[i]` bytes (as nccl-tests prints them) over
    `per_node[i]` ranks on each of `nodes[i]` nodes, while `sharers[i]` sibling groups (this one
    included) use the NICs.

    Raises:
        InputError: a group does not lie on the cluster.
    """
    together = np.ones_like(nodes) if sharers is None else np.maximum(sharers, 1)
    _check(cluster, nodes, per_node)
    widths = [int(column.max(initial=0)) + 1 for column in (nodes, per_node, together)]
    key = ((kind * widths[0] + nodes) * widths[1] + per_node) * widths[2] + together
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    prices = _Prices(cluster)
    groups = [
        prices.parts(collectives[int(kind[i])], int(nodes[i]), int(per_node[i]), int(together[i]))
        for i in first
    ]
    times = _evaluate([parts[0] for parts in groups], row, num_bytes)
    more = np.array([len(parts) > 1 for parts in groups])[row]
    if more.any():
        second = _evaluate([parts[-1] for parts in groups], row[more], num_bytes[more])
        times[more] = np.maximum(times[more], second)
    return times


def _check(cluster: Cluster, nodes: Ints, per_node: Ints) -> None:
    most = (int(nodes.max(initial=1)), int(per_node.max(initial=1)))
    least = min(int(nodes.min(initial=1)), int(per_node.min(initial=1)))
    if least < 1 or most[0] > cluster.nodes or most[1] > cluster.devices_per_node:
        raise InputError(
            Problem(
                what=f"groups do not lie on {cluster.text}",
                value=f"up to {most[1]} ranks on each of {most[0]} nodes, at least {least}",
                allowed=f"1 to {cluster.devices_per_node} ranks on 1 to {cluster.nodes} nodes",
            )
        )


def _evaluate(parts: Sequence[Part], row: Ints, num_bytes: Floats) -> Floats:
    """Returns the time of every size on the curve of its row's group."""
    table = np.array(
        [(f, c.alpha_s, c.bandwidth, c.half_bytes, c.p, c.r, c.low_bytes, c.cap) for c, f in parts]
    )
    factor, alpha, bandwidth, half, p, r, low, cap = table.T[:, row]
    return curve_seconds(
        num_bytes,
        factor,
        alpha_s=alpha,
        bandwidth=bandwidth,
        half_bytes=half,
        p=p,
        r=r,
        low_bytes=low,
        cap=cap,
    )


class _Prices:
    """The curves of groups on one cluster; those inside a node are looked up once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fabric = fabric_constants(cluster)
        self.island = span_size(cluster) // cluster.devices_per_node  # nodes of one scale-up domain
        self.known: dict[tuple[str, int, int, int], Curve] = {}

    def parts(self, collective: str, nodes: int, per_node: int, sharers: int) -> tuple[Part, ...]:
        """Returns the curves of one group; its time is the largest of theirs."""
        ranks = nodes * per_node
        if ranks == 1:
            return ((Curve(alpha_s=0.0, bandwidth=1.0), 0.0),)
        if nodes <= self.island:
            return (
                (self._inner(collective, nodes, per_node, sharers), bus_factor(collective, ranks)),
            )
        inner = None
        if collective != "send_recv" and per_node * min(nodes, self.island) > 1:
            inner = self._inner(collective, min(nodes, self.island), per_node, 1)
        full, rest = divmod(nodes, self.island)
        domains = (per_node * self.island,) * full + ((per_node * rest,) if rest else ())
        layout = GroupLayout(
            num_ranks=ranks,
            num_nodes=nodes,
            max_per_node=per_node,
            min_per_node=per_node,
            islands=domains,
        )
        return fabric_parts(
            collective, plain_span(self.cluster, layout, sharers, inner), self.fabric
        )

    def _inner(self, collective: str, nodes: int, per_node: int, sharers: int) -> Curve:
        key = (collective, nodes, per_node, sharers)
        if key not in self.known:
            size = self.cluster.devices_per_node
            ranks = [node * size + i for node in range(nodes) for i in range(per_node)]
            found = node_curve(self.cluster, collective, ranks, sharers=sharers)
            self.known[key] = found.curve
        return self.known[key]
