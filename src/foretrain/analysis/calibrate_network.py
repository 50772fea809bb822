"""From logs of nccl-tests to measured curves of a cluster, and the calibration file with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrain.analysis.fit_curve import fit_curve
from foretrain.analysis.nccl_log import Table, read_log
from foretrain.cost.network.measured import MeasuredCurve
from foretrain.errors import FileFormatError, InputError, Problem
from foretrain.hardware import Cluster, Device, find_devices, list_fabrics

MIN_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """One curve with the samples it was fitted on, and what was doubtful about them."""

    curve: MeasuredCurve
    sizes: tuple[float, ...]
    times_s: tuple[float, ...]
    doubts: tuple[str, ...]


def calibrate_network(
    logs: Sequence[Path],
    *,
    cluster: Cluster | None = None,
    fabric: str = "",
    collective: str = "",
) -> list[FittedTable]:
    """Returns one fitted curve per collective and group of the logs, in their order.

    Device, ranks and nodes come from the logs, or from `cluster` where given; over several nodes
    `fabric` (or the cluster) must say what joins them. `collective` names the collective of a log
    that does not.

    Raises:
        FileFormatError: a log is not readable or contradicts itself; InputError: the device is
            not in the catalog, the fabric is not known, or fewer than three sizes were measured.
    """
    problems: list[Problem] = []
    tables: dict[tuple[str, int, int, str], list[Table]] = {}
    for path in logs:
        try:
            found = read_log(path, collective=collective)
        except FileFormatError as error:
            problems += error.problems
            continue
        for table in found:
            try:
                key = _key(table, cluster, fabric)
            except InputError as error:
                problems += error.problems
                continue
            tables.setdefault(key, []).append(table)
    if problems:
        raise InputError(problems)
    return [_fit(key, group, cluster, fabric) for key, group in tables.items()]


def _key(table: Table, cluster: Cluster | None, fabric: str) -> tuple[str, int, int, str]:
    """Device, nodes, ranks and collective of a table."""
    where = f"{table.where}, line {table.samples[0].line}"
    sizes = {sample.num_bytes for sample in table.samples}
    if len(sizes) < MIN_SIZES:
        what = f"a curve needs at least {MIN_SIZES} sizes"
        raise InputError(Problem(what=what, where=where, value=len(sizes)))
    if table.nodes > 1 and cluster is None and not fabric:
        raise InputError(
            Problem(
                what=f"the log spans {table.nodes} nodes and does not say what joins them",
                where=where,
                allowed=", ".join(item.name for item in list_fabrics()),
                way_out="give --fabric, or --cluster in the cluster grammar",
            )
        )
    if cluster is not None and table.ranks > cluster.world_size:
        raise InputError(
            Problem(
                what=f"the log has more ranks than {cluster.text}",
                where=where,
                value=table.ranks,
                allowed=f"up to {cluster.world_size}",
            )
        )
    device = cluster.device if cluster is not None else device_of(table.device, where)
    return (device.name, table.nodes, table.ranks, table.collective)


def device_of(text: str, where: str) -> Device:
    """Returns the device of the catalog that a driver's product name means.

    'NVIDIA H100 80GB HBM3' is the SXM card; PCIe cards say so.

    Raises:
        InputError: the catalog has no such device.
    """
    plain = re.sub(r"\b(HBM\w*|NVIDIA)\b", "", text).strip()
    shorter = re.sub(r"\b\d+ ?GB\b", "", plain).strip()
    for name in (text, plain, shorter):
        found = find_devices(name) if name else ()
        if found:
            return max(found, key=lambda device: (device.form == "sxm", device.memory_gb))
    raise InputError(
        Problem(
            what="the catalog has no such device",
            where=where,
            value=text or "none stated",
            way_out="give --cluster with a device of `foretrain catalog devices`",
        )
    )


def _fit(
    key: tuple[str, int, int, str],
    tables: Sequence[Table],
    cluster: Cluster | None,
    fabric: str,
) -> FittedTable:
    device, nodes, ranks, collective = key
    samples = [sample for table in tables for sample in table.samples]
    sizes = tuple(float(sample.num_bytes) for sample in samples)
    times = tuple(sample.seconds for sample in samples)
    names = ", ".join(dict.fromkeys(Path(table.where).name for table in tables))
    over = fabric if cluster is None else cluster.fabric
    curve = fit_curve(
        sizes,
        times,
        device=device,
        nodes=nodes,
        ranks=ranks,
        fabric="none" if nodes == 1 else over,
        collective=collective,
        source=names,
    )
    doubts = tuple(doubt for table in tables for doubt in table.doubts)
    return FittedTable(curve=curve, sizes=sizes, times_s=times, doubts=doubts)
