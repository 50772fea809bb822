"""What a free text about a machine's interconnect says, in the cluster grammar."""

from __future__ import annotations

import re

from foretrain.hardware import Device

_FABRICS = (
    (r"tcpx", "tcpx"),
    (r"\befa", "efa"),
    (r"roce", "roce"),
    (r"slingshot", "slingshot"),
    (r"omni-?path|\bopa\b", "opa"),
    (r"infiniband|\bib\b|\bndr\b|\bhdr\b", "ib"),
    (r"ethernet|tcp\b|gbe\b", "ethernet"),
)
#: NICs of a node where a text gives the sum of their rates only: p5 has 32 EFA adapters of 100
#: Gb/s, p4de 4; A3 Mega 8 of 200 Gb/s (vendors' data sheets).
_NODE_RATES = {("efa", 3200): "32x100G", ("efa", 400): "4x100G", ("tcpx", 1600): "8x200G"}
#: NICs of machines that a text names without rates (the centres' own descriptions).
_MACHINES = ((r"\(Sirius\)", "2x200G slingshot"), (r"\bH100 cluster", "8x400G ib"))
#: Runs without the network plugin of their fabric, which NCCL then uses through TCP sockets:
#: settings 1 and 2 of that repository (its README).
_SOCKETS = re.compile(r"alcf-nccl-tests:.*_output\.dat\.[12]$")
#: Runs on a network that their table does not name: before Polaris had its Slingshot 11 adapters.
_EARLIER = re.compile(r"alcf-nccl-tests:.*\.2023-")


def is_unnamed(source: str) -> bool:
    """Returns whether a run of `source` used another network than its table says."""
    return _EARLIER.search(source) is not None


def network_of(
    text: str, device: Device, nodes: int, source: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Returns the NIC part and the options of the cluster grammar, and what was assumed.

    `text` describes the interconnect, `source` names the run.
    """
    nics, assumed = _network_of(text, device, nodes)
    if nodes > 1 and _SOCKETS.search(source):
        return nics.replace("slingshot", "slingshot-tcp"), (
            *assumed,
            "no network plugin: TCP sockets",
        )
    return nics, assumed


def _network_of(text: str, device: Device, nodes: int) -> tuple[str, tuple[str, ...]]:
    options = _options(text, device)
    if nodes == 1 or "MNNVL" in text:
        return options, ()
    fabric = next((name for p, name in _FABRICS if re.search(p, text, re.IGNORECASE)), "")
    if not fabric:
        return options, ("network: the usual node",)
    for pattern, nics in _MACHINES:
        if re.search(pattern, text):
            return f", {nics}{options}", (f"NICs not stated: {nics}",)
    # an NVLink count is no NIC count
    plain = re.sub(r"NVLink\d*|\dx?(?:A100|GH200)/?\w*", "", text)
    count = re.search(r"(\d+)x ?(?:NDR ?|HDR ?)?(\d+) ?Gb?", plain)
    after = re.search(r"(\d+) ?Gb/s x ?(\d+)", plain)
    total = re.search(r"(?<!x)(\d+) ?(Gb/s|GB/s)", plain)
    if count and not after:
        return f", {count[1]}x{count[2]}G {fabric}{options}", ()
    if after:
        return f", {after[2]}x{after[1]}G {fabric}{options}", ()
    if total:
        rate = int(total[1]) * (8 if total[2] == "GB/s" else 1)
        nics = _NODE_RATES.get((fabric, rate), f"{device.node.nics}x{rate / device.node.nics:g}G")
        return f", {nics} {fabric}{options}", (f"{rate} Gb/s per node = {nics}",)
    rate = device.node.nic_bandwidth * 8e-9
    nics = f"{device.node.nics}x{rate:g}G"
    return f", {nics} {fabric}{options}", (f"NICs not stated: {nics}",)


def _options(text: str, device: Device) -> str:
    parts: list[str] = []
    if "bridge pair" in text.lower() and device.node.scaleup == "none":
        parts.append("nvlink pairs")
    if "P2P_DISABLE=1" in text:
        parts.append("no p2p")
    if "MNNVL" in text:
        parts.append("nvl 8")
    return "".join(f" [{part}]" for part in parts)
