"""Convolution events, priced by the algorithms of convolution_kernels.py.

    T = t0 + min(direct, Winograd) + T_layout;   a weight gradient at most limit x forward

T_layout: tensor cores want channels last; in a step with channels first the maps are transposed
before and after. A depthwise convolution is memory-bound.
Constants: catalog/calibration/convolution.toml and convolution_fitted.toml by device and dtype; a
device without measured convolutions takes the constants of its GEMM, times the factors of the
first file. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.compute import gemm
from foretrain.cost.compute.convolution_kernels import (
    Images,
    direct,
    filled,
    least_seconds,
    narrow,
    winograd,
    without_units,
)
from foretrain.cost.compute.features import convolution_features
from foretrain.cost.compute.gemm_tiles import Rates
from foretrain.cost.compute.memory_bound import constants_for as memory_constants
from foretrain.cost.machine import Machine
from foretrain.cost.residual import Beyond, nothing_beyond, residual_of, said
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

Array = NDArray[np.float64]
PARTS = ("backward_input", "backward_weight")  # of the direction "backward"
#: FLOP from which a convolution is of size class 0, else 1.
BIG = 5e9
#: Channels per group up to which no GEMM kernel is used.
DEPTHWISE_CHANNELS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the algorithms of a dtype need; `vector`: the same without tensor cores."""

    rates: Rates
    constants: Mapping[str, Any]
    size: float
    vector: Kernels | None = None


def conv_seconds(x: Images, direction: str, kernels: Kernels) -> tuple[Array, NDArray[np.str_]]:
    """Returns the seconds beyond the kernel floor, and the names of the algorithms."""
    rates, constants, size = kernels.rates, kernels.constants, kernels.size
    name = np.full(x.n.shape, "implicit GEMM", dtype="U24")
    if kernels.vector is None:
        best = direct(x, direction, rates, constants, size)
        other, word = winograd(x, direction, rates, constants), "Winograd"
    else:
        vector, word = kernels.vector, "without tensor cores"
        whole, barred = filled(x), without_units(x, direction, constants)
        odd = (whole.flops > x.flops) | barred
        if constants.get("forced"):  # the caller fills the channels and names the algorithm
            x, odd = whole, barred
        best, other = np.full((2, *odd.shape), np.inf)
        units = ~barred
        best[units] = direct(whole.part(units), direction, rates, constants, size)
        least = least_seconds(x, direction, vector.rates, vector.constants)
        odd &= least < best  # the others cannot win
        other[odd] = direct(x.part(odd), direction, vector.rates, vector.constants, size)
    name[other < best] = word
    best = np.minimum(best, other)
    other = narrow(x, rates.peak, constants)
    name[other < best] = "few channels"
    best = np.minimum(best, other)
    limit = float(constants.get("weight_limit", np.inf))
    if direction == "backward_weight" and np.isfinite(limit):
        least = 0.0 if kernels.vector is None else x.flops / rates.peak  # Winograd beats the peak
        above = best > limit * least
        best[above] = np.minimum(
            best[above], limit * conv_seconds(x.part(above), "forward", kernels)[0]
        )
    return best, name


def kernels_for(machine: Machine, dtype: str) -> tuple[Kernels, Constants]:
    """Returns the kernels of a dtype on a device, and where their constants come from."""
    found, constants = constants_for(machine, dtype)
    vector = None if dtype == "fp32" else kernels_for(machine, "fp32")[0]
    kernels = Kernels(
        rates=Rates(
            peak=machine.peak(dtype),
            bandwidth=machine.device.memory_bandwidth,
            sms=machine.device.sm_count,
        ),
        constants=constants,
        size=dtype_bytes(dtype),
        vector=vector,
    )
    return kernels, found


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `conv2d` events.

    Shape: n c h w k r s stride padding groups, and oh ow where the paddings differ.
    """
    parts = [
        (i, part)
        for i, event in enumerate(events)
        for part in (PARTS if event.direction == "backward" else (event.direction,))
    ]
    groups: dict[tuple[str, str], list[int]] = {}
    for i, part in parts:
        groups.setdefault((events[i].dtype, part), []).append(i)
    answers: dict[int, list[Answer]] = {}
    for (dtype, part), indices in groups.items():
        priced = _price([events[i] for i in indices], dtype, part, machine)
        for i, answer in zip(indices, priced, strict=True):
            answers.setdefault(i, []).append(answer)
    return [_sum(answers[i]) for i in range(len(events))]


def _sum(parts: Sequence[Answer]) -> Answer:
    first = parts[0]
    if len(parts) == 1:
        return first
    return Answer(
        value_s=sum(part.value_s for part in parts),
        latency_s=sum(part.latency_s for part in parts),
        kernels=sum(part.kernels for part in parts),
        factor=first.factor,
        family=first.family,
        provenance=first.provenance,
        formula="; ".join(part.formula for part in parts),
    )


def images(events: Sequence[ComputeEvent]) -> Images:
    """Returns the arrays of convolution events."""
    shapes = [dict(event.shape) for event in events]
    names = dict.fromkeys(name for shape in shapes for name in shape)
    columns = {
        name: np.array([s.get(name, _USUAL.get(name, 1.0)) for s in shapes]) for name in names
    }
    return images_of(columns, (len(events),))


_USUAL = {"padding": 0.0, "oh": 0.0, "ow": 0.0}


def images_of(columns: Mapping[str, Array], length: tuple[int, ...]) -> Images:
    """Returns convolutions from columns n c h w k r s stride padding groups, oh ow."""

    def column(name: str) -> Array:
        usual = np.full(length, _USUAL.get(name, 1.0))
        return columns.get(name, usual).astype(np.float64)

    n, c, h, w, k, r, s = (column(name) for name in "nchwkrs")
    stride, padding = np.maximum(1.0, column("stride")), column("padding")
    groups = np.maximum(1.0, column("groups"))
    oh, ow = (
        np.where(given > 0, given, np.maximum(1.0, (size + 2 * padding - taps) // stride + 1))
        for given, size, taps in ((column("oh"), h, r), (column("ow"), w, s))
    )
    return Images(
        n=n, c=c / groups, h=h, w=w, k=k / groups, r=r, s=s, stride=stride, groups=groups,
        oh=oh, ow=ow,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolved:
    """Times of convolutions of one dtype and direction, and their algorithms.

    `beyond`: what the residual of the entry made of the formula's seconds.
    """

    seconds: Array
    names: NDArray[np.str_]
    layout: Array
    floor: float
    beyond: Array
    factor: Array
    found: Constants


def column_times(x: Images, dtype: str, direction: str, machine: Machine) -> Convolved:
    """Returns the times of convolutions."""
    kernels, found = kernels_for(machine, dtype)
    rules = load("convolution")["rules"]
    body, names = conv_seconds(x, direction, kernels)
    layout = layout_seconds(x, dtype, machine)
    depthwise = (x.groups > 1.0) & (x.c <= DEPTHWISE_CHANNELS)
    if depthwise.any():
        body = np.where(depthwise, _depthwise(x, direction, dtype, machine, rules), body)
        names = np.where(depthwise, "depthwise", names)
        layout = np.where(depthwise, 0.0, layout)
    floor = float(kernels.constants["t0_us"]) * 1e-6
    factor = width(found.row, "conv")
    if found.row in ("measured", "fitted"):  # of rows left out of the fit
        factor = float(found.values.get("band", factor))
    kernel_s = floor + body
    beyond = measured_beyond(x, direction, found, machine, dtype)
    kernel_s = kernel_s * beyond.factor
    return Convolved(
        seconds=kernel_s + layout,
        names=names,
        layout=layout,
        floor=floor,
        beyond=beyond.factor,
        factor=beyond.band(np.where(x.flops > BIG, 0, 1), factor),
        found=found,
    )


def measured_beyond(
    x: Images, direction: str, found: Constants, machine: Machine, dtype: str
) -> Beyond:
    """Returns what a table of measurements says of kernels beyond `conv_seconds`."""
    residual = residual_of("conv", found, machine.device, dtype)
    if residual is None:
        return nothing_beyond(x.n)
    features = convolution_features(x, direction, machine.device.sm_count)
    sizes = {name: getattr(x, name) for name in residual.bounds}
    return residual.beyond(features, sizes)


def _price(
    events: Sequence[ComputeEvent], dtype: str, direction: str, machine: Machine
) -> list[Answer]:
    x = images(events)
    times = column_times(x, dtype, direction, machine)
    flops = x.flops
    share = flops / (times.seconds - times.floor) / machine.peak(dtype)
    return [
        Answer(
            value_s=float(times.seconds[i]),
            latency_s=min(times.floor, float(times.seconds[i])),
            factor=float(times.factor[i]),
            kernels=3.0 if times.layout[i] > 0.0 else 1.0,
            family="conv",
            provenance=times.found.provenance,
            formula=f"conv2d {times.names[i]}: {flops[i] / 1e9:.3g} GFLOP "
            f"at {share[i]:.2f} of the peak{said(float(times.beyond[i]))}",
        )
        for i in range(len(events))
    ]


def kind_of(dtype: str) -> str:
    """Returns the kind of units that a dtype runs on, which constants belong to."""
    return "fp32" if dtype == "fp32" else "tensor"


def constants_for(machine: Machine, dtype: str) -> tuple[Constants, Mapping[str, Any]]:
    """Returns the fitted constants, or those of the GEMM times the factors of a generation."""
    kind = kind_of(dtype)
    kernel = machine.stack.gemm_kernel.lower()
    fitted = [entry for entry in load("convolution_fitted")["entry"] if entry["kind"] == kind]
    plain = [entry for entry in fitted if "kernels" not in entry]
    named = [
        entry
        for entry in fitted
        if any(fnmatchcase(kernel, pattern) for pattern in entry.get("kernels", ()))
    ]
    found = find((*named, *plain), machine.device)
    if found is not None and found.row != "other":
        return found, found.values
    table = load("convolution")
    found = find(table["entry"], machine.device)
    if found is None:
        raise InternalError("convolution.toml has no default entry")
    product = dict(gemm.constants_for(machine, dtype).values)
    rules = table["rules"]
    product["e_c"] = float(product["e_c"]) / found.number("implicit" if kind == "fp32" else kind)
    product["non_fused"] = float(product["e_c"]) * rules["non_fused"]
    same = ("fused", "transform", "stride_power", "weight_limit")
    product |= {name: rules[name] for name in same}
    product |= {name: rules[f"{name}_{kind}"] for name in ("input", "weight")}
    return found, product


def call_seconds(machine: Machine, dtype: str) -> float | None:
    """Returns the host's mean time until the launch of the calls that an entry was fitted to.

    None of an entry that was fitted to kernels. Its collection grew slower with every call.
    """
    values = constants_for(machine, dtype)[1]
    if "call_us" not in values:
        return None
    return 1e-6 * (float(values["call_us"]) + 0.5 * float(values["slower_us"]))


def layout_seconds(x: Images, dtype: str, machine: Machine) -> Array:
    """Returns the time to transpose the maps around a tensor-core kernel with channels first.

    A table of kernels holds none of it (`Machine.warm` is off).
    """
    if dtype in ("fp32", "tf32") or machine.stack.channels_last or not machine.warm:
        return np.zeros(x.n.shape)
    share = memory_constants(machine).number("e_d")
    return 2.0 * dtype_bytes(dtype) * x.maps / (machine.device.memory_bandwidth * share)


def _depthwise(
    x: Images, direction: str, dtype: str, machine: Machine, rules: Mapping[str, float]
) -> Array:
    weight = direction == "backward_weight"
    share = rules["depthwise_weight" if weight else "depthwise_forward"]
    moved = dtype_bytes(dtype) * x.maps
    return np.maximum(
        moved / (machine.device.memory_bandwidth * share),
        x.flops / machine.peak("fp32") / rules["depthwise_compute"],
    )
