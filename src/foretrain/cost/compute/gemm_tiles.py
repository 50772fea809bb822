"""The time of a GEMM kernel: tiles over the SMs in waves, the best of several tiles and splits.

A kernel computes b products of M x K by K x N in tiles of tm x tn on the SMs:

    F   = 2 b M N K                     D = s_i b (M K + K N) + s_o b M N
    x   = F / (P 1 ms)                  ideal duration
    d   = 1 - clock x / (x + clock_ms)  long kernels run at a lower sustained clock
    w   = b ceil(M/tm) ceil(N/tn) s / SM                    waves, s = split of K
    W   = max(1, q ceil(w) + (1 - q) w)
    e   = e_c d r / r(256 x 256),  r = tm tn / (tm tn + 4096 c)      small tiles reuse less
    t_c = W 2 tm tn (K/s + k0) SM / (P e)
    t_m = (D + [s>1] 8 s beta b M N) / (B e_b sqrt(min(1, 2 w)))
    t_i = max(t_c, t_m) (1 + (min/max)**4 / 4) + [s>1] sigma
    T   = t0 + Q + max(F / P, (sum over tiles and splits of t_i**-32 / 3)**(-1/32))
    Q   = b M max(cast_bytes K / (B e_b), row_ns)

The sum is a soft minimum: of many equally good candidates the library finds a better one than of
one alone (three of equal time count as their time). Q is a cast of the activation to the kernel's
dtype, where the kernel includes it: bound by memory, or by its rows. K is split only where tiles of
128 x 128 fill less than two waves. A roofline entry keeps e_c, e_b and t0.

Kernels that choose their tile by a rule (gemm_tiles.toml) have one candidate; their rows of tiles
come in whole clusters, and a last one that is not full costs `ragged` more. A call that is launched
by itself lasts at least `host_us`, and `host_odd_us` more where M is no multiple of 4 (scales of
blocks are padded first).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.calibration import load
from foretrain.errors import InternalError

Array = NDArray[np.float64]

#: Columns of a row of gemm_tiles.toml, and what holds where a row leaves them out.
_ROW = {
    "m_from": 0.0, "m_to": np.inf, "n_from": 0.0, "n_to": np.inf, "k_from": 0.0, "k_to": np.inf,
    "cluster_m": 1.0, "cluster_n": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """The tiles of a kernel family, one row each: columns that broadcast against operators.

    A tile serves sizes within `bounds` (lower, upper) of m, n and k; None: all of them. Tiles come
    in whole clusters. `split`: whether K may be split.
    """

    tm: Array
    tn: Array
    cluster_m: Array
    cluster_n: Array
    bounds: Mapping[str, tuple[Array, Array]] | None
    split: bool


@cache
def tile_set(name: str) -> TileSet:
    """Returns the tiles that an entry of gemm.toml names; InternalError if there are none."""
    found = next((s for s in load("gemm_tiles")["set"] if s["name"] == name), None)
    if found is None:
        raise InternalError(f"no tiles named {name!r} in gemm_tiles.toml")
    rows = [{**_ROW, "tm": tm, "tn": tn} for tm, tn in found.get("tiles", ())]
    rows += [{**_ROW, **row} for row in found.get("rows", ())]
    columns = {key: np.array([[float(row[key])] for row in rows]) for key in rows[0]}
    bounds = {size: (columns[f"{size}_from"], columns[f"{size}_to"]) for size in "mnk"}
    return TileSet(
        tm=columns["tm"],
        tn=columns["tn"],
        cluster_m=columns["cluster_m"],
        cluster_n=columns["cluster_n"],
        bounds=bounds if found.get("rows") else None,
        split=bool(found.get("split", True)),
    )


SPLITS = (3, 8)
_BLOCK = 256  # columns at a time: the working set stays in the cache of a core
_SOFT = 5  # doublings: the exponent 32
_REFERENCE = 256.0 * 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peak FLOP/s, memory bandwidth B/s, SMs."""

    peak: float
    bandwidth: float
    sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTimes:
    """Seconds, and what was chosen: tm, tn and split of each (0 for a roofline)."""

    seconds: Array
    tm: NDArray[np.int64]
    tn: NDArray[np.int64]
    split: NDArray[np.int64]


def gemm_seconds(
    shape: Mapping[str, Array],
    *,
    rates: Rates,
    constants: Mapping[str, Any],
    bytes_moved: Array,
    penalty: Array | float = 1.0,
) -> GemmTimes:
    """Returns the times of GEMMs given as arrays b m n k.

    Args:
        shape: arrays b m n k of one length.
        rates: of the device and dtype.
        constants: an entry of gemm.toml.
        bytes_moved: what operands and result move to and from device memory.
        penalty: divides the compute efficiency (misaligned rows).
    """
    b, m, n, k = (shape[name] for name in "bmnk")
    flops = 2.0 * b * m * n * k
    loss = np.broadcast_to(np.asarray(penalty, dtype=np.float64), m.shape)
    bandwidth = rates.bandwidth * float(constants["e_b"])
    fixed = float(constants["t0_us"]) * 1e-6
    per_row = float(constants.get("cast_bytes", 0.0)) / bandwidth * k
    cast = b * m * np.maximum(per_row, float(constants.get("row_ns", 0.0)) * 1e-9)
    host = np.where(m % 4.0 == 0.0, 0.0, float(constants.get("host_odd_us", 0.0)))
    host = (host + float(constants.get("host_us", 0.0))) * 1e-6
    if constants["form"] == "roofline":
        compute = flops * loss / (rates.peak * float(constants["e_c"]))
        none = np.zeros(m.shape, dtype=np.int64)
        best = np.maximum(compute, bytes_moved / bandwidth)
        seconds = _held(fixed + cast + best, host)
        return GemmTimes(seconds=seconds, tm=none, tn=none, split=none)
    ideal_ms = flops / (rates.peak * 1e-3)
    clock = 1.0 - float(constants["clock"]) * ideal_ms / (ideal_ms + float(constants["clock_ms"]))
    rate = rates.peak * float(constants["e_c"]) * clock / loss
    times = np.empty(m.shape)
    chosen = np.empty((3, *m.shape), dtype=np.int64)
    tiles = tile_set(constants["tiles"])
    unfilled = b * np.ceil(m / 128.0) * np.ceil(n / 128.0) < 2.0 * rates.sms
    may_split = tiles.split and bool(constants.get("split", True))
    splittable = unfilled & (k >= 256.0 * SPLITS[0]) & may_split
    for splits, where in (((1,), ~splittable), ((1, *SPLITS), splittable)):
        index = np.flatnonzero(where)
        for start in range(0, len(index), _BLOCK):
            part = index[start : start + _BLOCK]
            columns = (b[part], m[part], n[part], k[part], bytes_moved[part], rate[part])
            times[part], chosen[:, part] = _best(
                columns, tiles, splits, rates.sms, bandwidth, constants
            )
    times = np.maximum(times, flops / rates.peak)
    seconds = _held(fixed + cast + times, host)
    return GemmTimes(seconds=seconds, tm=chosen[0], tn=chosen[1], split=chosen[2])


def _held(seconds: Array, host: Array) -> Array:
    """Returns the time of calls that last at least as long as the host needs to make them."""
    high = np.maximum(seconds, host)
    ratio = np.minimum(seconds, host) / high
    return high * (1.0 + 0.25 * ratio**4)


def _best(
    columns: tuple[Array, ...],
    tiles: TileSet,
    splits: tuple[int, ...],
    sms: int,
    bandwidth: float,
    constants: Mapping[str, Any],
) -> tuple[Array, NDArray[np.int64]]:
    """Returns the soft minimum over tiles and splits, and the best (tm, tn, split)."""
    b, m, n, k, moved, rate = columns
    tm, tn = tiles.tm, tiles.tn
    grid, idle = _grid(tiles, (m, n, k), float(constants.get("ragged", 0.0)))
    grid = grid * (b / sms)
    reuse = 4096.0 * float(constants["c"])
    area = tm * tn
    # FLOP of a wave over the rate of its tile; the share of 256 x 256 tiles is one
    per_k = 2.0 * (area + reuse) * sms * (_REFERENCE / (_REFERENCE + reuse)) / rate
    q, k0 = float(constants["q"]), float(constants["k0"])
    options: list[Array] = []
    for split in splits:
        waves = grid * split if split > 1 else grid
        rounds = np.maximum(1.0, q * np.ceil(waves) + (1.0 - q) * waves)
        compute = rounds * per_k * (k / split + k0)
        extra = 8.0 * split * float(constants["beta"]) * b * m * n if split > 1 else 0.0
        memory = (moved + extra) / (bandwidth * np.sqrt(np.minimum(1.0, 2.0 * waves)))
        high = np.maximum(compute, memory)
        ratio = np.minimum(compute, memory) / high
        ratio *= ratio
        time = high * (1.0 + 0.25 * ratio * ratio)
        if split > 1:
            time += float(constants["sigma_us"]) * 1e-6
            time = np.where(k < 256.0 * split, np.inf, time)
        if idle is not None:
            time[idle] = np.inf
        options.append(time)
    times = np.concatenate(options) if len(options) > 1 else options[0]
    best = np.argmin(times, axis=0)
    least = times[best, np.arange(times.shape[1])]
    near = least / times
    for _ in range(_SOFT):
        near *= near
    soft = least * (near.sum(axis=0) / 3.0) ** (-1.0 / 2**_SOFT)
    which, tile = np.divmod(best, len(tm))
    split_of = np.array(splits, dtype=np.int64)[which]
    rows = (tm[tile, 0].astype(np.int64), tn[tile, 0].astype(np.int64), split_of)
    return soft, np.stack(rows)


def _grid(
    tiles: TileSet, sizes: tuple[Array, Array, Array], ragged: float
) -> tuple[Array, NDArray[np.bool_] | None]:
    """Returns the tiles of each product, and where a rule does not use a tile (None: nowhere)."""
    m, n, _ = sizes
    if tiles.bounds is None:
        return np.ceil(m / tiles.tm) * np.ceil(n / tiles.tn), None
    rows = m / (tiles.tm * tiles.cluster_m)
    whole = np.ceil(rows)
    whole = whole + ragged * (whole > rows)
    columns = np.ceil(n / (tiles.tn * tiles.cluster_n))
    idle = np.zeros(rows.shape, dtype=bool)
    for size, (low, high) in zip(sizes, tiles.bounds.values(), strict=True):
        idle |= (size < low) | (size >= high)
    return whole * columns * (tiles.cluster_m * tiles.cluster_n), idle
