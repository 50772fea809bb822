"""Experts as one grouped GEMM: the tile model over the local experts, weights read once.

R rows reach the busiest rank for A of its experts (routing.py), the width is I = ffn / tp, g = 2
gated, 1 plain:

    T = t0 + expert_us E/ep + GEMM(A, R/A, g I, H) + GEMM(A, R/A, H, I)             b, m, n, k
        + [permute] (row_bytes R + token_bytes tokens topk + input_bytes tokens) H / (B e_b)

GEMM is the tile model of gemm_tiles.py without its floor: short groups of rows fill tiles badly,
and every expert's weights are read. The last line gathers rows and combines them; kernels of a
rank of an expert-parallel group go over the choices of all tokens (token_bytes), or all tokens once
(input_bytes: casts), not only over those of their own experts. `permute` 0: other operators do
that.

Backward does the same twice. Constants: catalog/calibration/moe_fitted.toml (written by
studies/costs/moe.py) and moe.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.compute.features import expert_features
from foretrain.cost.compute.gemm import dtype_of, price_by_dtype
from foretrain.cost.compute.gemm_tiles import Rates, gemm_seconds
from foretrain.cost.compute.routing import busiest_ranks
from foretrain.cost.machine import Machine
from foretrain.cost.residual import Beyond, nothing_beyond, residual_of, said
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

Array = NDArray[np.float64]
#: Shape values and what holds where a row leaves them out.
SHAPE = {
    "tokens": 1.0, "hidden": 1.0, "ffn": 1.0, "experts": 1.0, "topk": 1.0, "ep": 1.0, "tp": 1.0,
    "gated": 1.0, "distribution": 0.0, "load": 1.0, "permute": 0.0,
}  # fmt: skip
#: Tokens from which experts have many rows: size class 0, else 1.
MANY = 1024.0
#: What the tile model wants beside the constants of an entry: no split of K, a usual clock.
_TILE = {
    "form": "tile",
    "tiles": "basic",
    "t0_us": 0.0,
    "split": False,
    "clock_ms": 1.0,
}


def constants_for(machine: Machine, dtype: str) -> Constants:
    """Returns the constants of a device, dtype and kernel; a named kernel goes first."""
    kernel = machine.stack.gemm_kernel.lower()
    entries: list[Mapping[str, Any]] = [
        entry
        for table in ("moe_fitted", "moe")
        for entry in load(table)["entry"]
        if dtype in entry["dtypes"]
        and (
            "kernels" not in entry
            or any(fnmatchcase(kernel, pattern.lower()) for pattern in entry["kernels"])
        )
    ]
    entries.sort(key=lambda entry: ("calibrated" not in entry, "kernels" not in entry))
    found = find(entries, machine.device)
    if found is None:
        raise InternalError(f"no constants of grouped GEMMs for dtype {dtype!r}")
    return found


def columns_of(shapes: Sequence[Mapping[str, float]]) -> dict[str, Array]:
    """Returns shapes as columns, with `rows` and `active` of the busiest rank."""
    return with_busiest(
        {
            name: np.array([shape.get(name, usual) for shape in shapes], dtype=np.float64)
            for name, usual in SHAPE.items()
        }
    )


def with_busiest(given: Mapping[str, Array]) -> dict[str, Array]:
    """Returns columns of one length with those of SHAPE that they lack, `rows` and `active`."""
    like = next(iter(given.values()))
    columns = {
        name: np.asarray(given.get(name, np.full(like.shape, usual)), dtype=np.float64)
        for name, usual in SHAPE.items()
    }
    for name in ("ep", "tp", "experts", "topk", "load", "tokens"):
        columns[name] = np.maximum(columns[name], 1.0)
    rows, active = busiest_ranks(
        *(columns[name] for name in ("experts", "ep", "tokens", "topk", "distribution"))
    )
    return {**columns, "rows": rows * columns["load"], "active": active}


def column_seconds(
    columns: Mapping[str, Array], dtype: str, machine: Machine, constants: Mapping[str, Any]
) -> Array:
    """Returns the forward seconds of grouped GEMMs given as columns (`columns_of`)."""
    rows, active, hidden = columns["rows"], columns["active"], columns["hidden"]
    width_local = columns["ffn"] / columns["tp"]
    wide = np.where(columns["gated"] > 0, 2.0, 1.0) * width_local
    bandwidth = machine.device.memory_bandwidth
    kernel_dtype = dtype_of(dtype, machine)
    rates = Rates(
        peak=machine.peak(kernel_dtype),
        bandwidth=bandwidth,
        sms=machine.device.sm_count,
    )
    tile = {**constants, **_TILE}
    size = min(dtype_bytes(dtype), 4.0)
    total = np.zeros(rows.shape)
    for n, k in ((wide, hidden), (hidden, width_local)):
        moved = size * active * n * k + rows * (size * k + max(size, 2.0) * n)
        shape = {"b": active, "m": np.maximum(1.0, rows / active), "n": n, "k": k}
        total += gemm_seconds(
            shape,
            rates=rates,
            constants=tile,
            bytes_moved=moved,
            penalty=1.0 / machine.sustained(kernel_dtype),
        ).seconds
    moved = float(constants["row_bytes"]) * rows
    moved = moved + float(constants["token_bytes"]) * columns["tokens"] * columns["topk"]
    moved = moved + float(constants.get("input_bytes", 0.0)) * columns["tokens"]
    gather = columns["permute"] * moved * hidden / (bandwidth * float(constants["e_b"]))
    local = np.maximum(1.0, columns["experts"] / columns["ep"])
    floor = float(constants["t0_us"]) + float(constants["expert_us"]) * local
    return floor * 1e-6 + total + gather


def measured_beyond(
    columns: Mapping[str, Array], found: Constants, machine: Machine, dtype: str
) -> Beyond:
    """Returns what a table of measurements says of experts beyond `column_seconds`."""
    residual = residual_of("moe", found, machine.device, dtype)
    if residual is None:
        return nothing_beyond(columns["rows"])
    return residual.beyond(expert_features(columns, machine.device.sm_count), columns)


def bands(found: Constants, columns: Mapping[str, Array], beyond: Beyond) -> Array:
    """Returns the interval factors: its residual's, the entry's own, or by intervals.toml."""
    classes = np.where(columns["tokens"] >= MANY, 0, 1)
    if found.row in ("measured", "fitted") and "band" in found.values:
        own = np.array(found.values["band"])[classes]
    else:
        own = width(found.row, "moe")
    return beyond.band(classes, own)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `moe_gemm` events (shape tokens hidden ffn experts topk ep tp gated).

    `load` is the busiest rank's share over the mean (1 when absent); `distribution` the exponent of
    a power law of expert loads, 0 balanced; `permute` 1 counts gather and combination of rows.
    """
    return price_by_dtype(events, machine, _price_dtype)


def _price_dtype(events: Sequence[ComputeEvent], dtype: str, machine: Machine) -> list[Answer]:
    kernel_dtype = dtype_of(dtype, machine)
    found = constants_for(machine, kernel_dtype)
    columns = columns_of([dict(event.shape) for event in events])
    beyond = measured_beyond(columns, found, machine, kernel_dtype)
    seconds = beyond.factor * column_seconds(columns, dtype, machine, found.values)
    t0 = found.number("t0_us") * 1e-6
    factor = bands(found, columns, beyond)
    provenance = found.provenance if kernel_dtype == dtype else "guess"
    answers: list[Answer] = []
    for i, event in enumerate(events):
        passes = 2.0 if event.direction == "backward" else 1.0
        rows, active = columns["rows"][i], columns["active"][i]
        answers.append(
            Answer(
                value_s=passes * float(seconds[i]),
                latency_s=passes * min(t0, float(seconds[i])),
                factor=float(factor[i]),
                kernels=2.0 * passes,
                family="moe",
                provenance=provenance,
                formula=(
                    f"grouped GEMM: {rows:.0f} rows of {active:.0f} experts in tiles, "
                    f"e_c {found.number('e_c'):g}, k0 {found.number('k0'):g}, "
                    f"e_b {found.number('e_b'):g}, t0 {t0 * 1e6:g} us"
                    f"{said(float(beyond.factor[i]))}"
                ),
            )
        )
    return answers
