"""Pipeline schedules: the order in which a stage runs the forwards and backwards of its chunks.

Each schedule is one function in one file: (stage, pp, microbatches, chunks, in_flight) -> slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretrain.compiler.schedule.gpipe import gpipe
from foretrain.compiler.schedule.interleaved import interleaved
from foretrain.compiler.schedule.one_f_one_b import one_f_one_b
from foretrain.compiler.schedule.slots import Slot

SCHEDULES: dict[str, Callable[[int, int, int, int, Sequence[int] | None], list[Slot]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}

__all__ = ["SCHEDULES", "Slot"]
