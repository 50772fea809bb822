"""Convolution as an implicit GEMM: the GEMM model on its three views, times what cuDNN adds.

    forward  b = groups, M = n oh ow, N = k / groups, K = (c / groups) r s
    data     M = n h w, N = c / groups, K = (k / groups) r s / stride
    weight   M = k / groups, N = (c / groups) r s, K = n oh ow
    T = f T_gemm(b, M, N, K) / g + T_layout

f is the device's factor over a plain GEMM, times that of the direction; g the gain of Winograd
(3x3, stride 1, fp32, enough channels). A strided data gradient computes zeros: half of them are
left out. T_layout: tensor cores want channels last; with channels first the maps are transposed
before and after. A depthwise convolution is memory-bound. Constants:
catalog/calibration/convolution.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.compute import gemm
from foretrain.cost.compute.memory_bound import constants_for
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes

PARTS = ("backward_input", "backward_weight")  # of the direction "backward"
#: Channels per group up to which no GEMM kernel is used.
DEPTHWISE_CHANNELS = 2.0
#: Groups that one product may join.
PACKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A convolution: channels c and k per group."""

    n: float
    c: float
    h: float
    w: float
    k: float
    r: float
    s: float
    stride: float
    groups: float
    out: float

    def views(self, direction: str) -> list[dict[str, float]]:
        """Returns the GEMMs that a direction may run as.

        Of groups with few channels, kernels compute several at once as one block-diagonal product:
        more FLOP, but whole tiles.
        """
        packs = [p for p in PACKS if self.groups % p == 0]
        return [self._view(direction, self.c * p, self.k * p, self.groups / p) for p in packs]

    def _view(self, direction: str, c: float, k: float, groups: float) -> dict[str, float]:
        taps = self.r * self.s
        views = {
            "forward": (self.n * self.out, k, c * taps),
            "backward_input": (self.n * self.h * self.w, c, k * taps / self.stride),
            "backward_weight": (k, c * taps, self.n * self.out),
        }
        m, n, depth = views[direction]
        return {"b": groups, "m": m, "n": n, "k": max(1.0, depth)}

    @property
    def flops(self) -> float:
        """Returns the FLOP of the direct method."""
        return 2.0 * self.n * self.out * self.groups * self.k * self.c * self.r * self.s

    @property
    def maps(self) -> float:
        """Returns the elements of input and output."""
        return self.n * self.groups * (self.c * self.h * self.w + self.k * self.out)


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `conv2d` events.

    Shape: n c h w k r s stride padding groups, and oh ow where the paddings differ.
    """
    table = load("convolution")
    found = find(table["entry"], machine.device)
    if found is None:
        raise InternalError("convolution.toml has no default entry")
    answers: list[Answer] = []
    for event in events:
        parts = PARTS if event.direction == "backward" else (event.direction,)
        single = [_price(replace(event, direction=part), machine, found, table["rules"])
                  for part in parts]  # fmt: skip
        answers.append(
            replace(
                single[0],
                value_s=sum(answer.value_s for answer in single),
                latency_s=sum(answer.latency_s for answer in single),
                kernels=sum(answer.kernels for answer in single),
            )
        )
    return answers


def _shape(event: ComputeEvent) -> _Shape:
    shape = dict(event.shape)
    n, c, h, w, k, r, s = (float(shape.get(name, 1.0)) for name in "nchwkrs")
    stride, padding = float(shape.get("stride", 1.0)), float(shape.get("padding", 0.0))
    groups = max(1.0, float(shape.get("groups", 1.0)))
    oh = float(shape.get("oh", max(1.0, (h + 2 * padding - r) // stride + 1)))
    ow = float(shape.get("ow", max(1.0, (w + 2 * padding - s) // stride + 1)))
    return _Shape(n, c / groups, h, w, k / groups, r, s, stride, groups, oh * ow)


def _price(
    event: ComputeEvent, machine: Machine, found: Constants, rules: Mapping[str, float]
) -> Answer:
    shape = _shape(event)
    kernels = 1.0
    if shape.groups > 1.0 and shape.c <= DEPTHWISE_CHANNELS:
        kind, body = "depthwise", _depthwise(event, shape, machine, rules)
        floor = found.number("t0_us") * 1e-6
    else:
        kind, body, floor = _product(event, shape, machine, found, rules)
        if event.direction == "backward_weight":  # other kernels where a GEMM has too few tiles
            forward = replace(event, direction="forward")
            _, limit, _ = _product(forward, shape, machine, found, rules)
            body = min(body, rules["weight_limit"] * limit)
        layout = _layout(event, shape, machine)
        kernels, body = (3.0, body + layout) if layout else (1.0, body)
    return Answer(
        value_s=floor + body,
        latency_s=floor,
        factor=width(found.row, "conv"),
        kernels=kernels,
        family="conv",
        provenance=found.provenance,
        formula=f"conv2d {kind}: {shape.flops / 1e9:.3g} GFLOP at "
        f"{shape.flops / body / machine.peak(event.dtype):.2f} of the peak",
    )


def _product(
    event: ComputeEvent,
    shape: _Shape,
    machine: Machine,
    found: Constants,
    rules: Mapping[str, float],
) -> tuple[str, float, float]:
    """Returns (algorithm, seconds beyond the floor, floor) of the GEMM of a direction."""
    kind, factor = _factor(event, shape, found, rules)
    products = gemm.price(
        [
            replace(event, op="gemm", shape=tuple(view.items()), flops=shape.flops)
            for view in shape.views(event.direction)
        ],
        machine,
    )
    product = min(products, key=lambda answer: answer.value_s)
    return kind, factor * (product.value_s - product.latency_s), product.latency_s


def _factor(
    event: ComputeEvent, shape: _Shape, found: Constants, rules: Mapping[str, float]
) -> tuple[str, float]:
    """Returns (algorithm, time over that of the GEMM)."""
    direction = event.direction.removeprefix("backward_")
    if event.dtype != "fp32":
        return "tensor cores", found.number("tensor") * rules[f"{direction}_tensor"]
    factor = found.number("implicit")
    wide = min(shape.c, shape.k) >= rules["winograd_channels"]
    if shape.r == shape.s == 3.0 and shape.stride == 1.0 and shape.groups == 1.0 and wide:
        return "Winograd", factor / found.number("winograd")
    return "implicit GEMM", factor * rules[direction]


def _layout(event: ComputeEvent, shape: _Shape, machine: Machine) -> float:
    """The time to transpose the maps around a tensor-core kernel with channels first."""
    if event.dtype in ("fp32", "tf32") or machine.stack.channels_last:
        return 0.0
    share = constants_for(machine).number("e_d")
    moved = 2.0 * dtype_bytes(event.dtype) * shape.maps
    return moved / (machine.device.memory_bandwidth * share)


def _depthwise(
    event: ComputeEvent, shape: _Shape, machine: Machine, rules: Mapping[str, float]
) -> float:
    weight = event.direction == "backward_weight"
    share = rules["depthwise_weight" if weight else "depthwise_forward"]
    moved = dtype_bytes(event.dtype) * shape.maps
    return max(
        moved / (machine.device.memory_bandwidth * share),
        shape.flops / machine.peak("fp32") / rules["depthwise_compute"],
    )
