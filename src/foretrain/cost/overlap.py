"""How much computation and communication slow each other down while they run together.

Constants: catalog/calibration/overlap.toml, by device generation and link kind. Explained in
docs/explain/network.md.
"""

from __future__ import annotations

from foretrain.cost.calibration import find, load
from foretrain.hardware.cluster import Cluster

#: Groups that lie inside a node whenever the node is large enough.
_INNER = ("tp",)


def overlap(category: str, cluster: Cluster) -> tuple[float, float]:
    """Returns (gamma_compute, gamma_comm): computation x (1 + first), transfer x (1 + second).

    Pipeline transfers use few channels and copy engines: (0, 0).
    """
    if category in ("pp", "host", "compute"):
        return (0.0, 0.0)
    if cluster.nodes > 1 and category not in _INNER:
        kind = "nic"
    else:
        kind = "pcie" if cluster.scaleup in ("none", "pairs") else "scaleup"
    found = find(load("overlap")["entry"], cluster.device)
    if found is None:
        return (0.0, 0.0)
    compute, comm = found.values[kind]
    return (float(compute), float(comm))
