"""The resolved run as a run file: every name settled, every default written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, cast

from foretrain.frontends.spec import ConvSpec, Model, RecSpec, Table
from foretrain.run.spec import RunSpec, Training
from foretrain.strategy.plan import Overlap, Plan, Recompute


def run_form(run: RunSpec) -> dict[str, Any]:
    """Returns a run file (JSON values only) that reads back to the same run.

    The model is written as an inline mapping with its whole shape, the batch words and all
    degrees are the resolved ones, precision lists the dtype of every role. Plan keys that are
    absent mean the same as their absence in a run file; values equal to the defaults of `Plan`
    are left out, except the degrees, which are always written.
    """
    return {
        "model": _model(run.model),
        "training": _training(run.training, run.model),
        "plan": _plan(run.plan),
        "cluster": run.cluster.text,
        "stack": run.stack.name,
    }


#: Fields of a ModelSpec that say something about the shape instead of being part of it.
ABOUT = ("source", "num_parameters", "assumed", "vocab_unpadded")


def _model(model: Model) -> dict[str, Any]:
    """The whole shape; where it comes from and what was assumed is not part of it."""
    form = {
        name: value
        for name, value in asdict(model).items()
        if value is not None and name not in ABOUT
    }
    if isinstance(model, ConvSpec):
        form["depths"] = list(model.depths)
        return {key: value for key, value in form.items() if value != []}
    if isinstance(model, RecSpec):
        form |= {"bottom": list(model.bottom), "top": list(model.top)}
        return form | {"tables": [_table(table) for table in model.tables]}
    return form | {"vocab": model.vocab_unpadded or model.vocab}


def _table(table: Table) -> dict[str, Any]:
    """A table without what it has by default; how its rows are read is part of it."""
    form: dict[str, Any] = {
        field.name: getattr(table, field.name)
        for field in fields(Table)
        if field.default is MISSING or getattr(table, field.name) != field.default
    }
    if table.reuse:
        form["reuse"] = [list(pair) for pair in table.reuse]
    return form


def _training(training: Training, model: Model) -> dict[str, Any]:
    roles = asdict(training.roles)
    form: dict[str, Any] = {
        "global_batch": training.global_batch,
        "microbatch": training.microbatch,
        "precision": {
            role: dtype or "none"
            for role, dtype in roles.items()
            if dtype or role != "second_moment"  # without a word it is as the first
        },
        "optimizer": training.optimizer,
    }
    if training.sequence is not None:
        form["sequence"] = training.sequence
    if training.target_sequence is not None:
        form["target_sequence"] = training.target_sequence
    if training.image is not None:
        form["image"] = training.image
    if isinstance(model, RecSpec):
        form["table_optimizer"] = training.table_optimizer
    return form


#: Always written, so that a reader of the JSON need not know the defaults of a preset.
ALWAYS = ("preset", "tp", "pp", "dp", "cp", "ep", "etp", "zero", "sequence_parallel", "recompute")


def _plan(plan: Plan) -> dict[str, Any]:
    default = Plan()
    form: dict[str, Any] = {}
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if value is not None and (field.name in ALWAYS or value != getattr(default, field.name)):
            form[field.name] = _plain(value)
    if plan.pp == 1:
        form.pop("schedule", None)  # it has no effect, and saying so would be a warning
    return form


def _plain(value: Any) -> Any:
    """Returns a plan value as JSON values: tuples as lists, parts as mappings without None."""
    if isinstance(value, (Recompute, Overlap)):
        settings = {name: item for name, item in asdict(value).items() if item not in (None, ())}
        return {name: _plain(item) for name, item in settings.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        return {key: _plain(item) for key, item in mapping.items()}
    return value
