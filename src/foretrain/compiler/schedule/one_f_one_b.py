"""1F1B (PipeDream-flush, DAPPLE): one forward, one backward, with a bounded number in flight."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.compiler.schedule.slots import Slot


def one_f_one_b(
    stage: int, pp: int, microbatches: int, chunks: int, in_flight: Sequence[int] | None
) -> list[Slot]:
    """Returns warm-up forwards, alternating pairs, and cool-down backwards of one stage.

    Stage s holds min(m, p - s) micro-batches; a smaller `in_flight` limit saves memory at the cost
    of a larger bubble.
    """
    del chunks
    # a stage never gets more micro-batches than the stages before it let through
    bound = microbatches if in_flight is None else min(in_flight[: stage + 1])
    limit = min(microbatches, pp - stage, bound)
    slots = [Slot("F", m, 0) for m in range(limit)]
    for m in range(microbatches - limit):
        slots += [Slot("B", m, 0), Slot("F", m + limit, 0)]
    slots += [Slot("B", m, 0) for m in range(microbatches - limit, microbatches)]
    return slots
