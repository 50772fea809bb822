"""Interleaved 1F1B: every rank holds several chunks; the bubble shrinks by their number."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.compiler.schedule.slots import Slot


def interleaved(
    stage: int, pp: int, microbatches: int, chunks: int, in_flight: Sequence[int] | None
) -> list[Slot]:
    """Returns the slots of one stage; m must be divisible by p.

    Micro-batches go through the chunks in groups of p. Warm-up is 2 (p - s - 1) + (v - 1) p
    forwards; the bubble is (p - 1) / (v m) of the ideal time.
    """
    total = microbatches * chunks
    del in_flight  # refused by strategy/checks.py: the warm-up of the stages is tied together
    warmup = min(total, 2 * (pp - stage - 1) + (chunks - 1) * pp)

    def slot(phase: str, k: int) -> Slot:
        group, inside = divmod(k, pp * chunks)
        chunk, offset = divmod(inside, pp)
        if phase == "B":
            chunk = chunks - 1 - chunk
        return Slot("F" if phase == "F" else "B", group * pp + offset, chunk)

    slots = [slot("F", k) for k in range(warmup)]
    for k in range(total - warmup):
        slots += [slot("F", k + warmup), slot("B", k)]
    slots += [slot("B", k) for k in range(total - warmup, total)]
    return slots
