"""The JSON form of a prediction, schema 1 (docs/reference/json.md). Names are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

from foretrain.errors import InternalError, Problem
from foretrain.report.run_form import run_form
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import ClassResult, MemoryResult, Result, TimeParts
from foretrain.units import GIB

SCHEMA = 1
AXES = ("tp", "cp", "ep", "pp", "dp", "copy")

#: Parts may miss the step by this share through rounding; the gap is then booked as `other`.
ROUNDING = 1e-6


def to_json(result: Result, run: RunSpec) -> dict[str, Any]:
    """Returns the prediction as JSON values (dict, list, str, int, float, bool, None).

    Times in seconds, memory in GiB, `mfu`, `hfu`, `bubble_fraction` and `provenance` as
    fractions; `low` and `high` bound the 90 % interval. `time_parts_s` sums to
    `step_time_s.value`, `memory.parts_gib` to `memory.device_used_gib`. `ranks` holds one entry
    per rank class; its `ranks` is always the full sorted list of rank numbers. `run` is a run
    file that reads back to the same run. `tokens_per_s` is null without tokens.

    Raises:
        InternalError: a number is not finite, or the parts do not sum to the step.
    """
    step = result.step_time_s
    form: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run_form(run),
        "step_time_s": {"value": step.value, "low": step.low, "high": step.high},
        "samples_per_s": result.samples_per_s,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "model_flops_per_step": result.model_flops_per_step,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "fits": result.fits,
        "bubble_fraction": result.bubble_fraction,
        "memory": _memory(result.memory),
        "time_parts_s": _time_parts(result.time_parts, step.value),
        "ranks": [_rank_class(rank_class) for rank_class in result.classes],
        "provenance": dict(result.provenance),
        "assumptions": list(result.assumptions),
        "warnings": list(result.warnings),
    }
    problems = _not_finite(form, "")
    if problems:
        raise InternalError(problems)
    return form


def _memory(memory: MemoryResult) -> dict[str, Any]:
    return {
        "capacity_gib": memory.capacity_bytes / GIB,
        "usable_gib": memory.usable_bytes / GIB,
        "peak_allocated_gib": memory.peak_allocated_bytes / GIB,
        "peak_reserved_gib": memory.peak_reserved_bytes / GIB,
        "device_used_gib": memory.device_used_bytes / GIB,
        "device_used_low_gib": memory.device_used_bytes / memory.band / GIB,
        "device_used_high_gib": memory.device_used_bytes * memory.band / GIB,
        "worst_rank": memory.worst_rank,
        "moment": memory.moment,
        "parts_gib": {name: value / GIB for name, value in memory.parts_bytes.items()},
        "host_used_gib": memory.host_used_bytes / GIB,
    }


def _time_parts(parts: TimeParts, step: float) -> dict[str, Any]:
    gap = step - parts.total
    if abs(gap) > ROUNDING * abs(step):
        raise InternalError(
            Problem(
                what=f"the time parts sum to {parts.total!r} s, the step takes {step!r} s",
                where="time_parts_s",
            )
        )
    # the rounding of the sum goes where it leaves no part below zero
    unnamed = sum(v for axis, v in parts.exposed_communication.items() if axis not in AXES)
    rest = parts.other + unnamed + gap
    return {
        "compute": parts.compute + min(rest, 0.0),
        "recompute": parts.recompute,
        "optimizer": parts.optimizer,
        "exposed_communication": {
            axis: parts.exposed_communication.get(axis, 0.0) for axis in AXES
        },
        "bubble": parts.bubble,
        "host": parts.host,
        "wait": parts.wait,
        "other": max(rest, 0.0),
    }


def _rank_class(rank_class: ClassResult) -> dict[str, Any]:
    return {
        "class": rank_class.name,
        "ranks": sorted(rank_class.ranks),
        "busy_s": rank_class.busy_s,
        "exposed_s": rank_class.exposed_s,
        "idle_s": rank_class.idle_s,
        "peak_allocated_gib": rank_class.peak_allocated_bytes / GIB,
    }


def _not_finite(value: Any, path: str) -> list[Problem]:
    """Returns one problem for every number below `value` that JSON cannot hold."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value)
        return [p for key, item in items.items() for p in _not_finite(item, f"{path}.{key}")]
    if isinstance(value, float) and not isfinite(value):
        return [Problem(what=f"the number is {value}", where=path.lstrip("."))]
    if isinstance(value, list):
        entries = cast("list[Any]", value)
        return [p for i, item in enumerate(entries) for p in _not_finite(item, f"{path}[{i}]")]
    return []
