"""One change of a run that is worth a prediction, and what changes are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.run.defaults import pad_vocabulary
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One change: the run with it, and closed-form bounds on what it could do.

    `kind` groups changes of the same knob. `saves_s` is the largest saving of step time that one
    can hope for (negative: a sure loss), `frees` the share of the device memory that it may free
    (negative: it needs more). Both only decide what is worth a prediction.
    """

    kind: str
    title: str
    run: RunSpec
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    saves_s: float
    frees: float = 0.0


def changed_plan(run: RunSpec, **changes: Any) -> RunSpec:
    """Returns the run with other plan fields; dp follows, stages and chunks stay even.

    The vocabulary is padded again, because its padding depends on tp. The expanded tree of a run
    belongs to the old plan, so runs that give one are not changed this way (see `levers`).
    """
    plan = replace(run.plan, **changes)
    dp, rest = divmod(run.cluster.world_size, plan.tp * plan.pp * plan.cp)
    plan = replace(plan, dp=dp if not rest and dp else run.plan.dp)
    model, _ = pad_vocabulary(run.model, plan)
    return replace(run, plan=plan, model=model)


def share(result: Result, *words: str) -> float:
    """Returns the share of the used memory in parts whose name holds one of `words`."""
    memory = result.memory
    held = sum(v for k, v in memory.parts_bytes.items() if any(word in k for word in words))
    return held / memory.device_used_bytes if memory.device_used_bytes else 0.0
