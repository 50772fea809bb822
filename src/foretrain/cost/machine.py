"""What the compute providers need to know: the device, the stack, and how to count bytes."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from foretrain.cost.calibration import load
from foretrain.hardware.device import Device
from foretrain.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device that runs the kernels of a stack.

    `warm` prices kernels as they run within a step: the activation operand of a GEMM is partly
    resident in L2, and the clock is the one that the power limit leaves after seconds of load.
    Operator tables are measured cold and in short bursts.
    """

    device: Device
    stack: Stack
    warm: bool = True

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s for a compute dtype: the dense peak, derated on power-limited parts.

        A dtype that the device has no units for runs at the rate of the next wider one.
        """
        peaks = self.device.peak_flops
        share = _derate(self.device.name)
        for name in _WIDER.get(dtype, (dtype, "fp32")):
            if peaks.get(name, 0.0) > 0.0:
                return share * float(peaks[name])
        return share * max((float(value) for value in peaks.values()), default=1.0)

    def sustained(self, dtype: str) -> float:
        """Returns the share of a burst's FLOP/s that matrix units keep in a step (gemm.toml).

        1 for isolated kernels, and for devices and dtypes without a measurement of both.
        """
        if not self.warm:
            return 1.0
        name = self.device.name.lower()
        for entry in load("gemm")["sustained"]:
            if dtype in entry["dtypes"] and any(fnmatchcase(name, x) for x in entry["devices"]):
                return float(entry["share"])
        return 1.0

    def supports(self, dtype: str) -> bool:
        """Returns whether the device has its own rate for `dtype`."""
        return self.device.peak_flops.get(_OWN.get(dtype, dtype), 0.0) > 0.0


def _derate(name: str) -> float:
    """Returns the share of the printed peak that the device's power limit allows (gemm.toml)."""
    for entry in load("gemm")["derate"]:
        if any(fnmatchcase(name.lower(), pattern) for pattern in entry["devices"]):
            return float(entry["share"])
    return 1.0


_OWN = {"mxfp8": "fp8", "fp8_block": "fp8"}
_WIDER: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "fp8_block": ("fp8", "bf16", "fp16", "fp32"),
    "mxfp8": ("fp8", "bf16", "fp16", "fp32"),
    "nvfp4": ("nvfp4", "fp8", "bf16", "fp16", "fp32"),
    "fp32": ("fp32", "tf32", "bf16"),
}
