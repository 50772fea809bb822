"""The cluster of a row, as a text of the cluster grammar."""

from __future__ import annotations

import re
from dataclasses import dataclass

from foretrain.hardware import Device
from foretrain.validation.mapping.words import Assumed, Unsupported, first_number, has_word
from foretrain.validation.rows import Row

#: Words of interconnect texts -> fabrics of the grammar, the first match decides.
FABRICS: tuple[tuple[str, str], ...] = (
    (r"tcpx", "tcpx"),
    (r"roce|grand teton", "roce"),
    (r"\befa\b", "efa"),
    (r"omni-?path|\bopa\b", "opa"),
    (r"slingshot", "slingshot"),
    (r"infiniband|\bib\b|\bhdr|\bndr|\bedr", "ib"),
    (r"ethernet|aws|p3\.|delay", "ethernet"),
)
#: Texts that name a machine whose network is that of the device's usual node.
_USUAL_MACHINES = re.compile(r"\bdgx|superpod", re.IGNORECASE)
#: Sixteen GPUs behind NVSwitch.
_DGX2 = re.compile(r"\bdgx-?2", re.IGNORECASE)
#: NICs x rate of machines that a text names without figures.
_MACHINES: tuple[tuple[str, str], ...] = (
    (r"hopper-prod.*efa", "32x100G efa"),  # AWS p5.48xlarge
    (r"\ba3\b.*tcpx", "4x200G tcpx"),  # Google Cloud A3 High
)
_RATE = r"(\d+(?:\.\d+)?) ?(g|gb)(?:it)?(?:/s|ps|\b)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """What a text says; None is not said."""

    nics: int | None = None
    rate_gbit: float | None = None  # of one NIC
    total_gbit: float | None = None  # of a node
    fabric: str | None = None


def map_cluster(row: Row, device: Device, assumed: Assumed) -> str:
    """Returns NODESxDEVICES DEVICE[, NICSxRATEG FABRIC] [options].

    Raises:
        Unsupported: no GPU count, or one that is not whole nodes.
    """
    if not row.n_gpus or row.n_gpus < 1:
        raise Unsupported("the number of GPUs is not stated")
    per_node = row.gpus_per_node or 0
    dgx2 = bool(_DGX2.search(row.interconnect)) and not per_node and row.n_gpus > 8
    if dgx2:
        per_node = 16
    if not per_node:
        per_node = min(device.node.devices, row.n_gpus)
        if row.n_gpus > per_node:
            assumed.add(f"{per_node} GPUs per node (the usual node of {device.name})")
    per_node = min(per_node, row.n_gpus)
    nodes, rest = divmod(row.n_gpus, per_node)
    if rest:
        raise Unsupported(f"{row.n_gpus} GPUs are not whole nodes of {per_node}")
    text = row.interconnect
    shape = f"{nodes}x{per_node} {device.name}"
    options = _options(text, device, nodes) + (" [nvlink nvswitch]" if dgx2 else "")
    if nodes == 1:
        return shape + options
    return shape + _network(text, device, assumed) + options


def _network(text: str, device: Device, assumed: Assumed) -> str:
    """The NIC part of the grammar; empty when the usual node of the device decides."""
    if not text:
        assumed.add(f"network: the usual node of {device.name}")
        return ""
    for pattern, network in _MACHINES:
        if re.search(pattern, text, re.IGNORECASE):
            return f", {network}"
    if _USUAL_MACHINES.search(text):
        return ""
    found = _read(text)
    usual = device.node
    if found.rate_gbit is None and found.total_gbit is None:
        assumed.add(f"network: the usual node of {device.name} ({text!r} states no rate)")
        return ""
    nics = found.nics
    if nics is None and found.total_gbit is not None:
        nics = usual.nics if found.total_gbit > 100 else 1
        assumed.add(f"{found.total_gbit:g} Gb/s per node over {nics} NICs")
    elif nics is None:
        nics = usual.nics
        assumed.add(f"{nics} NICs per node (the source states the rate only)")
    rate = found.rate_gbit if found.rate_gbit is not None else (found.total_gbit or 0.0) / nics
    fabric = found.fabric
    if fabric is None:
        fabric = usual.fabric
        assumed.add(f"fabric = {fabric} (not stated)")
    return f", {nics}x{rate:g}G {fabric}"


def _read(text: str) -> _Network:
    """What an interconnect text says, e.g. 'NVLink; 4x100Gb RoCE per node'."""
    plain = text.replace("，", ", ").replace("200Gb/s CX-7", "200 Gb/s")
    plain = re.split(r"\bcompute: ", plain, flags=re.IGNORECASE)[-1]  # not the storage network
    fabric = next((f for p, f in FABRICS if re.search(p, plain, re.IGNORECASE)), None)
    nics, rate = _nics_and_rate(plain)
    if nics is not None:
        return _Network(nics=nics, rate_gbit=rate, fabric=fabric)
    rate = first_number(_RATE, plain) or first_number(r"bandwidth (\d+(?:\.\d+)?) ?gbps", plain)
    if rate is None:
        return _Network(fabric=fabric)
    if has_word(plain, "per gpu"):
        return _Network(nics=8, rate_gbit=rate, fabric=fabric)
    if has_word(plain, "infiniband, ", "infiniband，"):
        return _Network(rate_gbit=rate, fabric=fabric)
    if fabric in ("ib", "ethernet"):  # one adapter of a class of clusters, one cloud NIC
        return _Network(nics=1, rate_gbit=rate, fabric=fabric)
    return _Network(total_gbit=rate, fabric=fabric)


def _nics_and_rate(text: str) -> tuple[int | None, float | None]:
    """'8x HDR200 IB', '4x100Gb RoCE', '4x OPA 100Gb/s', 'InfiniBand 8x50 GB/s'."""
    match = re.search(r"(\d+)x ?(\d+(?:\.\d+)?) ?(GB/s|Gb|Gbps)", text)
    if match:
        return int(match[1]), float(match[2]) * (8 if match[3] == "GB/s" else 1)
    match = re.search(r"(\d+)x (?!p3)[^;,]*?(?:HDR ?|NDR ?|\(OPA\) |OPA |IB )(\d+)", text)
    return (int(match[1]), float(match[2])) if match else (None, None)


def _options(text: str, device: Device, nodes: int) -> str:
    options: list[str] = []
    lower = text.lower()
    if "nvlink bridge" in lower and device.node.scaleup == "none":
        options.append("nvlink pairs")
    delay = first_number(r"(?:delay |~)(\d+(?:\.\d+)?) ?ms", text)
    if delay is not None and nodes > 1:
        options.append(f"latency {delay:g}ms")
    return "".join(f" [{option}]" for option in options)
