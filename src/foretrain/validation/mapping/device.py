"""The device of a row: the product as printed, with the memory size where several were sold."""

from __future__ import annotations

import re

from foretrain.errors import CatalogError
from foretrain.hardware import Device, find_device, find_devices
from foretrain.validation.mapping.words import Assumed, Unsupported
from foretrain.validation.rows import Row

#: Texts that name no single product.
_UNCLEAR = re.compile(r"not stated|unspecified|unknown|^$", re.IGNORECASE)
#: A device that the catalog has under a sibling's name, and what is said about it.
_SIBLINGS = {"mi250": ("mi250x", "MI250 priced as MI250X (208 of 220 compute units)")}
#: gpu_norm groups these products under one word; the printed text tells them apart.
_GROUPS = ("TPU", "AMD-MI1xx/2xx")


def map_device(row: Row, assumed: Assumed) -> Device:
    """Returns the device; without a memory size the larger variant.

    Raises:
        Unsupported: the source names no product, or one that the catalog does not have.
    """
    if _UNCLEAR.search(row.gpu_norm or row.gpu) or _UNCLEAR.search(row.gpu or row.gpu_norm):
        raise Unsupported("the GPU is not stated")
    special = _special(row)
    name = special or _product(row)
    if name in _SIBLINGS:
        name, line = _SIBLINGS[name]
        assumed.add(line)
    memory = None if special else row.gpu_mem_gb or _printed_memory(row.gpu) or _first(row, name)
    if memory is not None:
        try:
            return find_device(name, memory)
        except CatalogError as error:
            raise Unsupported(f"{row.gpu} with {memory:g} GB: {error.problems[0].what}") from None
    found = find_devices(name)
    if not found:
        raise Unsupported(f"the catalog has no device {row.gpu or row.gpu_norm!r}")
    return _largest(found, name, assumed)


def _special(row: Row) -> str | None:
    """A variant that only the printed text or the page of the source tells apart."""
    if row.family == "flagperf" and row.model == "llama3_8B" and row.gpu_norm == "A100-SXM":
        return "a800-sxm"  # llama3_8B-megatron/README.md: NVIDIA_A800-SXM4-80GB in a DGX A800
    text = row.gpu.lower()
    if "h100" in text and "96gb" in text.replace(" ", ""):
        return "h100-sxm-96gb-500w"
    return None


def _product(row: Row) -> str:
    text = row.gpu if row.gpu_norm in _GROUPS or not row.gpu_norm else row.gpu_norm
    text = re.sub(r"^amd-instinct-", "", text.lower())
    text = re.sub(r"tpu ?7x.*", "tpu-v7x", text)
    if text == "v100":  # the group holds both forms
        form = "pcie" if "pcie" in row.gpu.lower() else "sxm"
        return f"v100-{form}"
    if text in ("a800", "h800"):
        return f"{text}-sxm"
    return re.sub(r"^rtx(?=\d)", "rtx-", re.sub(r"(\d)ti$", r"\1-ti", text))


def _printed_memory(text: str) -> float | None:
    match = re.search(r"(\d+) ?GB", text)
    return float(match[1]) if match else None


def _first(row: Row, name: str) -> float | None:
    """The only memory size there was when the run was published: 40 GB until November 2020."""
    early = re.fullmatch(r"2020-(0\d|10)", row.framework_version)
    return 40.0 if early and name == "a100-sxm" else None


def _largest(found: tuple[Device, ...], name: str, assumed: Assumed) -> Device:
    """The variant with the most memory; of several forms the SXM one."""
    exact = [d for d in found if d.name == name or re.fullmatch(rf"{name}-\d+gb", d.name)]
    choice = exact or list(found)
    best = max(choice, key=lambda device: (device.memory_gb, device.form == "sxm"))
    if len(choice) > 1:
        assumed.add(f"device = {best.name} (memory size not stated)")
    return best
