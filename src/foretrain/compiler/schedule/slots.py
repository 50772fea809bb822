"""The unit of a pipeline schedule."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Slot(NamedTuple):
    """One forward (F) or backward (B) of one chunk for one micro-batch."""

    phase: Literal["F", "B"]
    microbatch: int
    chunk: int
