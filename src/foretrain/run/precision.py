"""Precision words: how `bf16` (or a mapping of roles) becomes a dtype for every role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from foretrain.errors import Problem, nearest
from foretrain.graph.precision import LOW as NARROW
from foretrain.graph.precision import REMAINDER, Precision
from foretrain.hardware.device import Device
from foretrain.run.aliases import PRECISION_SYNONYMS
from foretrain.run.stacks import ROLES
from foretrain.run.values import Section
from foretrain.stack import Stack
from foretrain.units import COMPUTE_DTYPES

_KEPT = {
    "grad": "new gradients",
    "grad_reduce": "gradients on their way",
    "grad_accumulate": "sums of gradients",
    "master": "a master copy",
}


#: Words beside the dtypes: all roles in the low precision, without a master copy.
PURE = {"pure-bf16": "bf16", "bf16-pure": "bf16", "pure-fp16": "fp16", "fp16-pure": "fp16"}
LOW = ("fp16", "bf16")


def read_precision(section: Section, default: str) -> tuple[str, dict[str, str]]:
    """Returns the precision word of the training section and the roles set one by one."""
    value = section.values.get("precision")
    if not isinstance(value, Mapping):
        words = (*COMPUTE_DTYPES, *PURE)
        return section.choice("precision", words, PRECISION_SYNONYMS) or default, {}
    roles: dict[str, str] = {}
    given = cast("Mapping[str, Any]", value)
    inner = Section(path=section.where("precision"), values=given, problems=section.problems)
    for role, dtype in given.items():
        if role not in ROLES:
            way_out = nearest(str(role), ROLES)
            inner.refuse(str(role), "unknown role", dtype, ", ".join(ROLES), way_out)
        elif role == "master" and (dtype is None or str(dtype).lower() in ("none", "false")):
            roles[role] = "none"
        elif role == "master" and str(dtype).lower() == REMAINDER:
            roles[role] = REMAINDER
        else:
            word = inner.choice(role, COMPUTE_DTYPES, PRECISION_SYNONYMS)
            if word is not None:
                roles[role] = word
    return roles.get("compute", default), roles


def expand_precision(
    word: str, roles: Mapping[str, str], *, preset: str, stack: Stack
) -> Precision | None:
    """Returns the dtype of every role, None when neither stack nor preset knows the word.

    The stack's table comes first, then what the preset's framework does; `roles` win over both.
    """
    base: Mapping[str, str] | None
    if word in PURE:
        base = _all(PURE[word], moments=PURE[word])
    else:
        base = stack.precision.get(word) or preset_precision(word, preset)
    if base is None:
        return None
    # a stack's table may leave roles out: they are what the preset does
    table = {**(preset_precision(word, preset) or _all("fp32")), **base, **roles}
    master = table.pop("master")
    return Precision(master=None if master == "none" else master, **table)


def check_precision(word: str, roles: Mapping[str, str], device: Device) -> list[Problem]:
    """Returns the problem of a precision that the device does not compute in."""
    dtype = roles.get("compute", PURE.get(word, word))
    if device.supports(dtype):
        return []
    allowed = ", ".join(d for d in COMPUTE_DTYPES if device.supports(d))
    what, where = f"{device.name} does not compute in this precision", "training.precision"
    return [Problem(what=what, where=where, value=dtype, allowed=allowed)]


def odd_roles(found: Precision) -> list[Problem]:
    """Returns what no software can keep: a remainder of other weights than bf16, narrow weights.

    A remainder is the lower half of an fp32 number whose upper half is the bf16 weight; weights in
    8 or 4 bits are what products of that format read.
    """
    problems: list[Problem] = []
    where = "training.precision"
    if found.master == REMAINDER and found.weight != "bf16":
        what = "a master copy of remainders needs bf16 weights"
        way_out = "leave master out, or set weight: bf16"
        problems.append(
            Problem(what=what, where=f"{where}.master", value=found.weight, way_out=way_out)
        )
    if found.weight in NARROW and found.compute not in NARROW:
        what = f"weights in {found.weight} beside computation in {found.compute}"
        way_out = f"compute in {found.weight} too, or leave weight out"
        problems.append(
            Problem(what=what, where=f"{where}.weight", value=found.weight, way_out=way_out)
        )
    for role in ("grad", "grad_reduce", "grad_accumulate", "master"):
        if getattr(found, role) in NARROW:
            what = f"no software keeps {_KEPT[role]} in {getattr(found, role)}"
            allowed = "fp32, tf32, fp16, bf16"
            where_role = f"{where}.{role}"
            value = getattr(found, role)
            problems.append(Problem(what=what, where=where_role, value=value, allowed=allowed))
    return problems


def preset_precision(word: str, preset: str) -> dict[str, str] | None:
    """Returns role -> dtype of a framework's usual mixed precision, None for fp8 and narrower.

    megatron bf16: gradients are produced, reduced and kept in fp32 beside bf16 weights (18 bytes
    per parameter with Adam); its fp16 and DeepSpeed's both keep 16-bit gradients (16 bytes, the
    count of the ZeRO paper). fsdp: fp32 shards, gathered and computed in bf16, reduced in fp32.
    ddp and plain: PyTorch's autocast over fp32 weights.
    """
    if word in ("fp32", "tf32"):
        return _all("fp32", compute=word)
    if word not in LOW:
        return None
    if preset == "megatron" and word == "bf16":
        return _all("fp32", compute=word, weight=word, master="fp32")
    if preset in ("megatron", "deepspeed"):
        return _all(word, master="fp32", moments="fp32")
    if preset == "fsdp":
        return _all("fp32", compute=word, grad=word)
    return _all("fp32", compute=word)


def _all(dtype: str, **changes: str) -> dict[str, str]:
    every = (role for role in ROLES if role != "second_moment")  # that of the first, unless given
    return {**dict.fromkeys(every, dtype), "master": "none", **changes}
