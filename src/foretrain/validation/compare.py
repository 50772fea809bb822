"""Putting prediction and measurement side by side, one Comparison per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.units import GIB
from foretrain.validation.failed_runs import fits_measured
from foretrain.validation.outcomes import Outcome
from foretrain.validation.rows import Measured, Row

#: Units of samples_per_s that count samples of a batch.
SAMPLE_UNITS = ("image", "sequence", "sample", "item", "user")
GB_IN_GIB = 1e9 / GIB
GB_WORDS = ("memory in gb", "memory printed in gb", "ram in gb", "(gb as printed)")
#: Below this share of the peak, rows of this family are glitches of the cluster (its README).
LOW_MFU = {"ultrascale_playbook": 5.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row. `counted` is False for rows that are shown but enter no statistics but their own."""

    outcome: Outcome
    measured_s: float | None
    measured_gib: float | None
    predicted_gib: float | None
    fits_measured: bool | None
    counted: bool = True
    memory_quantity: str = "allocated"  # what the source prints

    @property
    def row(self) -> Row:
        """Returns what was run."""
        return self.outcome.row

    @property
    def time_ratio(self) -> float | None:
        """Returns predicted over measured step time, None without both."""
        prediction = self.outcome.prediction
        if prediction is None or self.measured_s is None:
            return None
        return prediction.step_s / self.measured_s

    @property
    def memory_ratio(self) -> float | None:
        """Returns predicted over measured peak memory, None without both."""
        if self.predicted_gib is None or self.measured_gib is None:
            return None
        return self.predicted_gib / self.measured_gib

    @property
    def in_band(self) -> bool | None:
        """Returns whether the measured time lies in the 90 % interval, None without both."""
        prediction = self.outcome.prediction
        if prediction is None or self.measured_s is None:
            return None
        return prediction.low_s <= self.measured_s <= prediction.high_s


def compare(outcomes: Sequence[Outcome], measured: Sequence[Measured]) -> list[Comparison]:
    """Returns one comparison per row, in order."""
    steps = [measured_step(o.row, m) for o, m in zip(outcomes, measured, strict=True)]
    worked = [step is not None for step in steps]
    fits = fits_measured(outcomes, worked)
    return [
        Comparison(
            outcome=outcome,
            measured_s=step,
            measured_gib=_memory_gib(outcome.row, m),
            predicted_gib=_predicted_gib(outcome, m),
            fits_measured=fit,
            counted=not _low_mfu(outcome.row, m),
            memory_quantity=memory_quantity(outcome.row, m),
        )
        for outcome, m, step, fit in zip(outcomes, measured, steps, fits, strict=True)
    ]


def measured_step(row: Row, measured: Measured) -> float | None:
    """Returns the measured seconds per optimizer step, None when the row states none.

    iter_time_s (times the accumulation where the notes say that it is a micro-iteration), else
    gbs x seq / tokens_per_s, else gbs / samples_per_s where the unit counts samples.
    """
    if measured.iter_time_s is not None:
        return measured.iter_time_s * _micro_iterations(row)
    if not row.gbs:
        return None
    if measured.tokens_per_s is not None and row.seq_len:
        return row.gbs * row.seq_len / measured.tokens_per_s
    unit = measured.samples_unit.lower()
    if measured.samples_per_s is not None and unit.rstrip("s") in SAMPLE_UNITS:
        return row.gbs / measured.samples_per_s
    return None


def _micro_iterations(row: Row) -> int:
    notes = row.notes.lower()
    if "micro-batch" not in notes and "micro-iteration" not in notes:
        return 1
    if "iteration = one micro" not in notes and "micro-iteration" not in notes:
        return 1
    return row.ga_steps or 1


def _low_mfu(row: Row, measured: Measured) -> bool:
    limit = LOW_MFU.get(row.family)
    return limit is not None and measured.mfu_pct is not None and measured.mfu_pct < limit


def _memory_gib(row: Row, measured: Measured) -> float | None:
    """The measured memory; None where the notes say that it was modelled.

    Sources that print GB say so in the notes. Two of them count GiB all the same: nvidia-smi, and
    nanotron, whose rows that differ in the ZeRO stage alone settle it (docs/explain/memory.md).
    """
    if measured.peak_mem_gib is None or row.notes.startswith("MODELLED"):
        return None
    notes = row.notes.lower()
    binary = memory_quantity(row, measured) == "used" or row.framework == "nanotron"
    in_gb = not binary and any(word in notes for word in GB_WORDS)
    return measured.peak_mem_gib * (GB_IN_GIB if in_gb else 1.0)


def memory_quantity(row: Row, measured: Measured) -> str:
    """Returns which memory figure a source prints: used, reserved or allocated.

    torchtitan prints what the allocator holds. nanotron prints it, too (in some of its rows a
    larger micro-batch has a smaller figure, which live bytes cannot), and that of the first
    pipeline stage (with one micro-batch per step the logits of the last stage are not in it).
    """
    if "nvidia-smi" in f"{row.notes} {measured.measured_how}".lower():
        return "used"
    words = row.framework.lower().split()
    if words and words[0] == "paddle":  # its harness reads the device
        return "used"
    if words and words[0] == "nanotron":
        return "first reserved"
    return "reserved" if words and words[0] == "torchtitan" else "allocated"


def _predicted_gib(outcome: Outcome, measured: Measured) -> float | None:
    """The predicted memory of the kind that the source prints."""
    prediction = outcome.prediction
    if prediction is None:
        return None
    values = {
        "used": prediction.device_used_bytes,
        "reserved": prediction.reserved_bytes,
        "first reserved": prediction.first_reserved_bytes,
        "allocated": prediction.allocated_bytes,
    }
    return values[memory_quantity(outcome.row, measured)] / GIB
