"""Measured collectives grouped by (system, nodes, ranks, collective), for the network studies.

Reads the tables that `foretrain validate network` reads; rows of equal size and group are merged
by median. A *system* is one machine of one source, whatever its number of nodes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import InputError
from foretrain.hardware import Cluster, parse_cluster
from foretrain.validation.network.adapters import read_network_rows
from foretrain.validation.network.compare import _system, fabric_of, group_ranks

#: Tables of nccl-tests that public guides and repositories print, one source a line.
PUBLISHED = Path(__file__).with_name("published_collectives.csv")
TABLES = ("network/collectives.csv.gz", "ops/aic_comm_nccl.parquet", "ops/vidur_network.parquet")
#: Sources whose small messages are host time, not transfer: Python launches or one process for all
#: devices. Their rows count from this many bytes on.
HOST_BOUND = {"vidur": 8e6, "NVSwitch (A100-SXM4-40GB x8)": 32e6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one collective of one group: bytes and measured seconds."""

    system: str
    fabric: str
    cluster: Cluster
    ranks: tuple[int, ...]
    collective: str
    sizes: NDArray[np.float64]
    seconds: NDArray[np.float64]


def load_groups(folder: Path) -> list[Group]:
    """Returns all groups of the tables in `folder` and of the published ones beside this file."""
    samples: dict[tuple[str, str, int, str], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sources: dict[tuple[str, str, int, str], tuple[Cluster, tuple[int, ...], str]] = {}
    for path in (*(folder / table for table in TABLES), PUBLISHED):
        for row in read_network_rows(path):
            if row.reason or not row.time_us or row.bytes < 1.0 or row.dtype == "int8":
                continue
            try:
                cluster = parse_cluster(row.cluster)
            except InputError:
                continue
            ranks = row.ranks or group_ranks(cluster, row.gpus)
            system = _system(cluster, row)
            least = max((v for k, v in HOST_BOUND.items() if k in system), default=0.0)
            if not ranks or row.bytes < least:
                continue
            key = (system, row.cluster, row.gpus, row.collective)
            samples[key][row.bytes].append(row.time_us * 1e-6)
            sources[key] = (cluster, ranks, fabric_of(cluster, ranks))
    groups: list[Group] = []
    for key, sizes in samples.items():
        cluster, ranks, fabric = sources[key]
        ordered = sorted(sizes)
        groups.append(
            Group(
                system=key[0],
                fabric=fabric,
                cluster=cluster,
                ranks=ranks,
                collective=key[3],
                sizes=np.array(ordered),
                seconds=np.array([float(np.median(sizes[s])) for s in ordered]),
            )
        )
    return groups
