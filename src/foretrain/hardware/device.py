"""One accelerator: peaks, memory, links, and the server it usually sits in.

A device is data: one TOML file with a source per value (catalog/devices, or a file of the user).
Peaks are dense, rates are bytes/s of one direction, memory is what the driver shows to a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from foretrain.errors import InputError, Problem
from foretrain.hardware.fields import Fields
from foretrain.units import COMPUTE_DTYPES, GB, GIB, MIB

Scaleup = Literal["nvswitch", "mesh", "pairs", "none"]
SCALEUP: tuple[Scaleup, ...] = ("nvswitch", "mesh", "pairs", "none")
FABRICS: tuple[str, ...] = (
    "ib", "roce", "efa", "tcpx", "slingshot", "slingshot-tcp", "opa", "ethernet",
)  # fmt: skip
VENDORS: tuple[str, ...] = ("nvidia", "amd", "google", "aws", "intel", "huawei")
SCALEUP_LINKS: tuple[str, ...] = (
    "nvlink",
    "xgmi",
    "ici",
    "neuronlink",
    "roce",
    "hccs",
    "none",
)
SOURCE_KINDS: tuple[str, ...] = ("measured", "spec", "guess")

#: What an x16 slot carries in one direction, bytes/s, by PCIe generation: the values that NCCL's
#: topology search uses (docs/explain, network); generation 6 doubles generation 5.
PCIE_BANDWIDTH: dict[int, float] = {3: 12e9, 4: 24e9, 5: 48e9, 6: 96e9}

#: Dtypes with a peak of their own; mxfp8 runs at the fp8 rate.
PEAK_DTYPES: tuple[str, ...] = tuple(d for d in COMPUTE_DTYPES if d != "mxfp8")


#: The keys of a device file that need a source.
VALUE_KEYS: tuple[str, ...] = (
    "sm_count",
    "peak_tflops",
    "memory_gb",
    "capacity_gib",
    "memory_type",
    "memory_bandwidth_gb_s",
    "l2_mib",
    "tdp_w",
    "scaleup_link",
    "scaleup_gb_s",
    "pcie_gen",
    "host_gb_s",
    "node",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualNode:
    """The server that a device usually sits in; what a cluster text leaves out comes from here.

    `domain` is the number of devices that one scale-up network joins (it may span nodes, 72 on
    NVL72). `nic_bandwidth` in bytes/s of one NIC and direction. `p2p` tells whether devices reach
    each other over PCIe without a detour through host memory.
    """

    devices: int
    nics: int
    nic_bandwidth: float
    fabric: str
    scaleup: Scaleup
    domain: int
    p2p: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as a program sees it (an MI250X package counts as two).

    `peak_flops` in dense FLOP/s by dtype, absent = not supported. `memory_gb` is the size printed
    on the box, `memory_bytes` what the driver shows. `scaleup_bandwidth` is the sum of all scale-up
    links of one device in one direction, bytes/s. `sources` says for every value of the file where
    it comes from: "measured: ...", "spec: ..." or "guess: ...". `origin` is the file of a device
    that is not in the catalog.
    """

    name: str
    vendor: str
    generation: str
    form: str
    sm_count: int
    peak_flops: Mapping[str, float]
    memory_gb: float
    memory_bytes: float
    memory_type: str
    memory_bandwidth: float
    l2_bytes: float
    tdp_w: float
    scaleup_link: str
    scaleup_bandwidth: float
    pcie_gen: int
    node: UsualNode
    host_link: float | None = None  # bytes/s to the host in one direction, None: the PCIe slot
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    origin: str = ""

    def __hash__(self) -> int:
        """Returns a hash of the name (the mappings have none)."""
        return hash((self.name, self.origin))

    @property
    def pcie_bandwidth(self) -> float:
        """Returns what the x16 slot carries in one direction, bytes/s."""
        return PCIE_BANDWIDTH[self.pcie_gen]

    @property
    def host_bandwidth(self) -> float:
        """Returns what goes to the host (or comes from it) in one direction, bytes/s."""
        return self.host_link or self.pcie_bandwidth

    @property
    def fp8_layouts(self) -> int:
        """Returns in how many layouts products read an FP8 matrix: forward and backward differ.

        Data-centre Blackwell reads either; before it, and in GeForce, only one layout has kernels,
        so a transpose is made (Transformer Engine, is_non_tn_fp8_gemm_supported).
        """
        return 1 if self.generation == "blackwell" and self.memory_type.startswith("hbm") else 2

    def supports(self, dtype: str) -> bool:
        """Returns whether the device computes in `dtype`."""
        return _peak_key(dtype) in self.peak_flops

    def peak(self, dtype: str) -> float:
        """Returns the dense peak of `dtype` in FLOP/s (mxfp8 runs at the fp8 rate).

        Raises:
            InputError: the device does not compute in `dtype`.
        """
        key = _peak_key(dtype)
        if key not in self.peak_flops:
            raise InputError(
                Problem(
                    what=f"{self.name} does not compute in this precision",
                    value=dtype,
                    allowed=", ".join(d for d in COMPUTE_DTYPES if self.supports(d)),
                    way_out="choose one of these or another device",
                )
            )
        return self.peak_flops[key]


def _peak_key(dtype: str) -> str:
    return "fp8" if dtype == "mxfp8" else dtype


def device_from_mapping(
    data: object, *, where: str, origin: str = "", sources_required: bool = False
) -> Device:
    """Returns the device that a data file (or an inline mapping) describes.

    `where` names the file in messages. Values of a user's own file need no source; those of the
    catalog do.

    Raises:
        FileFormatError: with every unknown key, missing, negative or not finite value.
    """
    fields = Fields(data, where=where)
    name = fields.text("name")
    sources = _sources(fields, required=sources_required)
    device = Device(
        name=name,
        vendor=fields.text("vendor", allowed=VENDORS),
        generation=fields.text("generation"),
        form=fields.text("form"),
        sm_count=fields.count("sm_count"),
        peak_flops=_peaks(fields),
        memory_gb=fields.number("memory_gb"),
        memory_bytes=float(round(fields.number("capacity_gib") * GIB)),
        memory_type=fields.text("memory_type"),
        memory_bandwidth=fields.number("memory_bandwidth_gb_s") * GB,
        l2_bytes=fields.number("l2_mib") * MIB,
        tdp_w=fields.number("tdp_w"),
        scaleup_link=fields.text("scaleup_link", allowed=SCALEUP_LINKS),
        scaleup_bandwidth=fields.number("scaleup_gb_s", default=0.0) * GB,
        pcie_gen=fields.count("pcie_gen"),
        host_link=fields.number("host_gb_s") * GB if fields.has("host_gb_s") else None,
        node=_usual_node(fields.table("node")),
        aliases=fields.texts("aliases"),
        sources=sources,
        origin=origin,
    )
    fields.refuse_unknown()
    _check(fields, device)
    fields.raise_problems()
    return device


def _peaks(fields: Fields) -> dict[str, float]:
    table = fields.table("peak_tflops")
    peaks = {dtype: table.number(dtype) * 1e12 for dtype in PEAK_DTYPES if table.has(dtype)}
    table.refuse_unknown(PEAK_DTYPES)
    if not peaks:
        fields.problem("no peak given", "peak_tflops", allowed=", ".join(PEAK_DTYPES))
    return peaks


def _usual_node(table: Fields) -> UsualNode:
    devices = table.count("devices")
    node = UsualNode(
        devices=devices,
        nics=table.count("nics"),
        nic_bandwidth=table.number("nic_gbit_s") * 1e9 / 8,
        fabric=table.text("fabric", allowed=FABRICS),
        scaleup=cast("Scaleup", table.text("scaleup", allowed=SCALEUP)),
        domain=table.count("domain", default=devices),
        p2p=table.flag("p2p", default=True),
    )
    table.refuse_unknown()
    return node


def _sources(fields: Fields, *, required: bool) -> dict[str, str]:
    """Returns the sources; every value needs one of a known kind where they are required."""
    table = fields.table("sources")
    sources = {key: table.text(key) for key in table.data}
    for key, text in sources.items():
        if text.partition(":")[0] not in SOURCE_KINDS:
            kinds = ", ".join(f"'{kind}: ...'" for kind in SOURCE_KINDS)
            table.problem("does not say what kind of source it is", key, text, allowed=kinds)
    if required:
        for key in VALUE_KEYS:
            if fields.has(key) and key not in sources:
                table.problem("missing: every value has a source", key)
    return sources


def _check(fields: Fields, device: Device) -> None:
    """Adds the problems that lie between two values."""
    if device.pcie_gen not in PCIE_BANDWIDTH:
        allowed = ", ".join(map(str, PCIE_BANDWIDTH))
        fields.problem("unknown generation", "pcie_gen", device.pcie_gen, allowed=allowed)
    if (device.scaleup_link == "none") != (device.scaleup_bandwidth == 0):
        fields.problem(
            "scaleup_link and scaleup_gb_s contradict each other",
            "scaleup_gb_s",
            device.scaleup_bandwidth / GB,
            allowed="a rate with a link, none without",
        )
    if device.scaleup_link == "none" and device.node.scaleup != "none":
        fields.problem(
            "a device without a link has no scale-up network", "node.scaleup", device.node.scaleup
        )
