"""What tables of measurements say beyond a formula: boosted trees over the formula's own terms.

A formula of a dozen constants is smooth where a library switches between dozens of kernels. Where a
device and a kernel were measured on thousands of shapes, the logarithm of measured over predicted
time is itself predictable from the shape:

    T' = T exp(sum over trees of leaf)

Every tree asks the same few questions of all shapes (oblivious trees), so that a table is one
comparison of arrays. A residual belongs to one entry of the calibration (`key_of`), acts only
within the sizes that its table holds and on devices with the same number of SMs, and is shipped
only where it lowers the error of shapes that did not take part (studies/costs/residuals.py).
Data: catalog/calibration/residuals.toml (what, from where, how good) and residuals.npz (trees).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.calibration import Constants, load
from foretrain.errors import FileFormatError, Problem
from foretrain.hardware.device import Device

Array = NDArray[np.float64]
#: Leaves are stored as whole multiples of this.
LEAF = 1e-4
_BLOCK = 1024  # columns at a time: the working set stays in the cache of a core
#: Keys of an entry that are no constants of the formula.
_WORDS = ("source", "mark", "band", "band_long", "calibrated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Oblivious trees: T trees of D questions each.

    `feature` and `threshold` (D, T): question d of tree t asks whether that feature is larger.
    `leaf` (T, 2**D): logarithm of a factor by the answers, the first question the lowest bit.
    """

    feature: NDArray[np.intp]
    threshold: NDArray[np.float32]
    leaf: NDArray[np.float32]

    def __call__(self, features: Array) -> Array:
        """Returns the sum of leaves for each column of `features` (features, rows)."""
        depth, count = self.feature.shape
        table = np.asarray(features, dtype=np.float32)
        flat, base = self.leaf.reshape(-1), (np.arange(count) << depth)[:, None]
        total = np.empty(table.shape[1])
        for start in range(0, len(total), _BLOCK):
            part = table[:, start : start + _BLOCK]
            where = np.broadcast_to(base, (count, part.shape[1])).copy()
            for bit in range(depth):
                yes = part[self.feature[bit]] > self.threshold[bit][:, None]
                where += yes.astype(np.intp) << bit
            total[start : start + _BLOCK] = flat[where].sum(axis=0)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Measured over predicted time of operators: `factor`, 1 where it is not known (`inside`).

    `bands`: interval factors by size class of the family.
    """

    factor: Array
    inside: NDArray[np.bool_]
    bands: Array

    def band(self, classes: NDArray[np.intp], formula: Array | float) -> Array:
        """Returns the interval factors: by size class inside, that of the formula elsewhere."""
        return np.where(self.inside, self.bands[classes], formula)


def nothing_beyond(like: Array) -> Beyond:
    """Returns what an entry without a residual knows."""
    return Beyond(
        factor=np.ones(like.shape), inside=np.zeros(like.shape, dtype=bool), bands=np.ones(3)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The trees of one entry.

    `bounds`: sizes -> the least and the largest that the table holds. `sms`: of its device.
    `values`: all that residuals.toml says.
    """

    trees: Trees
    bounds: Mapping[str, tuple[float, float]]
    sms: int
    values: Mapping[str, Any]

    def beyond(self, features: Array, sizes: Mapping[str, Array]) -> Beyond:
        """Returns what is known of operators of these sizes."""
        inside = self.holds(sizes)
        factor = np.where(inside, np.exp(self.trees(features)), 1.0)
        return Beyond(factor=factor, inside=inside, bands=np.array(self.values["band"]))

    def holds(self, sizes: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Returns where all sizes lie within those of the table."""
        inside = np.ones(next(iter(sizes.values())).shape, dtype=bool)
        for name, (low, high) in self.bounds.items():
            inside &= (sizes[name] >= low) & (sizes[name] <= high)
        return inside


def key_of(constants: Mapping[str, Any], case: str = "") -> str:
    """Returns the name of an entry's constants, which changes with any of them."""
    items = sorted((k, v) for k, v in constants.items() if k not in _WORDS)
    return f"{zlib.crc32(repr((items, case)).encode()):08x}"


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
    if found.row not in ("measured", "fitted") or "calibrated" in found.values:
        return None
    shipped = _shipped(family)
    if not shipped:
        return None
    residual = shipped.get(key_of(found.values, case))
    if residual is None or residual.sms != device.sm_count:
        return None
    return residual if dtype in residual.values["dtypes"] else None


def said(factor: float) -> str:
    """Returns the words of a formula for the factor of a residual; none for 1."""
    return f"; x {factor:.3g} of shapes measured nearby" if factor != 1.0 else ""


@cache
def _shipped(family: str) -> Mapping[str, Residual]:
    entries: Sequence[Mapping[str, Any]] = load("residuals")["entry"]
    path = files("foretrain.catalog").joinpath("calibration", "residuals.npz")
    try:
        with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            feature, threshold, leaf = (arrays[n] for n in ("feature", "threshold", "leaf"))
    except (OSError, ValueError, KeyError) as error:
        raise FileFormatError(Problem(what=str(error), where="calibration/residuals.npz")) from error
    return {
        entry["key"]: Residual(
            trees=Trees(
                feature=feature[i].astype(np.intp),
                threshold=threshold[i],
                leaf=leaf[i].astype(np.float32) * np.float32(LEAF),
            ),
            bounds={name: (low, high) for name, (low, high) in entry["bounds"].items()},
            sms=int(entry["sms"]),
            values=entry,
        )
        for i, entry in enumerate(entries)
        if entry["family"] == family
    }
