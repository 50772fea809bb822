"""Rows of recommendation models: model, stack, plan and training by the words of their sources."""

from __future__ import annotations

import re
from typing import Any

from foretrain.frontends.recsys_spec import is_rec_family
from foretrain.hardware import Device
from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.model_class import catalog_model
from foretrain.validation.rows import Row

#: Names of sources -> models of the catalog; the whole name has to match.
MODELS: tuple[tuple[str, str, str], ...] = (
    ("mlperf_training", r"dlrm", "dlrm-mlperf"),
    ("mlperf_training", r"dlrm[-_]dcnv2", "dlrm-dcnv2"),
    ("nvidia_deeplearningexamples", r"dlrm small", "dlrm-criteo-small"),
    ("nvidia_deeplearningexamples", r"dlrm large", "dlrm-criteo-large"),
    ("flagperf", r"dlrm", "dlrm-criteo-small"),
)


def is_recsys(row: Row) -> bool:
    """Returns whether the row is of the class of recommendation models."""
    return row.model_class == "recsys"


def map_rec_model(row: Row, assumed: Assumed) -> str:
    """Returns the catalog's name; Unsupported for another model."""
    name = row.model.strip().lower()
    for family, pattern, model in MODELS:
        if row.family == family and re.fullmatch(pattern, name):
            if family == "flagperf":
                assumed.add("tables: Criteo with frequency threshold 15 (not stated)")
            return model
    spec = catalog_model(name)
    if spec is not None and is_rec_family(spec.family):
        assumed.add(f"tables: those of the catalog's {spec.name}")
        return spec.name
    if "dlrm" in name:
        raise Unsupported("the tables of this DLRM are not stated")
    raise Unsupported("of recommender models only DLRM is modelled")


def map_rec_stack(row: Row, assumed: Assumed) -> str:
    """Returns the stack: HugeCTR for MLPerf, NVIDIA's code for PyTorch for the others."""
    if row.family != "mlperf_training":
        return "nvidia-dlrm"
    if not has_word(row.framework, "hugectr"):
        assumed.add("stack: hugectr, the implementation of MLPerf's submissions")
    return "hugectr"


def map_rec_precision(row: Row, device: Device, assumed: Assumed) -> str:
    """Returns the precision; MLPerf's submissions train in fp16."""
    text = row.precision.lower()
    if re.search(r"fp16|amp|half|mixed", text):
        return "fp16"
    if re.search(r"tf32|fp32|float32", text):
        return "tf32" if "tf32" in text and device.supports("tf32") else "fp32"
    if row.family == "mlperf_training" and not text:
        assumed.add("precision = fp16 (not stated; what MLPerf's submissions use)")
        return "fp16"
    raise Unsupported("the precision is not stated")


def map_rec_plan(row: Row, assumed: Assumed) -> dict[str, Any]:
    """Returns the plan: HugeCTR spreads large tables, NVIDIA's PyTorch code gives each a rank."""
    if (row.tp or 1) > 1 or (row.pp or 1) > 1:
        raise Unsupported("tensor or pipeline parallel recommenders are not modelled")
    if row.n_gpus == 1:
        return {"preset": "dlrm"}
    if row.family == "mlperf_training":
        assumed.add("tables: auto (the sharding of the submission is not stated)")
        return {"preset": "dlrm", "tables": "auto", "assignment": "greedy-both"}
    return {"preset": "dlrm", "tables": "table-wise", "assignment": "greedy-size"}


def map_rec_training(row: Row, model: str, precision: str, assumed: Assumed) -> dict[str, Any]:
    """Returns the training section; Unsupported without a batch size."""
    if not row.gbs and not row.mbs:
        raise Unsupported("neither global batch nor micro-batch is stated")
    optimizer = "adagrad" if model == "dlrm-dcnv2" else "sgd"
    if not row.optimizer:
        assumed.add(f"optimizer = {optimizer} (that of the benchmark)")
    section: dict[str, Any] = {
        "precision": precision, "optimizer": optimizer, "table_optimizer": optimizer,
    }  # fmt: skip
    if row.gbs:
        section["global_batch"] = row.gbs
    if row.mbs:
        section["microbatch"] = row.mbs
    return section
