"""The resolved run: what a run file means once names, aliases and defaults are settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretrain.frontends.spec import Model
from foretrain.graph.precision import Precision
from foretrain.hardware.cluster import Cluster
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Batch words, length, precision and optimizer of a run.

    `global_batch` counts samples per optimizer step over all ranks, `microbatch` samples per
    data-parallel rank and micro-step. `sequence` is None for images, `image` (pixels) for tokens.
    `target_sequence` is the decoder's length beside an encoder of `sequence` tokens, else None.
    """

    sequence: int | None
    global_batch: int
    microbatch: int
    precision: str
    roles: Precision
    optimizer: str = "adamw"  # see run/aliases.py
    image: int | None = None
    target_sequence: int | None = None
    table_optimizer: str = "sgd"  # of embedding tables whose rows backward updates

    @property
    def tokens(self) -> int | None:
        """Returns the tokens of a sample, those of both sequences; None for images."""
        if self.sequence is None:
            return None
        return self.sequence + (self.target_sequence or 0)

    def accumulation(self, dp: int) -> int:
        """Returns the number of micro-steps per optimizer step."""
        return self.global_batch // (self.microbatch * dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything `predict` needs; `source` is the run file as given, for echoing."""

    model: Model
    training: Training
    plan: Plan
    cluster: Cluster
    stack: Stack
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict[str, Any])
