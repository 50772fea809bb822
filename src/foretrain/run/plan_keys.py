"""Reading the plan section: types and ranges of each key. What fits what is strategy/checks.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from foretrain.errors import PlanError, Problem
from foretrain.mesh import AXES
from foretrain.run.aliases import (
    LATER_SCHEDULES,
    OFFLOAD_SYNONYMS,
    RECOMPUTE_SYNONYMS,
    SCHEDULE_SYNONYMS,
    TABLE_WAY_SYNONYMS,
)
from foretrain.run.values import Section, as_flag, as_integer
from foretrain.strategy.plan import (
    OFFLOAD,
    PRESETS,
    RECOMPUTE,
    RECOMPUTE_MODULES,
    SCHEDULES,
    Overlap,
    Plan,
    Recompute,
)
from foretrain.strategy.presets import node_from_mapping
from foretrain.strategy.tables import ASSIGNMENTS, WAYS

ORDER_AXES = (*AXES, "dp")
OVERLAPS = ("grad", "param", "tp", "p2p", "tables")


def read_plan(section: Section, *, preset: str) -> Plan:
    """Returns the Plan of a section; keys that are absent or wrong keep the Plan's default.

    Problems are added to the section's list.
    """
    _refuse_later(section)
    degree = {key: section.integer(key) or 1 for key in ("tp", "pp", "cp", "interleave")}
    prefetch = section.integer("prefetch", low=0)
    reshard = section.flag("reshard")
    return Plan(
        preset=preset,
        tp=degree["tp"],
        pp=degree["pp"],
        cp=degree["cp"],
        dp=section.integer("dp"),
        shard=None if section.values.get("shard") == -1 else section.integer("shard"),
        zero=_zero(section),
        sequence_parallel=section.flag("sequence_parallel"),
        interleave=degree["interleave"],
        schedule=_schedule(section),
        in_flight=_in_flight(section),
        stages=_integers(section, "stages", low=0),
        recompute=_recompute(section),
        reshard=True if reshard is None else reshard,
        no_sync=section.flag("no_sync"),
        offload=_offload(section),
        optimizer_offload_fraction=_fraction(section),
        cpu_offloading_num_layers=section.integer("cpu_offloading_num_layers", low=0) or 0,
        expandable_segments=section.flag("expandable_segments"),
        bucket_mib=section.number("bucket_mib"),
        prefetch=1 if prefetch is None else prefetch,
        overlap=_overlap(section),
        order=_order(section),
        tables=_tables(section),
        assignment=section.choice("assignment", ASSIGNMENTS) or "greedy-size",
        overrides=_overrides(section),
        tree=_mapping(section, "tree"),
    )


def read_preset(section: Section) -> str | None:
    """Returns the preset as given, None when absent or wrong."""
    return section.choice("preset", PRESETS, {"torchtitan": "fsdp", "megatron-lm": "megatron"})


def _refuse_later(section: Section) -> None:
    """Names of features that the run file has but no stage models yet."""
    for key, name in (
        ("ep", "expert parallelism"),
        ("etp", "tensor parallelism inside experts"),
    ):
        if (section.integer(key) or 1) > 1:
            section.refuse(key, f"{name} is not modelled yet", section.values[key], "1")


def _offload(section: Section) -> str:
    value = section.values.get("offload")
    if value is None or as_flag(value) is False:
        return "none"
    return section.choice("offload", OFFLOAD, OFFLOAD_SYNONYMS) or "none"


def _fraction(section: Section) -> float:
    """The share of the parameters whose optimizer states are offloaded."""
    key = "optimizer_offload_fraction"
    if _offload(section) == "none" and section.has("offload"):
        return 1.0  # drop_idle_settings says that it has no effect
    value = section.number(key)
    if value is None:
        return 1.0
    if value > 1.0:
        section.refuse(key, "must be a share", value, "above 0, up to 1")
    elif _offload(section) != "optimizer":
        section.refuse(key, "goes with offload: optimizer", value, way_out="add offload: optimizer")
    return value


def _zero(section: Section) -> int | None:
    flag = section.values.get("zero")
    if isinstance(flag, bool):
        section.refuse("zero", "must be a ZeRO stage", flag, "0, 1, 2, 3")
        return None
    return section.integer("zero", low=0, high=3)


def _schedule(section: Section) -> str | None:
    word = str(section.values.get("schedule", "")).strip().lower().replace("_", "-")
    if word in LATER_SCHEDULES or word.replace("-", "") in LATER_SCHEDULES:
        value = section.values["schedule"]
        section.refuse("schedule", "not modelled yet", value, ", ".join(SCHEDULES))
        return None
    return section.choice("schedule", SCHEDULES, SCHEDULE_SYNONYMS)


def _in_flight(section: Section) -> int | tuple[int, ...] | None:
    value = section.values.get("in_flight")
    if isinstance(value, list | tuple) or (isinstance(value, str) and "," in value):
        return _integers(section, "in_flight", low=1)
    return section.integer("in_flight")


def _integers(section: Section, key: str, *, low: int) -> tuple[int, ...] | None:
    value = section.values.get(key)
    if value is None:
        return None
    if isinstance(value, str):  # a flag: 10,10,10,10
        value = value.strip("[] ").split(",")
    items = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    numbers = [as_integer(item) for item in items]
    kept = tuple(number for number in numbers if number is not None and number >= low)
    if not numbers or len(kept) != len(numbers):
        section.refuse(
            key, "must be a list of whole numbers", value, f"one number >= {low} per stage"
        )
        return None
    return kept


def _recompute(section: Section) -> Recompute:
    value = section.values.get("recompute")
    if not isinstance(value, Mapping):
        return Recompute(mode=section.choice("recompute", RECOMPUTE, RECOMPUTE_SYNONYMS) or "none")
    inner = _inner(section, "recompute", ("mode", "layers", "modules"))
    mode = inner.choice("mode", RECOMPUTE, RECOMPUTE_SYNONYMS)
    layers = inner.integer("layers")
    modules = _modules(inner)
    if modules and mode not in (None, "selective"):
        inner.refuse("modules", "goes with mode selective", list(modules), "mode: selective")
        modules = ()
    usual = "selective" if modules else "full" if layers else "none"
    return Recompute(mode=mode or usual, layers=layers, modules=modules)


def _modules(section: Section) -> tuple[str, ...]:
    """The parts of a layer that are computed again, a list or a text with commas."""
    value = section.values.get("modules")
    if value is None:
        return ()
    text = value.strip("[] ").replace(",", " ").split() if isinstance(value, str) else value
    words = cast("list[Any]", text) if isinstance(text, list | tuple) else []
    modules = tuple(str(word).strip().lower() for word in words)
    if not modules or any(module not in RECOMPUTE_MODULES for module in modules):
        what = "must be a list of modules that are modelled"
        section.refuse("modules", what, value, ", ".join(RECOMPUTE_MODULES))
        return ()
    return tuple(module for module in RECOMPUTE_MODULES if module in modules)


def _overlap(section: Section) -> Overlap:
    value = section.values.get("overlap")
    if isinstance(value, Mapping):
        inner = _inner(section, "overlap", OVERLAPS)
        return Overlap(**{name: inner.flag(name) for name in OVERLAPS})
    every = section.flag("overlap")
    return Overlap(**dict.fromkeys(OVERLAPS, every))


def _tables(section: Section) -> dict[str, str | int]:
    """One way for all tables, or patterns of their names -> a way or the rank that holds them."""
    value = section.values.get("tables")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        way = section.choice("tables", WAYS, TABLE_WAY_SYNONYMS)
        return {} if way is None else {"*": way}
    given = {str(k): v for k, v in cast("Mapping[Any, Any]", value).items()}
    inner = Section(path=section.where("tables"), values=given, problems=section.problems)
    ways: dict[str, str | int] = {}
    for pattern, item in given.items():
        rank = as_integer(item)
        way = rank if rank is not None else inner.choice(pattern, WAYS, TABLE_WAY_SYNONYMS)
        if way is not None:
            ways[pattern] = way
    return ways


def _inner(section: Section, key: str, known: tuple[str, ...]) -> Section:
    """The section below a key; keys that it does not know are problems."""
    values = cast("Mapping[str, Any]", section.values[key])
    for name in values:
        if name not in known:
            section.refuse(f"{key}.{name}", "unknown key", name, ", ".join(known))
    return Section(path=section.where(key), values=values, problems=section.problems)


def _order(section: Section) -> tuple[str, ...] | None:
    value = section.values.get("order")
    if value is None:
        return None
    text = value.replace(",", " ").split() if isinstance(value, str) else value
    words = cast("list[Any]", text) if isinstance(text, list | tuple) else []
    order = tuple(str(word).strip().lower() for word in words)
    unknown = [word for word in order if word not in ORDER_AXES]
    if "dp" in order and {"dp_replicate", "dp_shard"} & set(order):
        allowed = "dp alone, or dp_replicate and dp_shard"
        section.refuse("order", "dp stands for both data axes", value, allowed)
        return None
    if not order or unknown or len(set(order)) != len(order):
        allowed = f"each once, outermost first: {', '.join(ORDER_AXES)}"
        section.refuse("order", "must be a list of mesh axes", value, allowed)
        return None
    return order


def _overrides(section: Section) -> dict[str, Mapping[str, Any]]:
    given = _mapping(section, "overrides") or {}
    result: dict[str, Mapping[str, Any]] = {}
    for pattern, settings in given.items():
        if isinstance(settings, Mapping):
            result[str(pattern)] = cast("Mapping[str, Any]", settings)
        else:
            key, what = f"overrides.{pattern}", "must be a mapping of node settings"
            section.refuse(key, what, settings, "computation, memory, recompute, ...")
    return result


def _mapping(section: Section, key: str) -> Mapping[str, Any] | None:
    value = section.values.get(key)
    if value is None or isinstance(value, Mapping):
        return cast("Mapping[str, Any] | None", value)
    section.refuse(key, "must be a mapping", value)
    return None


def refused_overrides(plan: Plan) -> list[Problem]:
    """Returns what the strategy tree refuses in `plan.overrides`."""
    problems: list[Problem] = []
    for pattern, settings in plan.overrides.items():
        try:
            node_from_mapping(pattern, settings)
        except PlanError as error:
            problems += error.problems
    return problems
