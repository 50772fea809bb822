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

    `warm` counts the activation operand of a GEMM as partly resident in L2, as it is in a step;
    operator tables are measured cold.
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
