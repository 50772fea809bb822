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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.calibration import load
from foretrain.errors import InternalError

Array = NDArray[np.float64]
Rows = NDArray[np.intp]

#: Columns of a row of gemm_tiles.toml, and what holds where a row leaves them out.
_ROW = {
    "m_from": 0.0, "m_to": np.inf, "n_from": 0.0, "n_to": np.inf, "k_from": 0.0, "k_to": np.inf,
    "cluster_m": 1.0, "cluster_n": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """The tiles of a kernel family, one row each: columns that broadcast against operators.

    A tile serves sizes within `bounds` (lower, upper) of m, n and k; None: all of them. Tiles come
    in whole clusters. `split`: whether K may be split. `ways`: the rows that a product may choose
    from, and those of its transpose where that counts too.
    """

    tm: Array
    tn: Array
    cluster_m: Array
    cluster_n: Array
    bounds: Mapping[str, tuple[Array, Array]] | None
    split: bool
    ways: tuple[slice, ...]


@cache
def tile_set(name: str, *, turned: bool = False) -> TileSet:
    """Returns the tiles that an entry of gemm.toml names; InternalError if there are none.

    `turned`: with those of the transposed product, of a set without bounds. The two share most.
    """
    found = next((s for s in load("gemm_tiles")["set"] if s["name"] == name), None)
    if found is None:
        raise InternalError(f"no tiles named {name!r} in gemm_tiles.toml")
    tiles = [(tm, tn) for tm, tn in found.get("tiles", ())]
    mirrored = [(tn, tm) for tm, tn in tiles] if turned else []
    own, other = ([x for x in a if x not in b] for a, b in ((tiles, mirrored), (mirrored, tiles)))
    shared = [tile for tile in tiles if tile not in own]
    rows = [{**_ROW, "tm": tm, "tn": tn} for tm, tn in own + shared + other]
    rows += [{**_ROW, **row} for row in found.get("rows", ())]
    columns = {key: np.array([[float(row[key])] for row in rows]) for key in rows[0]}
    bounds = {size: (columns[f"{size}_from"], columns[f"{size}_to"]) for size in "mnk"}
    ways = (slice(0, len(rows) - len(other)), slice(len(own), len(rows)))
    return TileSet(
        tm=columns["tm"],
        tn=columns["tn"],
        cluster_m=columns["cluster_m"],
        cluster_n=columns["cluster_n"],
        bounds=bounds if found.get("rows") else None,
        split=bool(found.get("split", True)),
        ways=ways if turned else ways[:1],
    )


SPLITS = (3, 8)
_ALL = (1, *SPLITS)
_BLOCK = 1024  # columns at a time: the working set stays in the cache of a core
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
    turned: bool = False,
) -> GemmTimes:
    """Returns the times of GEMMs given as arrays b m n k.

    Args:
        shape: arrays b m n k of one length.
        rates: of the device and dtype.
        constants: an entry of gemm.toml.
        bytes_moved: what operands and result move to and from device memory.
        penalty: divides the compute efficiency (misaligned rows).
        turned: the transposed product counts too, if it is faster (`has_no_sides`).
    """
    b, m, n, k = (shape[name] for name in "bmnk")
    flops = 2.0 * b * m * n * k
    loss = np.broadcast_to(np.asarray(penalty, dtype=np.float64), m.shape)
    bandwidth = rates.bandwidth * float(constants["e_b"])
    if constants["form"] == "roofline":
        compute = flops * loss / (rates.peak * float(constants["e_c"]))
        none = np.zeros(m.shape, dtype=np.int64)
        best = np.maximum(compute, bytes_moved / bandwidth)
        seconds = _called(best, (b, m, k), bandwidth, constants)
        return GemmTimes(seconds=seconds, tm=none, tn=none, split=none)
    ideal_ms = flops / (rates.peak * 1e-3)
    clock = 1.0 - float(constants["clock"]) * ideal_ms / (ideal_ms + float(constants["clock_ms"]))
    rate = rates.peak * float(constants["e_c"]) * clock / loss
    times = np.empty(m.shape)
    chosen = np.empty(m.shape, dtype=np.int64)
    tiles = tile_set(constants["tiles"], turned=turned)
    most = np.ones(m.shape)  # parts that K may be split into
    if tiles.split and bool(constants.get("split", True)):
        unfilled = b * np.ceil(m / 128.0) * np.ceil(n / 128.0) < 2.0 * rates.sms
        most = np.where(unfilled, np.maximum(k / 256.0, 1.0), 1.0)
    scratch = np.empty((5, len(tiles.tm) * min(_BLOCK, len(m))))
    for count, (split, more) in enumerate(pairwise((*_ALL, np.inf)), start=1):
        index = np.flatnonzero((most >= split) & (most < more))
        for start in range(0, len(index), _BLOCK):
            part = index[start : start + _BLOCK]
            columns = (b[part], m[part], n[part], k[part], bytes_moved[part], rate[part])
            times[part], chosen[part] = _best(
                columns, tiles, _ALL[:count], rates.sms, bandwidth, constants, scratch
            )
    times = np.maximum(times, flops / rates.peak)
    which, tile = np.divmod(chosen, len(tiles.tm))
    return GemmTimes(
        seconds=_called(times, (b, m, k), bandwidth, constants),
        tm=tiles.tm[tile, 0].astype(np.int64),
        tn=tiles.tn[tile, 0].astype(np.int64),
        split=np.array(_ALL, dtype=np.int64)[which],
    )


def has_no_sides(constants: Mapping[str, Any]) -> bool:
    """Returns whether only tiles tell a product from its transpose: no cast, no rule for rows."""
    sided = ("cast_bytes", "row_ns", "host_odd_us")
    if any(constants.get(name) for name in sided):
        return False
    return constants["form"] == "roofline" or tile_set(constants["tiles"]).bounds is None


def _called(
    times: Array, sizes: tuple[Array, Array, Array], bandwidth: float, constants: Mapping[str, Any]
) -> Array:
    """Returns the time of calls: floor, cast and kernel, at least what the host needs for one."""
    b, m, k = sizes
    seconds = float(constants["t0_us"]) * 1e-6 + times
    cast_bytes, row_ns, always_us, odd_us = (
        float(constants.get(name, 0.0))
        for name in ("cast_bytes", "row_ns", "host_us", "host_odd_us")
    )
    if cast_bytes or row_ns:
        seconds = seconds + b * m * np.maximum(cast_bytes / bandwidth * k, row_ns * 1e-9)
    if not always_us and not odd_us:
        return seconds
    host = (np.where(m % 4.0 == 0.0, 0.0, odd_us) + always_us) * 1e-6
    high = np.maximum(seconds, host)
    ratio = np.minimum(seconds, host) / high
    return high * (1.0 + 0.25 * ratio**4)


def _best(
    columns: tuple[Array, ...],
    tiles: TileSet,
    splits: Sequence[int],
    sms: int,
    bandwidth: float,
    constants: Mapping[str, Any],
    scratch: Array,
) -> tuple[Array, Rows]:
    """Returns the soft minimum over splits and tiles, and which is the best of all of them.

    The time of large tables goes here: operations are in place, in five rows of `scratch`, which
    spares the allocation of memory for each.
    """
    b, m, n, k, moved, rate = columns
    shape = (len(tiles.tm), len(m))
    grid, waves, compute, memory, high = (x[: shape[0] * shape[1]].reshape(shape) for x in scratch)
    idle = _grid(tiles, (m, n, k), float(constants.get("ragged", 0.0)), grid)
    grid *= b / sms
    reuse = 4096.0 * float(constants["c"])
    # FLOP of a wave over the rate of its tile; the share of 256 x 256 tiles is one
    per_k = 2.0 * (tiles.tm * tiles.tn + reuse) * sms * (_REFERENCE / (_REFERENCE + reuse))
    q, k0 = float(constants["q"]), float(constants["k0"])
    times = np.empty((len(splits), *shape))
    for split, time in zip(splits, times, strict=True):
        np.multiply(grid, split, out=waves)
        np.ceil(waves, out=compute)
        compute *= q
        compute += np.multiply(waves, 1.0 - q, out=memory)
        np.maximum(compute, 1.0, out=compute)
        compute *= per_k
        compute *= (k / split + k0) / rate
        extra = 8.0 * split * float(constants["beta"]) * b * m * n if split > 1 else 0.0
        waves *= 2.0
        np.sqrt(np.minimum(waves, 1.0, out=waves), out=waves)
        np.divide((moved + extra) / bandwidth, waves, out=memory)
        np.maximum(compute, memory, out=high)
        np.minimum(compute, memory, out=time)
        time /= high
        time *= time
        time *= time
        time *= 0.25
        time += 1.0
        time *= high
        if split > 1:
            time += float(constants["sigma_us"]) * 1e-6
        if idle is not None:
            time[idle] = np.inf
    return _soft_minimum(times, tiles.ways)


def _soft_minimum(times: Array, ways: Sequence[slice]) -> tuple[Array, Rows]:
    """Returns the soft minimum over splits and tiles; `times` do not survive."""
    flat = times.reshape(-1, times.shape[-1])
    best = np.argmin(flat, axis=0)
    least = flat[best, np.arange(flat.shape[1])]
    flat = np.divide(least, flat, out=flat)
    for _ in range(_SOFT):
        flat *= flat
    near = times.sum(axis=0) if len(times) > 1 else times[0]
    # the way with more good candidates is the faster one
    total = np.maximum.reduce([near[way].sum(axis=0) for way in ways]) / 3.0
    for _ in range(_SOFT):
        total = np.sqrt(total)
    return least / total, best


def _grid(
    tiles: TileSet, sizes: tuple[Array, Array, Array], ragged: float, grid: Array
) -> NDArray[np.bool_] | None:
    """Fills in the tiles of each product; returns where a rule does not use a tile (or None)."""
    m, n, _ = sizes
    np.ceil(np.divide(n, tiles.tn * tiles.cluster_n, out=grid), out=grid)
    rows = m / (tiles.tm * tiles.cluster_m)
    whole = np.ceil(rows)
    if tiles.bounds is None:
        grid *= whole
        return None
    grid *= whole + ragged * (whole > rows)
    grid *= tiles.cluster_m * tiles.cluster_n
    idle = np.zeros(rows.shape, dtype=bool)
    for size, (low, high) in zip(sizes, tiles.bounds.values(), strict=True):
        idle |= (size < low) | (size >= high)
    return idle
