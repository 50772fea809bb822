"""Batch words: which of global batch, micro-batch and accumulation are given, and the rest.

global_batch = microbatch x dp x accumulation: samples per optimizer step over all ranks; a
micro-batch counts the samples of one data-parallel rank and micro-step.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The settled words, and a line for each that was derived."""

    global_batch: int
    microbatch: int
    assumptions: tuple[str, ...] = ()


def settle_batch(
    global_batch: int | None,
    microbatch: int | None,
    accumulation: int | None,
    *,
    dp: int,
    pp: int,
    problems: list[Problem],
) -> Batch:
    """Returns the batch words; those that are absent are derived.

    microbatch absent: global_batch / (dp x accumulation) when accumulation is given, else
    global_batch / dp without pipeline stages, 1 with them. global_batch absent: microbatch x dp x
    accumulation (1 when absent too). Words that contradict each other are added to `problems`.
    """
    lines: list[str] = []
    if microbatch is None:
        microbatch = _microbatch(global_batch, accumulation, dp=dp, pp=pp, lines=lines)
    if global_batch is None:
        steps = accumulation or 1
        global_batch = microbatch * dp * steps
        how = f"microbatch x dp = {microbatch} x {dp}"
        how += f" x accumulation {steps}" if accumulation else ""
        lines.append(f"global_batch = {global_batch} ({how})")
    elif accumulation is not None and microbatch * dp * accumulation != global_batch:
        problems.append(
            Problem(
                what=f"microbatch {microbatch} x dp {dp} x accumulation {accumulation} = "
                f"{microbatch * dp * accumulation}, but global_batch is {global_batch}",
                where="training.accumulation",
                value=accumulation,
                way_out="give two of global_batch, microbatch and accumulation",
            )
        )
    elif accumulation is None and global_batch % (microbatch * dp) == 0:
        steps = global_batch // (microbatch * dp)
        lines.append(
            f"accumulation = {steps} (global_batch / (microbatch x dp) = "
            f"{global_batch} / ({microbatch} x {dp}))"
        )
    return Batch(global_batch=global_batch, microbatch=microbatch, assumptions=tuple(lines))


def _microbatch(
    global_batch: int | None, accumulation: int | None, *, dp: int, pp: int, lines: list[str]
) -> int:
    if global_batch is None:
        lines.append("microbatch = 1 (not given)")
        return 1
    if accumulation is None and pp > 1:
        lines.append("microbatch = 1 (not given, with pipeline stages)")
        return 1
    # a remainder shows up when the words are checked against each other
    size = max(global_batch // (dp * (accumulation or 1)), 1)
    how = "global_batch / dp" if accumulation is None else "global_batch / (dp x accumulation)"
    lines.append(f"microbatch = {size} ({how})")
    return size
