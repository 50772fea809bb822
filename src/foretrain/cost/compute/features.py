"""What residuals (residual.py) ask of an operator: its sizes, how it fills the device.

Each function returns a table (features, rows). Order and meaning belong to the shipped trees: a
change here needs a new fit (studies/costs/residuals.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.compute.convolution_kernels import Images

Array = NDArray[np.float64]
#: Tiles whose waves a product is asked for.
TILES = ((128.0, 128.0), (256.0, 128.0), (128.0, 256.0), (64.0, 128.0))
#: Powers of two that divide a size count up to this one.
_DIVISOR = 256


def gemm_features(columns: Mapping[str, Array], sms: int) -> Array:
    """Returns the features of products b m n k on a device of `sms` SMs."""
    b, m, n, k = (columns[name] for name in "bmnk")
    logs = [np.log2(x) for x in (b, m, n, k)]
    work = logs[0] + logs[1] + logs[2] + logs[3]
    rows = [*logs, work, work - logs[0] - np.log2(m * n + n * k + k * m)]
    for tm, tn in TILES:
        down, across = np.ceil(m / tm), np.ceil(n / tn)
        waves = b * down * across / sms
        rows += [np.log2(waves), waves / np.ceil(waves) * m * n / (down * tm * across * tn)]
    rows += [_divisor(n), _divisor(k)]
    return np.stack(rows)


def expert_features(columns: Mapping[str, Array], sms: int) -> Array:
    """Returns the features of grouped GEMMs given by the columns of moe.py."""
    active, rows = columns["active"], columns["rows"]
    each = np.maximum(1.0, rows / active)
    width = columns["ffn"] / columns["tp"]
    names = ("tokens", "topk", "hidden", "experts", "ep", "tp")
    table = [np.log2(columns[name]) for name in names]
    table += [np.log2(x) for x in (width, active, rows, each)]
    table += [columns["distribution"], columns["gated"], np.log2(rows * columns["hidden"] * width)]
    for tile in (16.0, 64.0, 128.0):
        down = np.ceil(each / tile)
        waves = active * down * np.ceil(width / 128.0) / sms
        table += [np.log2(waves), waves / np.ceil(waves), each / (down * tile)]
    return np.stack(table)


def attention_features(shape: Mapping[str, Array], sms: int) -> Array:
    """Returns the features of fused attention."""
    names = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v")
    table = [np.log2(shape[name]) for name in names]
    heads, window = shape["batch"] * shape["heads"], shape["window"]
    seen = np.where(window > 0.0, np.minimum(window, shape["seq_kv"]), shape["seq_kv"])
    pairs = np.where(shape["causal"] > 0.0, seen - seen * seen / (2.0 * shape["seq_kv"]), seen)
    work = heads * shape["seq_q"] * pairs * (shape["head_dim"] + shape["head_dim_v"])
    table += [np.log2(1.0 + window), np.log2(heads), np.log2(seen / shape["seq_kv"]), np.log2(work)]
    table += [np.log2(shape["heads"] / shape["kv_heads"])]
    for tile in (64.0, 128.0, 256.0):
        waves = heads * np.ceil(shape["seq_q"] / tile) / sms
        table += [np.log2(waves), waves / np.ceil(waves)]
    return np.stack(table)


#: Number of a direction of a convolution among its features.
DIRECTIONS = ("forward", "backward_input", "backward_weight")


def convolution_features(x: Images, direction: str, sms: int) -> Array:
    """Returns the features of convolutions of one direction."""
    pixels, depth = x.n * x.oh * x.ow, x.c * x.r * x.s
    sizes = (x.n, x.c, x.h, x.k, x.r, x.s, x.stride, x.oh, pixels, depth, x.flops)
    table = [np.log2(size) for size in sizes]
    table += [np.full(x.n.shape, float(DIRECTIONS.index(direction)))]
    for tile in (64.0, 128.0):
        waves = np.ceil(pixels / tile) * np.ceil(x.k / tile) / sms
        table += [np.log2(waves), waves / np.ceil(waves)]
    table += [_divisor(x.c), _divisor(x.k)]
    return np.stack(table)


def _divisor(size: Array) -> Array:
    """Returns the largest power of two that divides whole sizes, up to `_DIVISOR`."""
    whole = np.maximum(size, 1.0).astype(np.int64)
    return np.minimum(whole & -whole, _DIVISOR).astype(np.float64)
