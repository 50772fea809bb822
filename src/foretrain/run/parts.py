"""The three parts of a run that are names, files or mappings: model, cluster and stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from foretrain.errors import CatalogError, InputError, PlanError, Problem, nearest
from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.families import check_value
from foretrain.frontends.spec import ConvSpec, Model, ModelSpec
from foretrain.hardware.catalog import resolve_cluster
from foretrain.hardware.cluster import Cluster
from foretrain.run.fields import Fields
from foretrain.run.stacks import load_stack
from foretrain.run.values import Section
from foretrain.stack import Stack

#: What may be changed on a model given by name, without touching its other dims.
CHANGEABLE = ("layers", "vocab", "ffn", "max_positions", "window", "masked", "image")
CONV_CHANGEABLE = ("classes",)
STACKS_CHANGEABLE = ("layers", "decoder_layers", "vocab", "ffn", "max_positions")


def read_model(fields: Fields, folder: Path | None) -> Model | None:
    """Returns the model of a run, None (with problems) when absent or wrong."""
    value = _given(fields, "model", "a catalog name, a config.json or a mapping", "llama-3-8b")
    if value is None:
        return None
    try:
        model = resolve_model(value, folder=_folder(fields, "model", folder))
    except InputError as error:
        fields.refuse(error.problems, type(error))
        return None
    return _changed(fields, model)


def _changed(fields: Fields, model: Model) -> Model:
    section = Section(path="model", values=fields.model_changes, problems=fields.problems)
    changeable = CONV_CHANGEABLE if isinstance(model, ConvSpec) else ()
    if isinstance(model, ModelSpec):
        changeable = STACKS_CHANGEABLE if model.decoder_layers else CHANGEABLE
    changes: dict[str, int] = {}
    for key, value in fields.model_changes.items():
        if key not in changeable:
            way_out = nearest(key, changeable) or "give the model as a mapping"
            what = "cannot be changed on a model given by name"
            section.refuse(key, what, value, ", ".join(changeable) or "nothing", way_out)
            continue
        number = section.integer(key)
        if number is None:
            continue
        _, allowed = check_value(key, number)
        if allowed:
            section.refuse(key, "out of range", value, allowed)
        else:
            changes[key] = number
    if not changes:
        return model
    # the published parameter count belongs to the unchanged model
    return replace(model, num_parameters=None, **cast("Any", changes))


def read_cluster(fields: Fields, folder: Path | None) -> Cluster | None:
    """Returns the cluster of a run, None (with problems) when absent or wrong."""
    value = _given(fields, "cluster", "a cluster, a catalog name or a file", "1x8 h100-sxm")
    if value is None:
        return None
    try:
        beside = _folder(fields, "cluster", folder)
        return resolve_cluster(_file_beside(value, beside), folder=beside)
    except InputError as error:
        fields.refuse(error.problems, type(error))
        return None


def read_stack(fields: Fields, folder: Path | None) -> Stack | None:
    """Returns the stack of a run, None when absent or (with problems) wrong."""
    value = fields.values.get("stack")
    if value is None:
        return None
    if not isinstance(value, str):
        problem = Problem(what="must be a stack's name or file", where="stack", value=value)
        fields.refuse([problem], CatalogError)
        return None
    try:
        return load_stack(_file_beside(value, _folder(fields, "stack", folder)))
    except InputError as error:
        fields.refuse(error.problems, type(error))
        return None


def _given(fields: Fields, key: str, allowed: str, example: str) -> Any:
    """The value of a required field when it is a text or a mapping."""
    value = fields.values.get(key)
    if value is None:
        way_out = f"e.g. {key}: {example}"
        problem = Problem(what=f"{key} is missing", allowed=allowed, way_out=way_out)
        fields.refuse([problem], PlanError)
        return None
    if (isinstance(value, str) and value.strip()) or isinstance(value, Mapping | Path):
        return cast("Any", value)
    problem = Problem(what="not understood", where=key, value=value, allowed=allowed)
    fields.refuse([problem], CatalogError)
    return None


def _folder(fields: Fields, key: str, folder: Path | None) -> Path | None:
    """The folder of the run file, for paths in it; flags are relative to where one stands."""
    return None if fields.place(key).startswith("--") else folder


def _file_beside(value: Any, folder: Path | None) -> Any:
    """A file name relative to the run file, where such a file exists."""
    if folder is None or not isinstance(value, str) or not value.endswith(".toml"):
        return value
    path = folder / value
    try:
        return str(path) if path.is_file() else value
    except OSError:  # too long for a file name
        return value
