"""Device names: the catalog's devices, and what people type for them."""

from __future__ import annotations

import re
from functools import cache

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, Problem, nearest
from foretrain.hardware.device import Device, device_from_mapping

#: Words that vendors and tools put around the product, e.g. "NVIDIA GeForce RTX 4090".
_DECORATION = re.compile(
    r"\b(nvidia|amd|intel|google|aws|huawei|tesla|geforce|quadro|instinct|radeon|gpu|chip)\b"
)
#: A device of 141 GB is typed as 140, one of 180 GB as 183 or 192.
_MEMORY_TOLERANCE = 0.08


@cache
def catalog_device(name: str) -> Device:
    """Returns the catalog's device of exactly this name.

    Raises:
        CatalogError: the catalog has no such file.
        FileFormatError: the file is wrong.
    """
    data = read_toml("devices", name)
    return device_from_mapping(data, where=f"catalog/devices/{name}.toml", sources_required=True)


def list_devices() -> tuple[Device, ...]:
    """Returns all devices of the catalog, sorted by name."""
    return tuple(catalog_device(name) for name in names("devices"))


def find_device(name: str, memory_gb: float | None = None) -> Device:
    """Returns the device that a person means by `name`, e.g. 'H100', 'A100-80GB', 'rtx 4090'.

    Case, spaces, underscores, vendor words and the digit of SXM do not matter. `memory_gb` chooses
    among the variants of a product; of several forms with that memory the SXM one is meant.

    Raises:
        CatalogError: the name is unknown (the nearest one is named) or leaves several devices open
            (they are listed).
    """
    found = find_devices(name)
    if memory_gb is not None:
        return _with_memory(name, found or _all_variants(name), memory_gb)
    if len(found) == 1:
        return found[0]
    if not found:
        raise CatalogError(_unknown(name))
    raise CatalogError(
        Problem(
            what="the device name is ambiguous",
            value=name,
            allowed=", ".join(device.name for device in found),
            way_out="write one of these",
        )
    )


def find_devices(name: str) -> tuple[Device, ...]:
    """Returns all devices that `name` may mean: one for a clear name, several, or none."""
    key = normal_name(name)
    if key in names("devices"):  # the usual case needs one file, not all
        return (catalog_device(key),)
    index = _index()
    if key in index:
        return (catalog_device(index[key]),)
    return _variants(key)


def normal_name(name: str) -> str:
    """Returns `name` in lower case with '-' between its parts and without vendor words."""
    text = re.sub(r"[\s_/()-]+", "-", name.strip().lower())
    text = _DECORATION.sub("", text)
    text = re.sub(r"\bsxm[2-6]\b", "sxm", text)
    text = re.sub(r"(\d)-?(gb|gib|g)\b", r"\1gb", text)
    text = re.sub(r"\b(rtx|gtx|tpu|mi|gaudi|trainium|titan)(?=v?\d|xp)", r"\1-", text)
    text = re.sub(r"\b(mi)-(?=\d)", r"\1", text)
    return re.sub(r"-+", "-", text).strip("-")


@cache
def _index() -> dict[str, str]:
    """Returns the catalog name of every name and alias in normal form."""
    index: dict[str, str] = {}
    for device in list_devices():
        for alias in (device.name, *device.aliases):
            key = normal_name(alias)
            if index.setdefault(key, device.name) != device.name:
                raise CatalogError(
                    Problem(
                        what=f"two devices answer to this name: {index[key]} and {device.name}",
                        where=f"catalog/devices/{device.name}.toml, key 'aliases'",
                        value=alias,
                    )
                )
    return index


def _variants(key: str) -> tuple[Device, ...]:
    """Returns the devices whose name, in the order of its parts, contains all parts of `key`."""
    parts = key.split("-")
    found: list[Device] = []
    for device in list_devices():
        rest = iter(normal_name(device.name).split("-"))
        if device.name.startswith(parts[0]) and all(part in rest for part in parts):
            found.append(device)
    return tuple(found)


def _all_variants(name: str) -> tuple[Device, ...]:
    """Returns the variants of the product that the first part of `name` names."""
    return _variants(normal_name(name).split("-")[0])


def _with_memory(name: str, found: tuple[Device, ...], memory_gb: float) -> Device:
    """Returns the device of the size nearest to `memory_gb`."""
    if not found:
        raise CatalogError(_unknown(name))
    if not _fits(found, memory_gb):
        found = _siblings(found[0])
    fitting = _fits(found, memory_gb)
    if not fitting:
        raise CatalogError(
            Problem(
                what=f"no {name} has this memory",
                value=f"{memory_gb:g} GB",
                allowed=", ".join(f"{d.name} ({d.memory_gb:g} GB)" for d in found),
            )
        )
    best = min(abs(device.memory_gb - memory_gb) for device in fitting)
    nearest_size = [d for d in fitting if abs(d.memory_gb - memory_gb) == best]
    sxm = [device for device in nearest_size if device.form == "sxm"]
    if len(nearest_size) > 1 and len(sxm) != 1:
        raise CatalogError(
            Problem(
                what="the device name is ambiguous",
                value=f"{name}, {memory_gb:g} GB",
                allowed=", ".join(device.name for device in nearest_size),
                way_out="write one of these",
            )
        )
    return sxm[0] if sxm else nearest_size[0]


def _fits(devices: tuple[Device, ...], memory_gb: float) -> list[Device]:
    return [d for d in devices if abs(memory_gb / d.memory_gb - 1) <= _MEMORY_TOLERANCE]


def _siblings(device: Device) -> tuple[Device, ...]:
    """Returns the variants of the same product: the name up to its first '-' is the same."""
    return _variants(normal_name(device.name).split("-")[0])


def _unknown(name: str) -> Problem:
    return Problem(
        what="unknown device",
        value=name,
        way_out=nearest(normal_name(name), _index()) or "`foretrain catalog devices` lists all",
    )
