"""`calibrate ops`: a few constants of a device refitted to a table of measured operators.

For every kind of operator, dtype and, where the table names several, kernel: the constants that are
shipped for the device (or for its generation, or for any) are multiplied by factors. The factors
are fitted with priors of width WIDTHS around 1, so that what the rows say nothing about stays.
GEMMs of a device without constants of its own start from what families of devices have in common
(gemm_prior.toml) too, with priors as wide as these differ; the start that fits best is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer
from foretrain.cost.calibration import Constants, constants_of_user, load
from foretrain.cost.compute import attention, convolution, gemm, memory_bound, moe
from foretrain.cost.host import host_seconds
from foretrain.cost.machine import Machine
from foretrain.cost.model import provider
from foretrain.cost.operator_constants import TABLES
from foretrain.cost.residual import has_residual, key_of
from foretrain.errors import InputError, Problem
from foretrain.hardware.device import Device
from foretrain.hardware.names import find_device
from foretrain.program import ComputeEvent
from foretrain.validation.ops.fitting import fit_constants, fit_cost
from foretrain.validation.ops.predict import OpOutcome, called, prepared, stack_of, timed_alone
from foretrain.validation.ops.table import MeasuredOp

Array = NDArray[np.float64]
Widths = Mapping[str, float]

#: Constants that move, by kind of operator: the width of the prior of the logarithm of a factor.
WIDTHS: Mapping[str, Mapping[str, float]] = {
    "gemm": {"e_c": 0.3, "e_b": 0.2, "t0_us": 0.4, "k0": 0.4, "c": 0.4, "clock": 0.5},
    "moe_gemm": {
        "e_c": 0.4, "e_b": 0.2, "t0_us": 0.5, "k0": 0.5, "row_bytes": 0.5, "expert_us": 0.5,
    },
    "attention": {"e": 0.3, "e_b": 0.3, "t0_us": 0.4, "k0": 0.4, "g": 0.3},
    "conv2d": {
        "e_c": 0.4, "e_b": 0.2, "t0_us": 0.5, "k0": 0.4, "input": 0.3, "weight": 0.3, "fused": 0.2,
        "non_fused": 0.3, "transform": 0.3, "narrow": 0.7,
    },
    "memory": {"e_d": 0.2, "op": 0.2, "t0_us": 0.4, "row_ns": 0.4},
}  # fmt: skip
#: Shares of a peak: no factor takes them above this.
_MOST = {"e_c": 1.1, "e_b": 1.1, "e_d": 1.05, "op": 1.05, "e": 1.05, "clock": 0.6, "q": 1.0}
#: How much narrower the priors are of a kernel around what all kernels of its device show.
ALIKE = 0.3
#: Fewer rows than this say too little.
LEAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """One refitted entry: `before` and `after` are mean |predicted / measured - 1| of its rows."""

    kind: str
    dtype: str
    kernel: str
    rows: int
    before: float
    after: float
    changes: Mapping[str, tuple[float, float]]  # constant -> (old, new)
    entry: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What a table gave, and what of it was not used: reason -> number of rows."""

    device: Device
    refits: tuple[Refit, ...]
    unused: Mapping[str, int]


def calibrate_ops(items: Sequence[MeasuredOp], device_name: str, source: str) -> Calibrated:
    """Returns the refitted entries of one device.

    Args:
        items: the rows of a table; those of other devices are not used.
        device_name: the device, as a person types it.
        source: named in the entries, e.g. the file.

    Raises:
        CatalogError: the device is unknown.
        InputError: no kind of operator has enough rows of this device.
    """
    device = find_device(device_name)
    groups: dict[tuple[str, str, str], list[tuple[OpOutcome, float]]] = {}
    unused: dict[str, int] = {}
    for item in items:
        outcome = prepared(item.row)
        reason = _why_not(outcome, item.latency_us, device)
        if reason:
            unused[reason] = unused.get(reason, 0) + 1
            continue
        kind = kind_of(outcome.op)
        dtype = "" if kind == "memory" else outcome.events[0].dtype
        kernel = _kernel_of(kind, item.row.stack, dtype)
        key = (kind, dtype, kernel)
        groups.setdefault(key, []).append((outcome, (item.latency_us or 0.0) * 1e-6))
    refits: list[Refit] = []
    joint: dict[tuple[str, str], Mapping[str, Any]] = {}
    for key, rows in _with_joint(groups).items():
        if len(rows) < LEAST:
            reason = f"fewer than {LEAST} rows of {' '.join(word for word in key if word)}"
            unused[reason] = unused.get(reason, 0) + len(rows)
        else:
            refits.append(_refit(key, rows, device, source, joint.get(key[:2])))
            joint.setdefault(key[:2], refits[-1].entry)
    if not refits:
        reasons = "; ".join(f"{count} rows: {why}" for why, count in unused.items())
        raise InputError(
            Problem(
                what=f"nothing to calibrate: no kind of operator has {LEAST} usable rows",
                where=source,
                value=reasons or "no rows",
                way_out="give rows of this device, see docs/reference/operator-tables.md",
            )
        )
    return Calibrated(device=device, refits=tuple(refits), unused=unused)


def kind_of(op: str) -> str:
    """Returns the kind of constants that decide the time of an operator, "" if not calibrated."""
    if op in ("gemm", "moe_gemm", "attention", "conv2d"):
        return op
    return "memory" if provider(op) is memory_bound.price else ""


def _kernel_of(kind: str, stack: str, dtype: str) -> str:
    """Returns the kernel that a row's stack runs: of a stack of the catalog, or the name itself."""
    if kind == "memory":
        return ""
    known = stack_of(stack)[0]
    if kind == "attention":
        return known.attention_kernel
    return known.product_kernel(dtype) if kind == "gemm" else known.gemm_kernel


def _why_not(outcome: OpOutcome, latency_us: float | None, device: Device) -> str:
    if outcome.status != "ok":
        return outcome.reason or "not priced"
    if outcome.device != device.name:
        return f"of another device ({outcome.device})"
    if latency_us is None:
        return "no latency above zero"
    if not kind_of(outcome.op):
        return f"{outcome.op} is not calibrated"
    dtype = outcome.events[0].dtype
    machine = Machine(device=device, stack=stack_of("")[0], warm=False)
    if kind_of(outcome.op) in ("gemm", "moe_gemm") and gemm.dtype_of(dtype, machine) != dtype:
        return f"{device.name} has no units for {dtype}"
    return ""


def _with_joint(
    groups: Mapping[tuple[str, str, str], list[tuple[OpOutcome, float]]],
) -> dict[tuple[str, str, str], list[tuple[OpOutcome, float]]]:
    """Puts first, for GEMMs of several kernels, the rows of all: the entry of an unknown kernel.

    Where a table names one kernel, or another kind of operator, it holds for any stack.
    """
    result: dict[tuple[str, str, str], list[tuple[OpOutcome, float]]] = {}
    for kind, dtype in dict.fromkeys((kind, dtype) for kind, dtype, _ in groups):
        own = {key: rows for key, rows in groups.items() if key[:2] == (kind, dtype)}
        if kind == "attention":  # its kernels are families of their own
            result |= own
            continue
        result[kind, dtype, ""] = [row for rows in own.values() for row in rows]
        if len(own) > 1:
            result |= {key: rows for key, rows in own.items() if key[2]}
    return result


def _refit(
    key: tuple[str, str, str],
    rows: Sequence[tuple[OpOutcome, float]],
    device: Device,
    source: str,
    joint: Mapping[str, Any] | None,
) -> Refit:
    """Returns the refitted entry; `joint`: that of all kernels, of which this one is a part."""
    kind, dtype, kernel = key
    machine = Machine(device=device, stack=stack_of(kernel)[0], warm=False)
    base = _entry_of(kind, dtype, machine)
    entry = _named(base, key, device)
    widths = {name: w for name, w in WIDTHS[kind].items() if name in base.values}
    measured = np.array([seconds for _, seconds in rows])
    price = pricer([outcome for outcome, _ in rows], _machines(kind, rows, machine))

    def seconds(candidate: Mapping[str, Any]) -> Array:
        with constants_of_user({TABLES[kind]: [candidate]}):
            return price()

    starts = [(entry, widths)]
    if has_residual(key_of(base.values)):  # kept where the rows agree with the shipped table
        entry = {**entry, "residual": key_of(base.values)}
        starts.insert(0, (entry, widths))
    if kind == "gemm" and base.row not in ("measured", "fitted"):
        starts = [*starts, *usual_starts(entry, dtype)] if joint is None else [_near(joint, entry)]
    final = min((_fitted(*start, seconds, measured) for start in starts), key=lambda fit: fit[0])[1]
    before, after = (np.abs(seconds(x) / measured - 1.0) for x in (entry, final))
    band = float(np.exp(np.quantile(np.abs(np.log1p(after)), 0.9)))
    if kind in ("gemm", "moe_gemm", "conv2d"):
        # few rows have met the fit: the interval of unseen ones is wider
        wide = round(max(1.03, 1.0 + (band - 1.0) * (1.0 + 2.0 / len(rows) ** 0.5)), 3)
        final["band"] = {"gemm": [wide] * 3, "moe_gemm": [wide] * 2}.get(kind, wide)
    final["source"] = f"calibrate ops {source}: {len(rows)} rows, mean error {after.mean():.1%}"
    return Refit(
        kind=kind,
        dtype=dtype,
        kernel=kernel,
        rows=len(rows),
        before=float(before.mean()),
        after=float(after.mean()),
        changes={
            name: (float(entry[name]), float(final[name]))
            for name in widths
            if isinstance(entry[name], int | float) and name in final
        },
        entry=final,
    )


def _named(base: Constants, key: tuple[str, str, str], device: Device) -> dict[str, Any]:
    """Returns the constants of `base` as an entry of one device, dtype and kernel."""
    kind, dtype, kernel = key
    entry = {name: value for name, value in base.values.items() if name not in _DROP}
    entry |= {"devices": [device.name], "mark": "fitted", "calibrated": True}
    if "dtypes" in entry:
        entry["dtypes"] = [d for d in base.values["dtypes"] if _same_units(d, dtype)]
    if kind == "conv2d":
        entry |= {"kind": convolution.kind_of(dtype)}
        entry.pop("dtypes", None)
    if kernel and kind in ("gemm", "moe_gemm", "conv2d"):
        entry["kernels"] = [kernel.lower()]
    return entry


def _machines(
    kind: str, rows: Sequence[tuple[OpOutcome, float]], machine: Machine
) -> list[Machine]:
    """Returns a machine per row: memory-bound rows are priced with the kernels that each names."""
    if kind != "memory":
        return [machine] * len(rows)
    names = [outcome.row.stack for outcome, _ in rows]
    known = {name: replace(machine, stack=stack_of(name)[0]) for name in set(names)}
    return [known[name] for name in names]


def _fitted(
    entry: Mapping[str, Any],
    widths: Mapping[str, float],
    seconds: Callable[[Mapping[str, Any]], Array],
    measured: Array,
) -> tuple[float, dict[str, Any]]:
    """Returns the cost and the constants of a fit that starts from an entry."""

    def scaled(factors: Array) -> dict[str, Any]:
        return _scaled(entry, dict(zip(widths, factors, strict=True)))

    def model(factors: Array) -> Array:
        return seconds(scaled(factors))

    start, width = np.ones(len(widths)), np.array(list(widths.values()))
    factors = fit_constants(model, measured, start, width)
    return fit_cost(model, measured, factors, start, width), scaled(factors)


def usual_starts(entry: Mapping[str, Any], dtype: str) -> list[tuple[dict[str, Any], Widths]]:
    """Returns what GEMM constants usually are, and how much they differ among device families.

    One start per set of tiles (gemm_prior.toml), named like `entry`; none for other dtypes.
    """
    return [
        (
            {**_names(entry), "form": "tile", "tiles": prior["tiles"], **prior["start"]},
            prior["width"],
        )
        for prior in load("gemm_prior")["prior"]
        if dtype in prior["dtypes"]
    ]


def _near(joint: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[dict[str, Any], Widths]:
    """Returns the start of one of several kernels: what all have in common, as they are alike."""
    values = {name: value for name, value in joint.items() if name not in _DROP}
    widths = {name: ALIKE * w for name, w in WIDTHS["gemm"].items() if name in values}
    return {**values, **_names(entry)}, widths


def _names(entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("devices", "dtypes", "kernels", "mark", "calibrated")
    return {key: entry[key] for key in keys if key in entry}


_DROP = ("generations", "forms", "kernels", "band", "source", "names")


def _entry_of(kind: str, dtype: str, machine: Machine) -> Constants:
    """Returns the constants that the cost model uses before the calibration."""
    if kind == "gemm":
        return gemm.constants_for(machine, gemm.dtype_of(dtype, machine))
    if kind == "moe_gemm":
        return moe.constants_for(machine, gemm.dtype_of(dtype, machine))
    if kind == "attention":
        found, kernel = attention.constants_for(machine)
        return replace(found, values={**found.values, "kernel": kernel})
    if kind == "conv2d":
        found, values = convolution.constants_for(machine, dtype)
        return replace(found, values=values)
    return memory_bound.constants_for(machine)


_UNITS = ({"bf16", "fp16"}, {"fp8", "mxfp8"}, {"fp8_block"}, {"nvfp4"}, {"fp32"}, {"tf32"})


def _same_units(one: str, other: str) -> bool:
    """Whether two dtypes run on the same units at the same rate: one stands for the other."""
    return any(one in units and other in units for units in _UNITS)


def _scaled(entry: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    """Returns an entry with constants multiplied, in its sub-tables (cases) too."""
    result: dict[str, Any] = {}
    for name, value in entry.items():
        if name in factors:
            result[name] = _times(value, factors[name], _MOST.get(name, np.inf))
        elif isinstance(value, Mapping) and name not in WIDTHS["memory"]:
            result[name] = _scaled(cast("Mapping[str, Any]", value), factors)
        else:
            result[name] = value
    return result


def _times(value: Any, factor: float, most: float) -> Any:
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, Any]", value).items()
        return {key: _times(item, factor, most) for key, item in pairs}
    return float(f"{min(float(value) * factor, max(most, float(value))):.5g}")


def pricer(outcomes: Sequence[OpOutcome], machines: Sequence[Machine]) -> Callable[[], Array]:
    """Returns a function that prices the rows with the constants of the moment, in seconds.

    `machines`: one per row.
    """
    events = [event for outcome in outcomes for event in outcome.events]
    counts = [len(outcome.events) for outcome in outcomes]
    owner = [i for i, count in enumerate(counts) for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
    groups: dict[tuple[Callable[..., list[Answer]], str], list[int]] = {}
    for i, event in enumerate(events):
        key = (provider(event.op), outcomes[owner[i]].row.stack)
        groups.setdefault(key, []).append(i)

    def price() -> Array:
        seconds, host = np.empty(len(events)), np.empty(len(events))
        for (function, _), indices in groups.items():
            chosen: list[ComputeEvent] = [events[i] for i in indices]
            machine = machines[owner[indices[0]]]
            answers = function(chosen, machine)
            seconds[indices] = [answer.value_s for answer in answers]
            host[indices] = [
                host_seconds(event, answer.kernels, machine.stack)
                for event, answer in zip(chosen, answers, strict=True)
            ]
        whole, launch = np.add.reduceat(seconds, starts), np.add.reduceat(host, starts)
        host, alone, _ = called(outcomes, launch)
        return timed_alone(whole, host, alone)

    return price
