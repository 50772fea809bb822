"""Convolution as an implicit GEMM, Winograd for 3x3 in fp32, memory-bound when depthwise.

    forward  M = n oh ow, N = k / groups, K = (c / groups) r s
    data     the same FLOP with the roles of c and k exchanged; weight: the same again
    T = t0 + max(F / (P e), D / (B e_d)),   e = e0 / (1 + a/C_in) / (1 + b/C_out)

Effective efficiencies above 1 are Winograd's: F counts the FLOP of the direct method. Constants:
catalog/calibration/convolution.toml. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretrain.cost.answer import Answer, width
from foretrain.cost.calibration import Constants, find, load
from foretrain.cost.machine import Machine
from foretrain.errors import InternalError
from foretrain.program import ComputeEvent
from foretrain.units import dtype_bytes


def price(events: Sequence[ComputeEvent], machine: Machine) -> list[Answer]:
    """Returns the time of `conv2d` events (shape n c h w k r s stride padding groups)."""
    table = load("convolution")
    found = find(table["entry"], machine.device)
    if found is None:
        raise InternalError("convolution.toml has no default entry")
    return [_price(event, machine, found, table["rules"]) for event in events]


def _price(
    event: ComputeEvent, machine: Machine, found: Constants, rules: Mapping[str, float]
) -> Answer:
    shape = dict(event.shape)
    n, c, h, w, k, r, s = (float(shape.get(name, 1.0)) for name in "nchwkrs")
    stride, padding = float(shape.get("stride", 1.0)), float(shape.get("padding", 0.0))
    groups = max(1.0, float(shape.get("groups", 1.0)))
    out = max(1.0, (h + 2 * padding - r) // stride + 1) * max(
        1.0, (w + 2 * padding - s) // stride + 1
    )
    out = float(shape["oh"] * shape["ow"]) if "oh" in shape else out  # paddings may differ
    flops = 2.0 * n * out * k * (c / groups) * r * s
    size = dtype_bytes(event.dtype)
    moved = size * (n * c * h * w + n * k * out + k * (c / groups) * r * s)
    passes = {"backward": 2.0}.get(event.direction, 1.0)
    penalty = 1.0 if event.direction == "forward" else rules["backward_penalty"]
    kind, e = _efficiency(
        event.dtype, (r, s, stride), (c / groups, k / groups), flops, found, rules
    )
    share = rules["e_d"]
    if groups > 1.0 and c / groups <= 4.0:
        weight = event.direction == "backward_weight"
        kind, e = "depthwise", 1.0
        share = rules["depthwise_weight" if weight else "depthwise_forward"]
    compute = flops / (machine.peak(event.dtype) * e)
    memory = moved / (machine.device.memory_bandwidth * share)
    t0 = found.number("t0_us") * 1e-6
    return Answer(
        value_s=passes * (t0 + penalty * max(compute, memory)),
        latency_s=passes * t0,
        factor=width(found.row, "conv"),
        kernels=passes,
        family="conv",
        provenance=found.provenance,
        formula=(
            f"conv2d {kind}: t0 + max(F/(P e), D/(B {share:g})), e {e:.2f}, "
            f"F {flops / 1e9:.3g} GFLOP"
        ),
    )


def _efficiency(
    dtype: str,
    kernel: tuple[float, float, float],
    channels: tuple[float, float],
    flops: float,
    found: Constants,
    rules: Mapping[str, float],
) -> tuple[str, float]:
    """Returns (algorithm, share of the peak)."""
    three = kernel[:2] == (3.0, 3.0)
    c_in, c_out = channels
    if dtype == "fp32":
        wide = min(channels) >= rules["winograd_channels"]
        if three and kernel[2] == 1.0 and wide:
            return "Winograd", found.number("winograd")
        kind, e = "implicit GEMM", found.number("fp32")
    elif three or kernel[:2] == (1.0, 1.0):
        large = flops > rules["large_gflop"] * 1e9
        kind, e = "tensor cores", found.number("tensor_large" if large else "tensor")
    else:
        kind, e = "tensor cores", found.number("other")
    return kind, e / (1.0 + rules["a"] / c_in) / (1.0 + rules["b"] / c_out)
