"""Devices and clusters for tests of the cost model, independent of the catalog of devices."""

from __future__ import annotations

from foretrain.hardware.cluster import Cluster
from foretrain.hardware.device import Device, UsualNode
from foretrain.run.stacks import load_stack
from foretrain.stack import Stack

_DEVICES = {
    # name: generation, form, SMs, bf16 TF, fp32 TF, GB/s, L2 MB, scale-up GB/s, PCIe generation
    "a100-sxm-80gb": ("ampere", "sxm", 108, 312, 19.5, 2039, 40, 300, 4),
    "h100-sxm": ("hopper", "sxm", 132, 989.4, 67, 3350, 50, 450, 5),
    "b200-sxm": ("blackwell", "sxm", 148, 2250, 75, 7700, 126, 900, 5),
    "v100-sxm-16gb": ("volta", "sxm", 80, 0, 15.7, 900, 6, 150, 3),
    "a40": ("ampere", "pcie", 84, 149.7, 37.4, 696, 6, 56.25, 4),
    "rtx-pro-6000": ("blackwell", "pcie", 188, 467.8, 117, 1792, 128, 0, 5),
    "gb200": ("blackwell", "nvl", 152, 2500, 80, 8000, 126, 900, 5),
    "newcomer": ("rubin", "sxm", 160, 4000, 100, 13000, 200, 1800, 6),
}


def device(name: str) -> Device:
    """Returns a device with the peaks of its data sheet."""
    generation, form, sms, half, single, rate, l2, scaleup, pcie = _DEVICES[name]
    peaks = {"fp32": single * 1e12, "tf32": half / 2 * 1e12, "bf16": half * 1e12}
    if not half:
        peaks = {"fp32": single * 1e12, "fp16": 125e12}
    else:
        peaks["fp16"] = half * 1e12
    if generation in ("hopper", "blackwell", "rubin"):
        peaks["fp8"] = 2 * half * 1e12
    if generation in ("blackwell", "rubin"):
        peaks["nvfp4"] = 4 * half * 1e12
    kind = "nvswitch" if scaleup > 100 else "pairs" if scaleup else "none"
    return Device(
        name=name,
        vendor="nvidia",
        generation=generation,
        form=form,
        sm_count=sms,
        peak_flops=peaks,
        memory_gb=80,
        memory_bytes=80e9,
        memory_type="hbm",
        memory_bandwidth=rate * 1e9,
        l2_bytes=l2 * 1e6,
        tdp_w=400,
        scaleup_link="nvlink" if scaleup else "none",
        scaleup_bandwidth=scaleup * 1e9,
        pcie_gen=pcie,
        node=UsualNode(devices=8, nics=8, nic_bandwidth=50e9, fabric="ib", scaleup=kind, domain=8),
    )


def cluster(name: str, nodes: int = 1, devices: int = 8, **changes: object) -> Cluster:
    """Returns a cluster of nodes with one 400G InfiniBand NIC per device."""
    what = device(name)
    values: dict[str, object] = {
        "name": "test",
        "device": what,
        "nodes": nodes,
        "devices_per_node": devices,
        "nics_per_node": devices if nodes > 1 else 0,
        "nic_bandwidth": 50e9 if nodes > 1 else 0.0,
        "fabric": "ib" if nodes > 1 else "none",
        "scaleup": what.node.scaleup,
        "scaleup_bandwidth": what.scaleup_bandwidth,
        "nvl_domain": {"nvswitch": devices, "pairs": 2}.get(what.node.scaleup, 1),
    }
    return Cluster(**(values | changes))  # pyright: ignore[reportArgumentType]


def stack(name: str = "megatron-te") -> Stack:
    """Returns a stack of the catalog."""
    return load_stack(name)
