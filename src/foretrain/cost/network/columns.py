"""The prices of very many collectives at once: columns of groups and sizes.

The groups are regular: the same number of ranks on each of their nodes. The few curves inside a
node are looked up; all else is the formula of fabric.py over whole columns, however many groups
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.network.collectives import fabric_constants, plain_span, span_size
from foretrain.cost.network.curve import Curves, bus_factor, curve_seconds
from foretrain.cost.network.fabric import fabric_parts
from foretrain.cost.network.node import node_curve
from foretrain.errors import InputError, Problem
from foretrain.hardware.cluster import Cluster

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
    near = nodes <= span_size(cluster) // cluster.devices_per_node
    several = nodes * per_node > 1
    times = np.zeros(nodes.shape)
    for number, collective in enumerate(collectives):
        same = several & (kind == number)
        for where, price in ((same & near, _inside), (same & ~near, _over_nodes)):
            rows = np.flatnonzero(where)
            if len(rows):
                columns = (nodes[rows], per_node[rows], together[rows], num_bytes[rows])
                times[rows] = price(cluster, collective, *columns)
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


def _inside(
    cluster: Cluster,
    collective: str,
    nodes: Ints,
    per_node: Ints,
    sharers: Ints,
    num_bytes: Floats,
) -> Floats:
    """Returns the times of groups inside a node or a scale-up domain."""
    curves = _node_curves(cluster, collective, nodes, per_node, sharers)
    return curve_seconds(curves, num_bytes, bus_factor(collective, _floats(nodes * per_node)))


def _over_nodes(
    cluster: Cluster,
    collective: str,
    nodes: Ints,
    per_node: Ints,
    sharers: Ints,
    num_bytes: Floats,
) -> Floats:
    """Returns the times of groups that use the NICs."""
    island = span_size(cluster) // cluster.devices_per_node  # nodes behind one set of NICs
    rest = nodes % island
    inner = None
    if collective != "send_recv":
        whole = np.full_like(nodes, island)
        inner = _node_curves(cluster, collective, whole, per_node, np.ones_like(nodes))
    span = plain_span(
        cluster,
        ranks=_floats(nodes * per_node),
        nodes=np.ceil(nodes / island),
        per_node=_floats(per_node * island),
        fewest_per_node=_floats(per_node * np.where(rest > 0, rest, island)),
        sharers=_floats(sharers),
        inner=inner,
    )
    parts = fabric_parts(collective, span, fabric_constants(cluster))
    return np.maximum.reduce([curve_seconds(curve, num_bytes, factor) for curve, factor in parts])


def _node_curves(
    cluster: Cluster, collective: str, nodes: Ints, per_node: Ints, sharers: Ints
) -> Curves:
    """Returns the curve inside a node of every row; each different one is looked up once.

    Of siblings it only matters whether there are any. A lone rank has a curve of no time.
    """
    size = cluster.devices_per_node
    key = (nodes * (size + 1) + per_node) * 2 + (sharers > 1)
    names = [field.name for field in fields(Curves)]
    lone = Curves(alpha_s=0.0, bandwidth=1.0)
    table = np.tile([getattr(lone, name) for name in names], (int(key.max()) + 1, 1))
    for number in np.flatnonzero(np.bincount(key)):
        group, shared = divmod(int(number), 2)
        wide, width = divmod(group, size + 1)
        if wide * width > 1:
            ranks = [node * size + i for node in range(wide) for i in range(width)]
            curve = node_curve(cluster, collective, ranks, sharers=1 + shared).curve
            table[number] = [getattr(curve, name) for name in names]
    return Curves(**dict(zip(names, table.T[:, key], strict=True)))


def _floats(values: Ints) -> Floats:
    return values.astype(np.float64)
