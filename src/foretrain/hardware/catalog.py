"""The catalog of clusters and prices, and the one function that reads any cluster value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, FileFormatError, InputError, Problem, nearest
from foretrain.hardware.build import ClusterRequest, build_cluster
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.device import FABRICS, SCALEUP, SOURCE_KINDS, Device, device_from_mapping
from foretrain.hardware.fields import Fields, read_toml_file
from foretrain.hardware.grammar import EXAMPLE, GRAMMAR, parse_cluster
from foretrain.hardware.names import find_device
from foretrain.hardware.topology import read_topology

_STARTS_WITH_COUNT = re.compile(r"\d+\s*[x×*\s]", re.IGNORECASE)
_SHAPED = re.compile(r"\d+\s*[x×*]\s*\d+\s", re.IGNORECASE)
_MULTIPLE = re.compile(r"(\d{1,9})\s*[x×*]?\s+(\S+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCluster:
    """One file of catalog/clusters: a cluster with what it is and where that is written."""

    name: str
    description: str
    cluster: Cluster
    aliases: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What an hour of one device costs; `verified` tells whether the source can be checked."""

    usd_per_hour: float
    as_of: str
    verified: bool
    source: str


def resolve_cluster(
    value: str | Mapping[str, Any] | os.PathLike[str], *, folder: Path | None = None
) -> Cluster:
    """Returns the cluster that a run file or a flag gives.

    `value` is a text in the cluster grammar, a name of the catalog ('dgx-h100'; '16x dgx-h100' for
    16 nodes of it), the path of a TOML file, or a mapping with the keys of such a file.
    A topology that a text or a mapping names lies relative to `folder`.

    Raises:
        InputError: with every reason; CatalogError for an unknown name, FileFormatError for a file.
    """
    if isinstance(value, Mapping):
        return cluster_from_mapping(value, where="cluster", folder=folder).cluster
    if not isinstance(value, str) or _is_path(value):
        path = Path(value.strip() if isinstance(value, str) else value)
        return cluster_from_mapping(
            read_toml_file(path), where=str(path), folder=path.parent
        ).cluster
    named = _named(value)
    return parse_cluster(value, folder=folder) if named is None else named


def list_clusters() -> tuple[NamedCluster, ...]:
    """Returns all clusters of the catalog, sorted by name."""
    return tuple(_catalog_cluster(name) for name in names("clusters"))


@cache
def find_price(device: str) -> Price | None:
    """Returns the price of a device (its catalog name), None where none is known.

    Raises:
        FileFormatError: the file of prices is wrong.
    """
    table = read_toml("", "prices")
    if device not in table:
        return None
    fields = Fields(table[device], where="catalog/prices.toml", prefix=f"{device}.")
    price = Price(
        usd_per_hour=fields.number("usd_per_hour"),
        as_of=fields.text("as_of"),
        verified=fields.flag("verified", default=False),
        source=fields.text("source"),
    )
    fields.refuse_unknown()
    fields.raise_problems()
    return price


def cluster_from_mapping(data: object, *, where: str, folder: Path | None = None) -> NamedCluster:
    """Returns the cluster of a TOML file or an inline mapping.

    It holds either `cluster`, a text in the grammar, or `device`, `nodes`, `devices_per_node` and
    what differs from the device's usual node. `device` may be an inline table.

    Raises:
        FileFormatError: with every unknown key and bad value; InputError for a bad text.
    """
    fields = Fields(data, where=where)
    name = fields.text("name", default="")
    description = fields.text("description", default="")
    aliases, source = fields.texts("aliases"), fields.text("source", default="")
    if source and source.partition(":")[0] not in SOURCE_KINDS:
        kinds = ", ".join(f"'{kind}: ...'" for kind in SOURCE_KINDS)
        fields.problem("does not say what kind of source it is", "source", source, allowed=kinds)
    if fields.has("cluster"):
        cluster = _from_text(fields, fields.text("cluster"), folder)
    else:
        cluster = _from_keys(fields, folder)
    fields.raise_problems()
    if cluster is None:
        raise FileFormatError(Problem(what="describes no cluster", where=where))
    return NamedCluster(
        name=name or cluster.text,
        description=description,
        cluster=replace(cluster, name=name or cluster.text),
        aliases=aliases,
        source=source,
    )


def _is_path(text: str) -> bool:
    """Returns whether a text is a path rather than a cluster of devices that a file describes."""
    path = text.strip()
    return path.endswith(".toml") and (not _STARTS_WITH_COUNT.match(path) or Path(path).exists())


def _from_text(fields: Fields, text: str, folder: Path | None) -> Cluster | None:
    for key in _KEYS:
        if fields.has(key):
            way_out = "say it in the text, or leave out `cluster` and give all keys"
            fields.problem("has no effect beside `cluster`", key, fields.raw(key), way_out=way_out)
    fields.refuse_unknown(_KEYS)
    if not text:
        return None
    try:
        return parse_cluster(text, folder=folder)
    except InputError as error:
        fields.problems.extend(
            replace(problem, where=f"{fields.where}, {problem.where or 'key cluster'}")
            for problem in error.problems
        )
        return None


_KEYS = (
    "device",
    "nodes",
    "devices_per_node",
    "nics_per_node",
    "nic_gbit_s",
    "fabric",
    "scaleup",
    "scaleup_gb_s",
    "nvl_domain",
    "latency_us",
    "p2p",
    "oversubscription",
    "topology",
)


def _from_keys(fields: Fields, folder: Path | None) -> Cluster | None:
    stated: dict[str, Any] = {}
    network = [key for key in ("nics_per_node", "nic_gbit_s", "fabric") if fields.has(key)]
    if network:  # all three or none: half a network is a mistake
        stated["nics_per_node"] = fields.count("nics_per_node")
        stated["nic_bandwidth"] = fields.number("nic_gbit_s") * 1e9 / 8
        stated["fabric"] = fields.text("fabric", allowed=FABRICS)
    if fields.has("scaleup"):
        stated["scaleup"] = fields.text("scaleup", allowed=SCALEUP)
    if fields.has("scaleup_gb_s"):
        stated["scaleup_bandwidth"] = fields.number("scaleup_gb_s") * 1e9
    if fields.has("nvl_domain"):
        stated["nvl_domain"] = fields.count("nvl_domain")
    if fields.has("p2p"):
        stated["p2p"] = fields.flag("p2p", default=True)
    stated["extra_latency_s"] = fields.number("latency_us", default=0.0) * 1e-6
    stated["oversubscription"] = fields.number("oversubscription", default=1.0, least=1.0)
    if fields.has("topology"):  # beside this file
        try:
            path = (folder or Path()) / fields.text("topology")
            stated["topology"] = read_topology(path)
        except FileFormatError as error:
            fields.problems.extend(error.problems)
    nodes, per_node = fields.count("nodes"), fields.count("devices_per_node")
    device = _device(fields, folder)
    fields.refuse_unknown(("cluster", *_KEYS))
    if device is None or fields.problems:
        return None
    request = ClusterRequest(device=device, nodes=nodes, devices_per_node=per_node, **stated)
    cluster, problems = build_cluster(request)
    fields.problems.extend(replace(problem, where=fields.where) for problem in problems)
    return cluster


def _device(fields: Fields, folder: Path | None) -> Device | None:
    """Returns the device of a name, of a file beside this one, or of an inline table."""
    value = fields.raw("device")
    try:
        if isinstance(value, Mapping):
            return device_from_mapping(cast("object", value), where=f"{fields.where}, key 'device'")
        name = fields.text("device")
        if name.endswith(".toml"):
            path = (folder or Path()) / name
            return device_from_mapping(read_toml_file(path), where=str(path), origin=str(path))
        return find_device(name) if name else None
    except InputError as error:
        fields.problems.extend(error.problems)
        return None


@cache
def _catalog_cluster(name: str) -> NamedCluster:
    where = f"catalog/clusters/{name}.toml"
    found = cluster_from_mapping(read_toml("clusters", name), where=where)
    missing = [key for key in ("description", "source") if not getattr(found, key)]
    if missing or found.name != name:
        raise FileFormatError(
            [Problem(what="missing", where=f"{where}, key {key!r}") for key in missing]
            or Problem(what="the name differs from the file's", where=where, value=found.name)
        )
    return found


@cache
def _cluster_names() -> dict[str, str]:
    """Returns the catalog name of every cluster name and alias."""
    found: dict[str, str] = {}
    for name in names("clusters"):
        for alias in (name, *read_toml("clusters", name).get("aliases", ())):
            found[_key(alias)] = name
    return found


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _named(text: str) -> Cluster | None:
    """Returns the cluster of a catalog name, or None when the text is one of the grammar."""
    text = text.strip()
    if _SHAPED.match(text):
        return None
    match, known = _MULTIPLE.fullmatch(text), _cluster_names()
    if match and _key(match[2]) in known:
        cluster = _catalog_cluster(known[_key(match[2])]).cluster
        return _times(cluster, int(match[1]), text)
    if _key(text) in known:
        return _catalog_cluster(known[_key(text)]).cluster
    if _STARTS_WITH_COUNT.match(text) or not text or re.search(r"[\[,]", text):
        return None
    raise CatalogError(
        Problem(
            what="neither a cluster of the catalog nor a text in the cluster grammar",
            value=text,
            allowed=f"{GRAMMAR}, e.g. '{EXAMPLE}'",
            way_out=_way_out(text, known),
        )
    )


def _way_out(text: str, known: dict[str, str]) -> str:
    try:
        device = find_device(text)
    except CatalogError:
        return nearest(_key(text), known) or "`foretrain catalog clusters` lists the names"
    return f"say how many: 1x{device.node.devices} {device.name}"


def _times(cluster: Cluster, count: int, text: str) -> Cluster:
    """Returns `count` times the nodes of a catalog cluster; one node gets its usual network."""
    if count < 1:
        raise InputError(Problem(what="nodes start at 1", where="cluster", value=text))
    nodes = count * cluster.nodes
    if cluster.nics_per_node or nodes == 1:
        return replace(cluster, nodes=nodes)
    many = parse_cluster(f"{nodes}x{cluster.devices_per_node} {cluster.device.name}")
    return replace(
        cluster,
        nodes=nodes,
        nics_per_node=many.nics_per_node,
        nic_bandwidth=many.nic_bandwidth,
        fabric=many.fabric,
        notes=(*cluster.notes, *(note for note in many.notes if note.startswith("NICs"))),
    )
