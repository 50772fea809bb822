"""What runs that failed say about memory: out of memory, or a crash that may have been one.

FAILED(oom) did not fit. FAILED(oom/crash) is taken as "did not fit" unless it cannot be memory: the
plan is invalid (more stages than layers), or a run of the same model, device, software and pp
worked that has no larger tp and dp and no smaller micro-batch and in-flight count. Only what the
rows state is compared, never a prediction.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from foretrain.validation.outcomes import Outcome
from foretrain.validation.rows import Row


def fits_measured(outcomes: Sequence[Outcome], worked: Sequence[bool]) -> list[bool | None]:
    """Returns for each row whether the run fitted, None where nothing tells.

    `worked` says which rows have a measured time. A plan that is invalid tells nothing.
    """
    largest: dict[Hashable, list[tuple[float, ...]]] = {}
    for outcome, good in zip(outcomes, worked, strict=True):
        if good:
            largest.setdefault(_key(outcome.row), []).append(_demands(outcome.row))
    answers: list[bool | None] = []
    for outcome, good in zip(outcomes, worked, strict=True):
        task = outcome.row.task.lower()
        if good:
            answers.append(True)
        elif "failed(oom)" in task:
            answers.append(False)
        elif "failed(oom/crash)" in task and outcome.status == "ok":
            row = outcome.row
            known = largest.get(_key(row), [])
            crashed = any(_at_least(other, _demands(row)) for other in known)
            answers.append(None if crashed else False)
        else:
            answers.append(None)
    return answers


def _key(row: Row) -> Hashable:
    """What has to be equal for two runs to be compared by their demands."""
    return (
        row.family,
        row.model,
        row.n_layers,
        row.hidden,
        row.seq_len,
        row.precision,
        row.gpu_norm,
        row.gpu_mem_gb,
        row.framework,
        row.framework_version,
        row.recompute,
        row.offload,
        row.optimizer,
        row.pp or 1,
    )


def _demands(row: Row) -> tuple[float, ...]:
    """Numbers that each raise the need for memory, everything else being equal.

    The ZeRO stage is not among them: it divides states over the ranks of dp, and a run with no
    larger dp that worked had at most that many ranks to divide them over.
    """
    pp, steps = row.pp or 1, row.ga_steps or 1
    in_flight = min(pp, steps)
    return (row.mbs or 1, in_flight, -(row.tp or 1), -(row.cp or 1), -(row.dp or 1))


def _at_least(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
