"""Lever: one change of a run and what it would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change and its effect.

    `changes` holds run-file paths and values as `--set` takes them; empty for a what-if that is
    no setting (another clock, another link). `gain` is the gain in throughput: 0.05 = 5 % more.
    Where it does not fit afterwards, a device or its node lacks `missing_after_bytes`.
    """

    title: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gain: float
    step_before_s: float
    step_after_s: float
    memory_before_bytes: float
    memory_after_bytes: float
    fits_before: bool
    fits_after: bool
    missing_after_bytes: float = 0.0
