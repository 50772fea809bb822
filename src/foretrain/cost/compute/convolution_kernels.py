"""The time of a convolution as the best of the algorithms of a vendor library.

    direct      the GEMM of a direction (b = groups):
                  forward  M = n oh ow   N = k         K = c r s
                  input    M = n h w     N = c         K = k r s / stride**a
                  weight   M = k         N = c r s     K = n oh ow
    fused       Winograd F(2x2, 3x3) in one kernel: the direct GEMM on whole 2x2 tiles / fused
    non-fused   Winograd F(4x4, 3x3): 36 products of n ceil(oh/4) ceil(ow/4) x k x c, and kernels
                that transform image, filter and result through memory
    no units    tensor cores want channels in multiples of 8: else zeros fill them up, or vector
                units run the direct GEMM
    narrow      fp32, up to 4 channels or filters: kernels without tiles, at the share `narrow` of
                the peak, FLOP counted whole

Winograd: 3x3, stride 1, fp32, no groups. A strided input gradient computes zeros: a of the two
powers of the stride are left out, in entries with `phases` pixels without a tap too. A GEMM may run
transposed. Groups with few channels are joined into block-diagonal products. Kernels of cuDNN 7 for
tensor cores run through the channels of a tap in pieces (`piece`, and `weight_piece` for both sides
of a weight gradient, which it fills up), have tiles of their own per direction (`input_tiles`,
`weight_tiles`) and bar some gradients (`most_taps`). Constants:
catalog/calibration/convolution_fitted.toml, by studies/costs/convolution.py. Explained in
docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.compute.gemm_tiles import Rates, gemm_seconds, has_no_sides

Array = NDArray[np.float64]
#: Groups that one product may join.
PACKS = (1, 2, 4, 8, 16, 32)
#: Channels that a tensor core takes at a time.
UNIT = 8.0
#: Channels or filters up to which kernels without tiles run.
NARROW = 4.0
#: Direction -> name of its constants.
_WAYS = {"backward_input": "input", "backward_weight": "weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Convolutions of one direction: channels c and k per group, oh x ow pixels of the result."""

    n: Array
    c: Array
    h: Array
    w: Array
    k: Array
    r: Array
    s: Array
    stride: Array
    groups: Array
    oh: Array
    ow: Array

    def part(self, where: NDArray[np.bool_]) -> Images:
        """Returns some of them."""
        if where.all():
            return self
        return Images(**{name: getattr(self, name)[where] for name in self.__slots__})

    @property
    def maps(self) -> Array:
        """Returns the elements of image and result."""
        image, result = self.c * self.h * self.w, self.k * self.oh * self.ow
        return self.n * self.groups * (image + result)

    @property
    def moved(self) -> Array:
        """Returns the elements of image, filter and result."""
        return self.maps + self.groups * self.c * self.k * self.r * self.s

    @property
    def flops(self) -> Array:
        """Returns the FLOP of the direct method."""
        return 2.0 * self.n * self.oh * self.ow * self.groups * self.k * self.c * self.r * self.s


def direct(
    x: Images, direction: str, rates: Rates, constants: Mapping[str, Any], size: float
) -> Array:
    """Returns the seconds of the implicit GEMM beyond the kernel floor.

    Args:
        x: the convolutions.
        direction: forward, backward_input or backward_weight.
        rates: of the device and dtype.
        constants: of a GEMM, and `input`, `weight` (time over that of the GEMM), `stride_power`.
        size: bytes per element.
    """
    best = np.full(x.n.shape, np.inf)
    way = _WAYS.get(direction, "forward")
    inner = {**constants, "tiles": constants.get(f"{way}_tiles", constants.get("tiles", ""))}
    for pack in PACKS:
        fits = x.groups % pack == 0
        if fits.any():
            view = _own_view(x.part(fits), direction, pack, constants)
            moved = size * x.moved[fits]
            best[fits] = np.minimum(best[fits], _product(view, rates, inner, moved))
    return best * _factor(direction, constants)


def least_seconds(x: Images, direction: str, rates: Rates, constants: Mapping[str, Any]) -> Array:
    """Returns what `direct` takes at the least: its FLOP at the peak."""
    view = _own_view(x, direction, 1, constants)
    flops = 2.0 * view["b"] * view["m"] * view["n"] * view["k"]
    return flops / rates.peak * _factor(direction, constants)


def winograd(x: Images, direction: str, rates: Rates, constants: Mapping[str, Any]) -> Array:
    """Returns the seconds of the better Winograd algorithm in fp32; infinite where it is none."""
    best = np.full(x.n.shape, np.inf)
    usable = (x.r == 3.0) & (x.s == 3.0) & (x.stride == 1.0) & (x.groups == 1.0)
    if usable.any():
        y = x.part(usable)
        fused = _fused(y, direction, rates, constants)
        best[usable] = np.minimum(fused, _non_fused(y, direction, rates, constants))
    return best


def narrow(x: Images, peak: float, constants: Mapping[str, Any]) -> Array:
    """Returns the seconds of kernels for few channels; infinite where there are none."""
    share = float(constants.get("narrow", 0.0))
    few = (np.minimum(x.c, x.k) <= NARROW) & (x.groups == 1.0)
    return np.where(few & (share > 0.0), x.flops / (peak * max(share, 1e-9)), np.inf)


def filled(x: Images) -> Images:
    """Returns the convolutions with channels filled up to whole units of a tensor core."""
    alone = x.groups == 1.0
    c, k = (np.where(alone, np.ceil(v / UNIT) * UNIT, v) for v in (x.c, x.k))
    values = {name: getattr(x, name) for name in x.__slots__}
    return Images(**{**values, "c": c, "k": k})


def without_units(x: Images, direction: str, constants: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Returns which gradients no tensor-core kernel of an entry with `most_taps` takes.

    DeepBench on V100 and T4: weight gradients of filters with more taps, and gradients whose
    padding is as large as the filter, last as long as on vector units.
    """
    if direction == "forward" or "most_taps" not in constants:
        return np.zeros(x.n.shape, dtype=bool)
    barred = (x.oh - 1.0) * x.stride + x.r - x.h >= 2.0 * x.r
    if direction == "backward_weight":
        barred |= x.r * x.s > float(constants["most_taps"])
    return barred


def _factor(direction: str, constants: Mapping[str, Any]) -> float:
    name = _WAYS.get(direction)
    return float(constants[name]) if name else 1.0


def _own_view(
    x: Images, direction: str, pack: int, constants: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns the GEMM of a direction as the kernels of an entry run it."""
    return _view(
        x,
        direction,
        pack,
        float(constants["stride_power"]),
        phases=bool(constants.get("phases", False)),
        piece=float(constants.get("piece", 1.0)),
        weight_piece=float(constants.get("weight_piece", 1.0)),
    )


def _view(
    x: Images,
    direction: str,
    pack: int,
    stride_power: float,
    *,
    phases: bool = False,
    piece: float = 1.0,
    weight_piece: float = 1.0,
) -> dict[str, Array]:
    """Returns the GEMM of a direction with `pack` groups joined.

    With `phases` a strided gradient leaves out pixels that meet no tap. A kernel takes the channels
    that it sums over (of a weight gradient: those of its columns) in pieces, tap by tap.
    """
    c, k, taps = x.c * pack, x.k * pack, x.r * x.s
    if direction == "backward_input":
        phase = taps / x.stride**stride_power  # taps that meet no zero, of a pixel on average
        pixels, least = x.n * x.h * x.w, 1.0 if phases else 0.0
        m, n = pixels * (np.minimum(1.0, phase) if phases else 1.0), c
        depth = _whole(k, piece) * np.maximum(least, phase)
    elif direction == "backward_weight":
        m, n, depth = _whole(k, weight_piece), _whole(c, weight_piece) * taps, x.n * x.oh * x.ow
    else:
        m, n, depth = x.n * x.oh * x.ow, k, _whole(c, piece) * taps
    return {"b": x.groups / pack, "m": m, "n": n, "k": np.maximum(1.0, depth)}


def _product(
    view: Mapping[str, Array], rates: Rates, constants: Mapping[str, Any], moved: Array
) -> Array:
    """Returns the seconds of a GEMM or of its transpose, without the kernel floor."""
    once = has_no_sides(constants)
    turned = {**view, "m": view["n"], "n": view["m"]}
    times = [
        gemm_seconds(v, rates=rates, constants=constants, bytes_moved=moved, turned=once).seconds
        for v in ((view,) if once else (view, turned))
    ]
    return np.minimum.reduce(times) - float(constants["t0_us"]) * 1e-6


def _fused(x: Images, direction: str, rates: Rates, constants: Mapping[str, Any]) -> Array:
    whole = Images(
        **{name: getattr(x, name) for name in x.__slots__ if name not in ("h", "w", "oh", "ow")},
        h=_whole(x.h, 2.0), w=_whole(x.w, 2.0), oh=_whole(x.oh, 2.0), ow=_whole(x.ow, 2.0),
    )  # fmt: skip
    time = _product(_view(whole, direction, 1, 0.0), rates, constants, 4.0 * x.moved)
    return time / float(constants["fused"])


def _non_fused(x: Images, direction: str, rates: Rates, constants: Mapping[str, Any]) -> Array:
    tiles = x.n * np.ceil(x.oh / 4.0) * np.ceil(x.ow / 4.0)
    views = {
        "forward": (tiles, x.k, x.c),
        "backward_input": (tiles, x.c, x.k),
        "backward_weight": (x.k, x.c, tiles),
    }
    m, n, k = views[direction]
    through = 36.0 * (tiles * (x.c + x.k) + x.k * x.c)
    inner = {**constants, "e_c": constants["non_fused"]}
    view = {"b": np.full(m.shape, 36.0), "m": m, "n": n, "k": k}
    product = _product(view, rates, inner, 4.0 * through)
    transforms = 4.0 * (x.maps + through) / (rates.bandwidth * float(constants["transform"]))
    return product + transforms + 3e-6 * float(constants["t0_us"])


def _whole(pixels: Array, tile: float) -> Array:
    return np.ceil(pixels / tile) * tile
