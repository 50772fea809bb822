"""Keys of a plan that a run states and that cannot act on it: said instead of ignored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from foretrain.frontends.spec import Model, RecSpec
from foretrain.strategy.plan import Plan
from foretrain.strategy.tables import table_ways


def idle_keys(
    given: Collection[str], plan: Plan, model: Model, *, dp: int, steps: int
) -> list[str]:
    """Returns a warning for each key of `given` that changes nothing on these ranks.

    `table_optimizer` of the training section counts among them. The plan is settled; `dp` ranks are
    data-parallel, a step has `steps` micro-batches. A word that says what holds anyway
    (`overlap: true`) is no mistake and not named.
    """
    if plan.tree is not None:
        return []
    data, zero = dp * plan.cp, plan.zero or 0
    sizes = {"pp": plan.pp, "dp": dp, "cp": plan.cp, "tp": plan.tp}
    sizes |= {"dp_shard": dp, "dp_replicate": dp}  # an upper bound
    alone = "one rank holds each weight, gradients are not sent"
    reasons: dict[str, str] = {}
    if sum(sizes[axis] > 1 for axis in ("pp", "dp", "cp", "tp")) <= 1:
        reasons["order"] = "at most one axis has several ranks"
    reasons |= _tables(plan, model, data)
    if data == 1:
        reasons["bucket_mib"] = alone
        reasons |= {"zero": alone} if zero == 1 else {}
    elif zero >= 2 and not plan.no_sync:
        reasons["bucket_mib"] = "sharded gradients are reduced layer by layer"
    if plan.no_sync is False and (steps == 1 or data == 1):
        reasons["no_sync"] = "the step has one micro-batch" if steps == 1 else alone
    homes = {"table_optimizer": "training"}
    lines = [
        f"{homes.get(key, 'plan')}.{key} has no effect: {why}"
        for key, why in reasons.items()
        if key in given
    ]
    return [*lines, *_idle_overlaps(plan, model, data), *_idle_overrides(plan, sizes)]


def _tables(plan: Plan, model: Model, data: int) -> dict[str, str]:
    """Why keys of embedding tables do not act."""
    if not isinstance(model, RecSpec):
        return {"assignment": f"{model.name} has no embedding tables"}
    ways = set(table_ways(plan, model.tables, data).values())
    reasons = {"tables": "one rank holds every table"} if data == 1 else {}
    if data == 1 or "table-wise" not in ways:
        reasons["assignment"] = reasons.get("tables", "no table is table-wise")
    if ways == {"data-parallel"}:
        reasons["table_optimizer"] = "tables of all ranks are updated by training.optimizer"
    return reasons


def _idle_overlaps(plan: Plan, model: Model, data: int) -> Iterator[str]:
    """Warnings for what is set apart from the others, and has no communication to hide."""
    stated = plan.overlap
    if len({stated.grad, stated.param, stated.tp, stated.p2p, stated.tables}) == 1:
        return  # one word for all of them, or none
    idle = {
        "grad": (data == 1, "one rank holds each weight"),
        "param": (data == 1 or not plan.zero, "no weights are gathered"),
        "tp": (plan.tp == 1, "tp is 1"),
        "p2p": (plan.pp == 1, "pp is 1"),
        "tables": (not isinstance(model, RecSpec), f"{model.name} has no embedding tables"),
    }
    for name, (nothing, why) in idle.items():
        if nothing and getattr(stated, name) is not None:
            yield f"plan.overlap.{name} has no effect: {why}"


def _idle_overrides(plan: Plan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Warnings for nodes that only split over axes of one rank."""
    for pattern, settings in plan.overrides.items():
        splits = [settings[key] for key in ("computation", "memory") if key in settings]
        axes = {axis for split in splits for axis in _words(split)}
        if dict(settings).keys() == {"reshard"} and (plan.zero or 0) < 3:
            yield f"plan.overrides[{pattern!r}] has no effect: the plan gathers no weights"
        if axes and len(splits) == len(settings) and all(sizes.get(a, 2) == 1 for a in axes):
            names = ", ".join(sorted(axes))
            yield f"plan.overrides[{pattern!r}] has no effect: one rank along {names}"


def _words(value: Any) -> Iterator[str]:
    """The axes that a split names, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from _words(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _words(item)
