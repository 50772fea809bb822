"""GPipe: all forwards, then all backwards; every micro-batch is in flight at once."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.compiler.schedule.slots import Slot


def gpipe(
    stage: int, pp: int, microbatches: int, chunks: int, in_flight: Sequence[int] | None
) -> list[Slot]:
    """Returns m forwards and then m backwards in reverse order; chunks pass in model order.

    With equal stages and free communication the step takes (m + p - 1)(f + b).
    """
    del stage, pp, in_flight
    forwards = [Slot("F", m, c) for c in range(chunks) for m in range(microbatches)]
    backwards = [
        Slot("B", m, c) for c in reversed(range(chunks)) for m in reversed(range(microbatches))
    ]
    return forwards + backwards
