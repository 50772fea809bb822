"""Work of the host for a device: copies over its link and the optimizer on the CPU.

    copy     alpha + bytes / (share of the link)     pinned buffers; what else crosses the
                                                     link of the device slows it (slot.py)
    update   bytes / (host bandwidth / devices)      read and written by a vectorised Adam

Constants in catalog/calibration/offload.toml. Explained in docs/explain/memory.md.
"""

from __future__ import annotations

from foretrain.cost.answer import Answer
from foretrain.cost.calibration import load
from foretrain.hardware.cluster import Cluster
from foretrain.program import CommEvent
from foretrain.units import GB, US

COPIES = ("device_to_host", "host_to_device")
COLLECTIVES = (*COPIES, "host_update")


def price(event: CommEvent, cluster: Cluster) -> Answer:
    """Returns the seconds of a copy between host and device, or of an update on the host."""
    values = load("offload")
    if event.collective in COPIES:
        rate = float(values["copy_share"]) * cluster.device.host_bandwidth
        alpha = float(values["copy_alpha_us"]) * US
        text = f"copy over the link to the host: bytes / {rate / GB:.1f} GB/s"
    else:
        rate = float(values["update_gb_s"]) * GB / cluster.devices_per_node
        alpha = 0.0
        text = f"optimizer on the host: bytes / {rate / GB:.1f} GB/s for each device"
    seconds = alpha + event.bytes / rate
    crossing = event.count * event.bytes / cluster.device.host_bandwidth
    return Answer(
        value_s=seconds * event.count,
        latency_s=alpha * event.count,
        factor=float(values["band"]),
        kernels=1.0,
        family="host",
        provenance="guess",
        formula=text,
        out_s=crossing if event.collective == "device_to_host" else 0.0,
        in_s=crossing if event.collective == "host_to_device" else 0.0,
    )
