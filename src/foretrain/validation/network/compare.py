"""Predicting measured collectives, and how far off the predictions are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median

from foretrain.cost.model import CostModel, build_cost_model
from foretrain.cost.network.measured import MeasuredCurve
from foretrain.errors import InputError
from foretrain.hardware import Cluster, parse_cluster
from foretrain.program import CommEvent
from foretrain.run.stacks import load_stack
from foretrain.units import US
from foretrain.validation.network.adapters import read_network_rows
from foretrain.validation.network.rows import NetworkRow

#: The bands of message sizes, bytes: (lowest, below, name). Smaller and larger ones follow.
BANDS: tuple[tuple[float, float, str], ...] = (
    (32e6, float("inf"), ">= 32 MB"),
    (1e6, 32e6, "1-32 MB"),
    (64e3, 1e6, "64 KB-1 MB"),
    (0.0, 64e3, "< 64 KB"),
)
#: Which class of fabrics a limit of accuracy is stated for.
CLASSES: dict[str, str] = {
    **dict.fromkeys(("nvlink", "xgmi", "ib"), "NVLink, xGMI, InfiniBand"),
    **dict.fromkeys(("efa", "roce", "tcpx"), "EFA, RoCE, TCPX"),
    "slingshot": "Slingshot",
}
DEFAULT_STACK = "megatron-te"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row. `system` is the machine whatever its number of nodes, `fabric` what joins the group.

    Times in seconds; None where the row is unsupported, `reason` then says why.
    """

    row: NetworkRow
    system: str = ""
    fabric: str = ""
    reason: str = ""
    value_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None

    @property
    def ratio(self) -> float | None:
        """Returns predicted over measured, None without both."""
        measured = self.row.time_us
        if self.value_s is None or measured is None or measured <= 0.0:
            return None
        return self.value_s / (measured * US)


def validate_network(path: Path, curves: Sequence[MeasuredCurve] = ()) -> list[Outcome]:
    """Returns the prediction of every row of a table of measured collectives.

    `curves` of a calibration file win over the model where they were measured on such a group.

    Raises:
        FileFormatError: the table is not readable or of no known layout.
    """
    return [predict_row(row, tuple(curves)) for row in read_network_rows(path)]


def predict_row(row: NetworkRow, curves: tuple[MeasuredCurve, ...] = ()) -> Outcome:
    """Returns the prediction of one row; what it cannot predict says why."""
    if row.reason:
        return Outcome(row=row, reason=row.reason)
    try:
        cluster, model = _model(row.cluster, row.stack or DEFAULT_STACK, curves)
    except InputError as error:
        return Outcome(row=row, reason="; ".join(str(problem) for problem in error.problems))
    ranks = row.ranks or group_ranks(cluster, row.gpus)
    if not ranks:
        reason = f"{row.gpus} ranks do not spread evenly over {cluster.text}"
        return Outcome(row=row, reason=reason)
    event = CommEvent(
        collective=row.collective,  # pyright: ignore[reportArgumentType]
        bytes=row.bytes,
        dtype=row.dtype,
        ranks=ranks,
    )
    prices = model.price([event])
    return Outcome(
        row=row,
        system=_system(cluster, row),
        fabric=fabric_of(cluster, ranks),
        value_s=float(prices.value_s[0]),
        low_s=float(prices.low_s[0]),
        high_s=float(prices.high_s[0]),
    )


@lru_cache(maxsize=256)
def _model(text: str, stack: str, curves: tuple[MeasuredCurve, ...]) -> tuple[Cluster, CostModel]:
    cluster = parse_cluster(text)
    return cluster, build_cost_model(cluster, load_stack(stack), curves=curves)


def group_ranks(cluster: Cluster, gpus: int) -> tuple[int, ...]:
    """Returns the first devices of each node, as many on each; empty where they do not divide."""
    nodes = cluster.nodes if gpus >= cluster.nodes else gpus
    per_node, rest = divmod(gpus, max(nodes, 1))
    if gpus < 1 or rest or per_node > cluster.devices_per_node:
        return ()
    size = cluster.devices_per_node
    return tuple(node * size + local for node in range(nodes) for local in range(per_node))


def fabric_of(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Returns what joins the group: nvlink, xgmi, pairs, pcie, or the fabric between nodes."""
    layout = cluster.layout(ranks)
    if layout.inside_scaleup_domain and cluster.scaleup != "none":
        return "pairs" if cluster.scaleup == "pairs" else cluster.device.scaleup_link
    return "pcie" if layout.inside_node else cluster.fabric


def _system(cluster: Cluster, row: NetworkRow) -> str:
    text = cluster.text.split("x", 1)[1]
    return f"{text} | {row.source}" if row.source else text


@dataclass(frozen=True, slots=True, kw_only=True)
class BandStats:
    """Errors of one system or fabric in one band: `n` rows, `median` of per-size medians.

    `bias` is the median of predicted / measured - 1, `in_band` the share inside the interval.
    """

    n: int
    systems: int
    median: float
    bias: float
    in_band: float


def by_system(items: Iterable[Outcome]) -> dict[tuple[str, str, str], BandStats]:
    """Returns the errors by (fabric, system, band); the median over sizes of each size's median."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for item in items:
        if item.ratio is not None:
            groups[item.fabric, item.system, band_of(item.row.bytes)].append(item)
    return {key: _stats(rows) for key, rows in groups.items()}


def _stats(rows: Sequence[Outcome]) -> BandStats:
    sizes: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    for item in rows:
        key = (item.row.collective, item.row.gpus, item.row.bytes)
        sizes[key].append((item.ratio or 0.0) - 1.0)
    return BandStats(
        n=len(rows),
        systems=1,
        median=median(median(abs(e) for e in errors) for errors in sizes.values()),
        bias=median(median(errors) for errors in sizes.values()),
        in_band=sum(1 for item in rows if _inside(item)) / len(rows),
    )


def by_fabric(
    systems: Mapping[tuple[str, str, str], BandStats],
) -> dict[tuple[str, str], BandStats]:
    """Returns the errors by (fabric, band): medians over the systems of the fabric."""
    groups: dict[tuple[str, str], list[BandStats]] = defaultdict(list)
    for (fabric, _, band), stats in systems.items():
        groups[fabric, band].append(stats)
        if fabric in CLASSES:
            groups[CLASSES[fabric], band].append(stats)
    return {
        key: BandStats(
            n=sum(s.n for s in stats),
            systems=len(stats),
            median=median(s.median for s in stats),
            bias=median(s.bias for s in stats),
            in_band=median(s.in_band for s in stats),
        )
        for key, stats in groups.items()
    }


def band_of(num_bytes: float) -> str:
    """Returns the name of the size band."""
    return next(name for low, high, name in BANDS if low <= num_bytes < high)


def _inside(item: Outcome) -> bool:
    measured = (item.row.time_us or 0.0) * US
    return (item.low_s or 0.0) <= measured <= (item.high_s or 0.0)
