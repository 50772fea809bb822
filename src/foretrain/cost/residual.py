"""What tables of measurements say beyond a formula: boosted trees over shape and fill of a device.

A formula of a dozen constants is smooth where a library switches between dozens of kernels. Where a
device and a kernel were measured on thousands of shapes, the logarithm of measured over predicted
time is itself predictable from the shape:

    T' = T exp(sum over trees of leaf)

Every tree asks the same few questions of all shapes (oblivious trees), so that a table is one
comparison of arrays. A residual belongs to one entry of the calibration (`key_of`), acts within the
sizes that its table holds (and fades over one doubling beyond them, so that there is no cliff) on
devices with the same number of SMs, and is shipped only where it lowers the error of shapes that
did not take part (studies/costs/residuals.py).
Data: catalog/calibration/residuals.json (what, from where, how good) and residuals.npz (trees).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from foretrain.cost.calibration import Constants
from foretrain.errors import FileFormatError, Problem
from foretrain.hardware.device import Device

Array = NDArray[np.float64]
#: Leaves are stored as whole multiples of this.
LEAF = 1e-4
#: The least size that counts in doublings (some sizes may be zero).
SMALL = 0.05
_BLOCK = 1024  # columns at a time: the working set stays in the cache of a core
#: Sizes beyond whose bounds the trees answer as at the bound, with the interval of the formula: the
#: numbers of heads, each of which fills the device like another batch.
EDGE = ("heads", "kv_heads")
#: Keys of an entry that are no constants of the formula.
_WORDS = ("source", "mark", "band", "band_long", "calibrated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Oblivious trees: T trees of D questions each.

    `feature` and `threshold` (D, T): question d of tree t asks whether that feature is larger.
    `leaf` (T, 2**D): logarithm of a factor in units of LEAF by the answers, the first question the
    lowest bit; whole numbers, so that a sum does not depend on what else is in the table.
    """

    feature: NDArray[np.intp]
    threshold: NDArray[np.float32]
    leaf: NDArray[np.int32]

    def __call__(self, features: Array) -> Array:
        """Returns the sum of leaves for each column of `features` (features, rows)."""
        depth, count = self.feature.shape
        table = np.asarray(features, dtype=np.float32)
        flat = self.leaf.reshape(-1)
        base: NDArray[np.intp] = (np.arange(count, dtype=np.intp) << depth)[:, None]
        total = np.empty(table.shape[1])
        for start in range(0, len(total), _BLOCK):
            part = table[:, start : start + _BLOCK]
            where = np.repeat(base, part.shape[1], axis=1)
            for bit in range(depth):
                yes = part[self.feature[bit]] > self.threshold[bit][:, None]
                where += yes.astype(np.intp) << bit
            total[start : start + _BLOCK] = LEAF * flat[where].sum(axis=0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Measured over predicted time of operators: `factor`, 1 where it is not known.

    `bands`: interval factors by size class of the family, which hold where `inside` is set.
    """

    factor: Array
    inside: NDArray[np.bool_]
    bands: Array

    def band(self, classes: NDArray[np.intp], formula: Array | float) -> Array:
        """Returns the interval factors: by size class inside, that of the formula elsewhere."""
        return np.where(self.inside, self.bands[np.arange(len(classes)), classes], formula)


def nothing_beyond(like: Array) -> Beyond:
    """Returns what an entry without a residual knows."""
    return Beyond(
        factor=np.ones(like.shape),
        inside=np.zeros(like.shape, dtype=bool),
        bands=np.ones((*like.shape, 3)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The trees of one entry.

    `bounds`: sizes -> the least and the largest that the table holds. `sms` and `dtypes`: of the
    table. `bands`: interval factors by size class; None: those of the entry hold. `own_bands`: size
    -> value -> those of operators of which the table holds few shapes (a head_dim).
    """

    trees: Trees
    bounds: Mapping[str, tuple[float, float]]
    sms: int
    dtypes: tuple[str, ...]
    bands: Array | None
    own_bands: Mapping[str, Mapping[float, Array]]

    def beyond(self, features: Array, sizes: Mapping[str, Array]) -> Beyond:
        """Returns what is known of operators of these sizes."""
        inside = np.ones(features.shape[1], dtype=bool)
        beyond = np.zeros(features.shape[1])  # doublings out of the table, of all sizes together
        for name, (low, high) in self.bounds.items():
            size = sizes[name]
            inside &= (size >= low) & (size <= high)
            if name in EDGE:
                continue
            if low == high:
                beyond += np.where(size == low, 0.0, 1.0)
            else:
                least = max(low, SMALL)
                beyond += np.log2(np.maximum(size, SMALL) / max(high, SMALL)).clip(0.0)
                beyond += np.log2(least / np.maximum(size, SMALL)).clip(0.0)
        factor = np.exp(np.maximum(1.0 - beyond, 0.0) * self.trees(features))
        if self.bands is None:
            return replace(nothing_beyond(factor), factor=factor)
        bands = np.tile(self.bands, (len(factor), 1))
        for name, values in self.own_bands.items():
            for value, own in values.items():
                bands[sizes[name] == value] = own
        return Beyond(factor=factor, inside=inside, bands=bands)


def key_of(constants: Mapping[str, Any]) -> str:
    """Returns the name of an entry's constants, which changes with any of them.

    An entry of `calibrate ops` keeps the residual of the entry that it started from.
    """
    if constants.get("calibrated") is True:
        return str(constants.get("residual", ""))
    items = sorted((k, v) for k, v in constants.items() if k not in _WORDS)
    return f"{zlib.crc32(repr(items).encode()):08x}"


def residual_of(
    family: str, found: Constants, device: Device, dtype: str, case: str = ""
) -> Residual | None:
    """Returns the residual of the entry that was found for a device, or None.

    Args:
        family: gemm, moe, attention or conv.
        found: constants of the formula.
        device: must have as many SMs as the device of the table.
        dtype: must be one of the table's.
        case: which constants of the entry, where it has several.
    """
    if found.row not in ("measured", "fitted"):
        return None
    residual = _shipped(family, key_of(found.values), case)
    if residual is None or residual.sms != device.sm_count or dtype not in residual.dtypes:
        return None
    return replace(residual, bands=None) if found.values.get("calibrated") is True else residual


def has_residual(key: object) -> bool:
    """Returns whether the entry of that key (`key_of`) has a residual, in any of its cases."""
    return any(key == known for _, known, _ in _index())


def said(factor: float) -> str:
    """Returns the words of a formula for the factor of a residual; none for 1."""
    return f"; x {factor:.3g} of shapes measured nearby" if factor != 1.0 else ""


@cache
def _index() -> Mapping[tuple[str, str, str], Mapping[str, Any]]:
    """Returns what residuals.json says, by family, key and case."""
    try:
        entries: list[dict[str, Any]] = json.loads(_file("residuals.json").decode("utf-8"))
        return {(e["family"], e["key"], e["case"]): e for e in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken("json", error) from error


@cache
def _arrays() -> NpzFile:
    """Returns the arrays of residuals.npz, each of which is read when it is asked for."""
    try:
        return np.load(BytesIO(_file("residuals.npz")), allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise _broken("npz", error) from error


def _file(name: str) -> bytes:
    return files("foretrain.catalog").joinpath("calibration", name).read_bytes()


def _broken(ending: str, error: Exception) -> FileFormatError:
    where = f"foretrain/catalog/calibration/residuals.{ending}"
    way_out = "install the package again"
    return FileFormatError(Problem(what=f"broken: {error!r}", where=where, way_out=way_out))


@cache
def _shipped(family: str, key: str, case: str) -> Residual | None:
    entry = _index().get((family, key, case))
    if entry is None:
        return None
    try:
        feature, threshold, leaf = (
            _arrays()[f"{entry['name']}/{part}"] for part in ("feature", "threshold", "leaf")
        )
    except (KeyError, ValueError, EOFError, BadZipFile) as error:
        raise _broken("npz", error) from error
    return Residual(
        trees=Trees(
            feature=feature.astype(np.intp),
            threshold=threshold,
            leaf=leaf.astype(np.int32),
        ),
        bounds={name: (low, high) for name, (low, high) in entry["bounds"].items()},
        sms=int(entry["sms"]),
        dtypes=tuple(entry["dtypes"]),
        bands=np.array(entry["band"]),
        own_bands={
            name: {float(value): np.array(own) for value, own in values.items()}
            for name, values in entry.get("own_bands", {}).items()
        },
    )
