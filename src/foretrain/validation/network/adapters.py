"""The layouts of network tables: our own, nccl-tests collections, and published operator tables.

Each adapter turns one line into a NetworkRow. Sizes are brought to the convention of nccl-tests:
all-gather counts the total output, reduce-scatter the total input, all-to-all one rank's buffer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foretrain.errors import CatalogError, FileFormatError, Problem
from foretrain.hardware import find_device, find_devices
from foretrain.validation.network.interconnect import is_unnamed, network_of
from foretrain.validation.network.rows import NetworkRow, read_table

Line = Mapping[str, str]

COLLECTIVES: dict[str, str] = {
    **{name: name for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")},
    **{name: name for name in ("broadcast", "reduce", "send_recv")},
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send_recv",
}
DTYPE_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4, "double": 8}

#: No message of a collective is larger; more is a damaged cell.
MOST_BYTES = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A layout: the columns it is known by, and how a line of it is read."""

    name: str
    columns: frozenset[str]
    read: Callable[[Line, str], NetworkRow]


def read_network_rows(path: Path) -> list[NetworkRow]:
    """Returns all rows of a table of measured collectives.

    Raises:
        FileFormatError: not readable, no known layout (the known ones are listed), or an id that
            is missing or given twice.
    """
    lines = list(read_table(path))
    adapter = _adapter(path, frozenset(lines[0][1]) if lines else frozenset())
    rows: list[NetworkRow] = []
    seen: dict[str, int] = {}
    problems: list[Problem] = []
    for number, line in lines:
        name = f"{path.name.split('.')[0]}-{number}"
        try:
            row = adapter.read(line, name)
        except KeyError as error:
            what = f"no column {error.args[0]!r}, which tables of {adapter.name} have"
            raise FileFormatError(Problem(what=what, where=str(path))) from None
        except (ValueError, OverflowError, ZeroDivisionError) as error:  # a cell is no number
            row = NetworkRow(id=name, reason=f"unreadable: {error}")
        if not 0.0 <= row.bytes <= MOST_BYTES:
            row = replace(
                row, bytes=0.0, reason=row.reason or f"no size of a message: {row.bytes:g}"
            )
        if row.time_us is not None and row.time_us <= 0.0:
            row = replace(row, time_us=None)
        if not row.id or row.id in seen:
            what = f"the id is given twice (line {seen[row.id]})" if row.id else "the id is empty"
            problems.append(Problem(what=what, where=f"{path}, line {number}", value=row.id))
        seen[row.id] = number
        rows.append(row)
    if problems:
        raise FileFormatError(problems)
    return rows


def _adapter(path: Path, columns: frozenset[str]) -> Adapter:
    for adapter in ADAPTERS:
        if adapter.columns <= columns:
            return adapter
    known = "; ".join(f"{a.name}: {', '.join(sorted(a.columns))}" for a in ADAPTERS)
    raise FileFormatError(
        Problem(
            what="no known table of measured collectives",
            where=str(path),
            value=", ".join(sorted(columns)) or "no rows",
            allowed=known,
            way_out="use the columns id, cluster, gpus, collective, bytes, dtype, time_us",
        )
    )


def _own(line: Line, _: str) -> NetworkRow:
    row = _base(line.get("id", ""), line.get("collective", ""), line.get("bytes", ""))
    gpus = _number(line.get("gpus", ""))
    if gpus is None or not gpus.is_integer() or gpus < 1:
        row = replace(row, reason=row.reason or f"gpus is no count: {line.get('gpus')!r}")
    return replace(
        row,
        cluster=line.get("cluster", ""),
        gpus=int(gpus) if gpus is not None else 0,
        dtype=line.get("dtype", ""),
        time_us=_number(line.get("time_us", "")),
        stack=line.get("stack", ""),
        source=line.get("source", ""),
    )


def _collection(line: Line, name: str) -> NetworkRow:
    """A line of a collection of nccl-tests results on named machines."""
    row = _base(name, line["collective"], line["bytes"])
    nodes, gpus = int(line["nodes"]), int(line["gpus"])
    if not 1 <= nodes <= gpus:
        return replace(row, reason=row.reason or f"{gpus} gpus on {nodes} nodes")
    text = line["interconnect"]
    product = line["gpu"] if "H100 PCIe" not in line["gpu"] else "h100-pcie"
    device = re.sub(r"-class.*| HBM3| 120GB", "", product)
    if device.startswith("H100 80GB"):
        device = "h100-sxm"
    found = find_devices(device) or find_devices(re.sub(r"^NVIDIA ", "", device))
    if not found:
        reason = f"the catalog has no device {line['gpu']!r}"
        return replace(row, reason=row.reason or reason)
    best = max(found, key=lambda item: (item.form == "sxm", item.memory_gb))
    if "rate not stated; ~" in text:
        return replace(row, reason="the NIC rate was inferred from the measurement itself")
    if is_unnamed(line.get("source", "")):
        return replace(row, reason="the network of that time is not stated")
    network, assumed = network_of(text, best, nodes, line.get("source", ""))
    per_node = gpus // nodes
    if per_node == 1 and nodes > 1:  # one rank on each of the usual nodes
        per_node = best.node.devices
    return replace(
        row,
        cluster=f"{nodes}x{per_node} {best.name}{network}",
        gpus=gpus,
        dtype=line.get("dtype", ""),
        time_us=_number(line["time_us"]),
        source=text,
        assumed=assumed,
    )


def _dgx1_curves(line: Line, name: str) -> NetworkRow:
    row = _base(name, line["collective"], line["size_bytes"])
    return replace(
        row,
        cluster="1x4 v100-sxm-16gb",
        gpus=4,
        time_us=_number(line["latency_us"]),
        source="digitised 4 x V100",
    )


def _uneven(line: Line, name: str) -> NetworkRow:
    """Uneven all-to-all: costs as an even one of the largest sender (or receiver)."""
    tables = [float(part) for part in line["tables_per_gpu"].split("-")]
    row = _base(name, "all_to_all", line["size_bytes"])
    largest = float(line["batch_size"]) * max(tables) * float(line["embedding_dim"]) * 4.0
    return replace(
        row,
        cluster=f"1x{len(tables)} v100-sxm-16gb",
        gpus=len(tables),
        bytes=largest,
        time_us=_number(line["latency_us_mean_over_ranks"]),
        source="uneven 4 x V100",
    )


def _nccl_table(line: Line, name: str) -> NetworkRow:
    """aiconfigurator's NCCL tables: sizes in elements, times in ms."""
    row = _base(name, line["op_name"], line["message_size"])
    gpus = int(line["num_gpus"])
    device = line["system"].replace("_server", "").replace("_", "-")
    try:
        found = find_device({"a100-sxm": "a100-sxm-80gb"}.get(device, device))
    except CatalogError as error:
        return replace(row, reason=row.reason or error.problems[0].what)
    usual = min(max(gpus, found.node.devices), 8)
    return replace(
        row,
        cluster=f"1x{usual} {found.name}",
        gpus=gpus,
        bytes=row.bytes * DTYPE_BYTES.get(line["nccl_dtype"], 2),
        dtype=line["nccl_dtype"],
        time_us=_scaled(line["latency_ms"]),
        source="aiconfigurator",
    )


def _pairwise(line: Line, name: str) -> NetworkRow:
    """Vidur's tables of all-reduce and send/recv on A100 and A40 machines."""
    row = _base(name, line["collective"], line["size"])
    sku, workers = line["sku"], int(line["num_workers"])
    per_node, room = int(line["devices_per_node"]), int(line["max_devices_per_node"])
    nodes = max(1, workers // max(per_node, 1))
    if sku == "a100_dgx":
        text = f"{nodes}x{room} a100-sxm-80gb" + (", 1x100G ethernet" if nodes > 1 else "")
    elif sku == "a100_pairwise_nvlink":
        text = f"{nodes}x{room} a100-pcie-80gb [nvlink pairs]"
    elif sku == "a40_pairwise_nvlink":  # its transfers inside a node went over PCIe: 4.8 GB/s
        if nodes > 1:
            return replace(row, reason="the network between the nodes is not stated")
        text = f"{nodes}x{room} a40 [no p2p]"
    else:
        return replace(row, reason=f"unknown machine {sku!r}")
    return replace(
        row,
        cluster=text,
        gpus=workers,
        time_us=_scaled(line["latency_ms_median"]),
        source=f"vidur {sku}",
    )


def _old_all_reduce(line: Line, name: str) -> NetworkRow:
    """DeepBench: all-reduce of old machines; only NCCL on devices of the catalog, in one node."""
    row = _base(name, "all_reduce", line["n_floats"])
    gpus = int(line["n_devices"])
    if "nccl" not in line["algo"].lower():
        return replace(row, reason=f"not a collective of NCCL: {line['algo']}")
    names = {"NV_TitanX_Pascal": "titan-xp", "NV_1080Ti": "gtx-1080-ti", "NV_P100": "p100-pcie"}
    found = find_devices(names.get(line["gpu"], line["gpu"]))
    if not found:
        return replace(row, reason=f"the catalog has no device {line['gpu']!r}")
    if gpus > 8:
        return replace(row, reason="the network between the nodes is not stated")
    return replace(
        row,
        cluster=f"1x8 {found[0].name}",
        gpus=gpus,
        bytes=row.bytes * 4,
        time_us=_scaled(line["latency_ms"]),
        source="deepbench",
    )


def _links(line: Line, name: str) -> NetworkRow:
    """Broadcasts over one link: NVLink2 single and double, or between nodes."""
    row = _base(name, "broadcast", line["bytes"])
    link = line["nominal_link_GBps"]
    # on a DGX-1 one NVLink joins devices 0 and 1, two join 0 and 3
    machines = {"25": ("1x8 v100-sxm-16gb", (0, 1)), "50": ("1x8 v100-sxm-16gb", (0, 3))}
    cluster, ranks = machines.get(link, ("2x1 v100-sxm-16gb, 1x100G ib", (0, 1)))
    return replace(
        row,
        cluster=cluster,
        gpus=2,
        ranks=ranks,
        time_us=_number(line["latency_us"]),
        source=f"link {link}",
    )


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        name="foretrain",
        columns=frozenset({"id", "cluster", "gpus", "collective", "bytes", "time_us"}),
        read=_own,
    ),
    Adapter(
        name="nccl-tests collection",
        columns=frozenset({"gpu", "nodes", "gpus", "interconnect", "collective", "time_us"}),
        read=_collection,
    ),
    Adapter(
        name="digitised DGX-1 curves",
        columns=frozenset({"collective", "size_bytes", "latency_us"}),
        read=_dgx1_curves,
    ),
    Adapter(
        name="uneven all-to-all",
        columns=frozenset({"tables_per_gpu", "size_bytes", "latency_us_mean_over_ranks"}),
        read=_uneven,
    ),
    Adapter(
        name="aiconfigurator NCCL",
        columns=frozenset({"nccl_dtype", "num_gpus", "message_size", "latency_ms"}),
        read=_nccl_table,
    ),
    Adapter(
        name="vidur network",
        columns=frozenset({"sku", "num_workers", "size", "latency_ms_median"}),
        read=_pairwise,
    ),
    Adapter(
        name="DeepBench all-reduce",
        columns=frozenset({"n_floats", "n_devices", "latency_ms"}),
        read=_old_all_reduce,
    ),
    Adapter(
        name="broadcast per link",
        columns=frozenset({"nominal_link_GBps", "bytes", "latency_us"}),
        read=_links,
    ),
)


def _base(name: str, collective: str, size: str) -> NetworkRow:
    key = re.sub(r"[\s-]+", "_", collective.strip().lower()).removesuffix("_perf")
    num_bytes = _number(size)
    reason = ""
    if key not in COLLECTIVES:
        reason = f"unknown collective {collective!r}"
    elif num_bytes is None or num_bytes < 0:
        reason = f"bytes is no size: {size!r}"
    return NetworkRow(
        id=name, collective=COLLECTIVES.get(key, key), bytes=num_bytes or 0.0, reason=reason
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _scaled(milliseconds: str) -> float | None:
    value = _number(milliseconds)
    return None if value is None else value * 1e3
