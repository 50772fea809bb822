"""What runs that failed say about memory: out of memory, or a crash that may have been one.

FAILED(oom) did not fit. FAILED(oom/crash) is taken as "did not fit" unless a run that needs at
least as much memory worked: equal model, device and software, and in no respect smaller. Only what
the rows state is compared, never a prediction.
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
        row.sharding,
        row.offload,
        row.optimizer,
    )


def _demands(row: Row) -> tuple[float, ...]:
    """Numbers that each raise the need for memory, everything else being equal."""
    pp, steps = row.pp or 1, row.ga_steps or 1
    stage = _stage(row)
    return (
        row.mbs or 1,
        -(row.tp or 1),
        -pp,
        -(row.cp or 1),
        -(row.dp or 1) if stage else 0,
        -stage,
        0 if row.sp.lower() == "yes" else 1,
        min(pp, steps) / pp,  # share of the model's activations in flight on the first stage
        min(steps, 2),  # accumulation keeps gradients
    )


def _stage(row: Row) -> int:
    return int(row.zero_stage[0]) if row.zero_stage[:1].isdigit() else 0


def _at_least(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
