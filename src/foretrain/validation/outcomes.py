"""What becomes of one row: predicted, unsupported with a reason, or our own fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretrain.validation.rows import Row

Status = Literal["ok", "unsupported", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is compared with a measurement. Times in seconds, memory in bytes.

    The three memory figures are what PyTorch calls allocated and reserved, and what nvidia-smi
    shows of the device.
    """

    step_s: float
    low_s: float
    high_s: float
    allocated_bytes: float
    reserved_bytes: float
    device_used_bytes: float
    first_reserved_bytes: float  # of the first pipeline stage
    usable_bytes: float
    fits: bool
    microbatches: int  # per rank and step


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run is not predicted: a plan or option refused (unsupported), or our fault (error)."""

    status: Status
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row with its status. `prediction` is there when the status is ok."""

    row: Row
    status: Status
    reason: str | None = None
    assumed: tuple[str, ...] = ()
    prediction: Prediction | None = None
