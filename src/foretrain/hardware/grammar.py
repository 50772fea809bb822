"""The cluster grammar: one line of text that says what a cluster is.

    NODESxDEVICES DEVICE[, NICSxRATEG FABRIC] [options]

RATE in Gb/s per NIC and direction. Options stand in brackets: latency 50ms, nvl 72, nvlink pairs,
no p2p, oversubscribed 2:1, scaleup 200 GB/s, topology FILE (the output of `nvidia-smi topo -m`);
several in one pair of brackets are separated by commas.
"""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from foretrain.errors import CatalogError, FileFormatError, InputError, Problem
from foretrain.hardware.build import ClusterRequest, build_cluster
from foretrain.hardware.cluster import Cluster
from foretrain.hardware.device import FABRICS, SCALEUP, Device, device_from_mapping
from foretrain.hardware.fabrics import fabric_name
from foretrain.hardware.fields import read_toml_file
from foretrain.hardware.names import find_device
from foretrain.hardware.topology import read_topology

GRAMMAR = "NODESxDEVICES DEVICE[, NICSxRATEG FABRIC] [options]"
EXAMPLE = "8x8 h100-sxm, 8x400G ib"
#: More devices than any cluster has; a typing error would keep the compiler busy for long.
MAX_DEVICES = 131_072
_COUNT = r"(\d{1,9})"
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})"
_TIMES = r"\s*[x×*]\s*"
_SHAPE = re.compile(rf"{_COUNT}{_TIMES}{_COUNT}\s+(\S.*)", re.IGNORECASE)
_ONE_NODE = re.compile(rf"{_COUNT}\s*(?:[x×*]\s+|\s)\s*(\S.*)", re.IGNORECASE)
_NETWORK = re.compile(rf"(?:{_COUNT}{_TIMES})?{_NUMBER}\s*([a-z/]+)(?:\s+(\S.*))?", re.IGNORECASE)
_RATE_UNITS = ("g", "gb", "gb/s", "gbps", "gbit", "gbit/s", "gbits", "gbits/s")
_OPTIONS = (
    "[latency 50ms], [nvl 72], [nvlink pairs|mesh|nvswitch|none], [p2p], [no p2p], "
    "[oversubscribed 2:1], [scaleup 200 GB/s], [host 1024 GiB], "
    "[topology FILE]"
)
_WORD_OPTIONS: dict[str, tuple[str, object]] = {
    **{f"nvlink {kind}": ("scaleup", kind) for kind in SCALEUP},
    "no nvlink": ("scaleup", "none"),
    "p2p": ("p2p", True),
    "no p2p": ("p2p", False),
}
_SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "μs": "1e-6"}


class _Parser:
    """The parts of one text as they are read, and what is wrong with them."""

    def __init__(self, text: str, *, folder: Path) -> None:
        self.text = text
        self.folder = folder
        self.problems: list[Problem] = []
        self.device: Device | None = None
        self.nodes = self.per_node = 1
        self.stated: dict[str, Any] = {}

    def problem(
        self, what: str, value: object = None, allowed: str = "", way_out: str = ""
    ) -> None:
        self.problems.append(
            Problem(
                what=what,
                where=f"cluster {self.text!r}",
                value=value,
                allowed=allowed,
                way_out=way_out or f"the form is {GRAMMAR}, e.g. '{EXAMPLE}'",
            )
        )

    def above_zero(self, value: float, option: str) -> float:
        if value <= 0:
            self.problem("must be above 0", option, _OPTIONS)
        return value

    def set(self, key: str, value: object, option: str) -> None:
        if key in self.stated:
            self.problem("an option is given twice", option)
        self.stated[key] = value


def parse_cluster(text: str, *, folder: Path | None = None) -> Cluster:
    """Returns the cluster that `text` describes, e.g. '8x8 h100-sxm, 8x400G ib'.

    What is not stated comes from the device's usual node and is listed in `notes`. A file that it
    names lies relative to `folder`, or to where one stands.

    Raises:
        InputError: with every malformed part, the grammar and an example. CatalogError or
            FileFormatError when the device alone is at fault.
    """
    parser = _Parser(" ".join(text.split()), folder=folder or Path())
    body, options = _split_brackets(parser)
    pieces = [piece.strip() for piece in body.split(",")]
    if len(pieces) > 2:
        parser.problem("too many commas", body)
    _read_shape(parser, pieces[0])
    if len(pieces) > 1:
        _read_network(parser, pieces[1])
    for option in options:
        _read_option(parser, option)
    if parser.device is None or parser.problems:
        raise InputError(parser.problems)
    request = ClusterRequest(
        device=parser.device,
        nodes=parser.nodes,
        devices_per_node=parser.per_node,
        **parser.stated,
    )
    cluster, problems = build_cluster(request)
    if problems:
        raise InputError([replace(p, where=f"cluster {parser.text!r}") for p in problems])
    return replace(cluster, name=cluster.text)


def format_cluster(cluster: Cluster) -> str:
    """Returns the text that `parse_cluster` reads back as the same hardware."""
    return cluster.text


def _split_brackets(parser: _Parser) -> tuple[str, list[str]]:
    groups = re.findall(r"\[([^\[\]]*)\]", parser.text)
    body = re.sub(r"\[[^\[\]]*\]", " ", parser.text).strip()
    if "[" in body or "]" in body:
        parser.problem("a bracket is not closed", body, allowed=_OPTIONS)
        body = re.split(r"[\[\]]", body)[0].strip()
    options = [part.strip() for group in groups for part in group.split(",")]
    return body.rstrip(",").strip(), options


def _read_shape(parser: _Parser, piece: str) -> None:
    match = _SHAPE.fullmatch(piece)
    short = None if match else _ONE_NODE.fullmatch(piece)
    if match:
        parser.nodes, parser.per_node = int(match[1]), int(match[2])
    elif short:
        parser.per_node = int(short[1])
    else:
        parser.problem("cannot read nodes, devices and device", piece)
        return
    if parser.nodes < 1 or parser.per_node < 1:
        parser.problem("nodes and devices start at 1", piece)
        parser.nodes = parser.per_node = 1
    elif parser.nodes * parser.per_node > MAX_DEVICES:
        parser.problem(f"more than {MAX_DEVICES:,} devices", piece)
        parser.nodes = parser.per_node = 1
    parser.device = _read_device(parser, (match[3] if match else cast("Any", short)[2]).strip())
    if short and parser.device and parser.per_node > parser.device.node.devices:
        usual = parser.device.node.devices
        parser.problem(
            f"{parser.per_node} devices without nodes: the usual node of {parser.device.name} has "
            f"{usual}",
            piece,
            way_out=f"write NODESx{usual} {parser.device.name}",
        )


def _read_device(parser: _Parser, text: str) -> Device | None:
    """Returns the device of a name, or of a TOML file of the user."""
    try:
        if text.endswith(".toml"):
            data = read_toml_file(Path(text))
            return device_from_mapping(data, where=text, origin=text)
        return find_device(text)
    except (CatalogError, FileFormatError) as error:
        if parser.problems:
            parser.problems.extend(error.problems)
            return None
        raise


def _read_network(parser: _Parser, piece: str) -> None:
    match = _NETWORK.fullmatch(piece)
    if not match:
        parser.problem(
            "cannot read the network", piece, allowed="NICSxRATEG FABRIC, e.g. 8x400G ib"
        )
        return
    count, rate, unit, fabric = match.groups()
    if "B" in unit[1:]:
        in_bits = Decimal(rate) * 8
        parser.problem(
            "RATE is in Gb/s (bits), not in bytes",
            piece,
            way_out=f"{rate} GB/s is written {in_bits.normalize():f}G",
        )
    elif unit.lower() not in _RATE_UNITS:
        parser.problem("unknown unit of RATE", unit, allowed="G (Gb/s), e.g. 8x400G ib")
    if count is None:
        parser.problem("NICs per node missing", piece, way_out=f"write e.g. 1x{rate}G ib")
    if int(count or 1) < 1 or Decimal(rate) <= 0:
        parser.problem("NICs and RATE must be above 0", piece)
    parser.stated["nics_per_node"] = int(count or 1)
    parser.stated["nic_bandwidth"] = float(Decimal(rate) * 125_000_000)
    parser.stated["fabric"] = _read_fabric(parser, fabric)


def _read_fabric(parser: _Parser, text: str | None) -> str:
    if text is None:
        parser.problem("the fabric is missing", allowed=", ".join(FABRICS))
        return ""
    try:
        return fabric_name(text)
    except CatalogError as error:
        where = f"cluster {parser.text!r}"
        parser.problems.extend(replace(problem, where=where) for problem in error.problems)
        return ""


def _read_option(parser: _Parser, option: str) -> None:
    """Reads one option in brackets into what is stated."""
    text = option.lower()
    if text in _WORD_OPTIONS:
        parser.set(*_WORD_OPTIONS[text], option)
    elif match := re.fullmatch(rf"latency {_NUMBER}\s*(s|ms|us|µs|μs)", text):
        seconds = Decimal(match[1]) * Decimal(_SECONDS[match[2]])
        parser.set("extra_latency_s", float(seconds), option)
    elif match := re.fullmatch(rf"nvl ?{_COUNT}", text):
        parser.set("nvl_domain", parser.above_zero(int(match[1]), option), option)
    elif match := re.fullmatch(rf"oversubscribed {_NUMBER}(?:\s*:\s*1)?", text):
        factor = float(match[1])
        if factor < 1:
            parser.problem("oversubscription starts at 1:1", option, "[oversubscribed 2:1]")
        parser.set("oversubscription", factor, option)
    elif match := re.fullmatch(rf"(?i:scaleup) {_NUMBER}\s*[Gg]B/s", option):  # not bits
        rate = float(Decimal(match[1]) * 10**9)
        parser.set("scaleup_bandwidth", parser.above_zero(rate, option), option)
    elif match := re.fullmatch(rf"host {_NUMBER}\s*(gib|gb|tib|tb)", text):
        unit = {"gib": 2**30, "gb": 10**9, "tib": 2**40, "tb": 10**12}[match[2]]
        size = parser.above_zero(float(match[1]) * unit, option)
        parser.set("host_memory_bytes", size, option)
    elif match := re.fullmatch(r"(?i:topology)\s+(\S.*)", option):
        try:
            parser.set("topology", read_topology(parser.folder / match[1]), option)
        except FileFormatError as error:
            parser.problems.extend(error.problems)
    else:
        parser.problem("unknown option", option, allowed=_OPTIONS)
