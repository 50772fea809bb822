"""Words of other tools that stand for several of our fields, or for another value of one.

Megatron-Core (arguments.py, optimizer_config.py): gradients are kept and sent in one dtype, that of
the buffer they are accumulated in. It is fp32 beside bf16 weights unless `grad_reduce_in_bf16` or a
`main_grads_dtype` of bf16 says otherwise. The precision-aware optimizer keeps of an fp32 master
copy what a bf16 weight lacks (`store_param_remainders`, on by default). Accelerate's
`sync_each_batch` is our `no_sync` the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from foretrain.errors import Problem
from foretrain.graph.precision import REMAINDER
from foretrain.run.aliases import PRECISION_SYNONYMS
from foretrain.run.values import as_flag

_GRADIENTS = ("precision.grad_accumulate", "precision.grad_reduce")

#: What is set by a word, given its value and the words beside it, by plain name.
Rule = Callable[[Any, Mapping[str, Any]], "Mapping[str, Any] | None"]


def expand(
    section: str, word: str, value: Any, beside: Mapping[str, Any], place: str
) -> Mapping[str, Any] | Problem | None:
    """Returns field -> value of a word in our spelling, None for a word that stands for itself.

    `beside` are the words of its section, at `place` the word stands. A problem where the value is
    not yes or no, or has no meaning of its own.
    """
    if word in _DTYPES.get(section, {}):
        return _DTYPES[section][word](value, beside)
    if word not in _FLAGS.get(section, {}):
        return None
    truth = as_flag(value)
    if truth is None:
        return Problem(
            what="must be true or false", where=place, value=value, allowed="true, false"
        )
    found = _FLAGS[section][word](truth, beside)
    if found is not None:
        return found
    return Problem(
        what="gradients in the dtype of the weights: say which",
        where=place,
        value=value,
        way_out="e.g. precision: {grad_accumulate: bf16, grad_reduce: bf16}",
    )


def _both(value: Any) -> dict[str, Any]:
    return dict.fromkeys(_GRADIENTS, _dtype(value))


def _dtype(value: Any) -> Any:
    """A dtype in our spelling, so that two words that say the same are known to."""
    return PRECISION_SYNONYMS.get(str(value).strip().lower(), value)


def _aware(beside: Mapping[str, Any]) -> bool:
    """Whether the precision-aware optimizer keeps remainders."""
    on = as_flag(beside.get("use_precision_aware_optimizer", False))
    return on is True and as_flag(beside.get("store_param_remainders", True)) is not False


def _master(value: Any, beside: Mapping[str, Any]) -> Mapping[str, Any]:
    whole = _dtype(value) == "fp32"
    return {"precision.master": REMAINDER if whole and _aware(beside) else value}


def _aware_flag(value: Any, beside: Mapping[str, Any]) -> Mapping[str, Any]:
    del value
    kept = _aware(beside) and "main_params_dtype" not in beside
    return {"precision.master": REMAINDER} if kept else {}


_DTYPES: Mapping[str, Mapping[str, Rule]] = {
    "training": {
        "main_grads_dtype": lambda value, _: _both(value),
        "main_params_dtype": _master,
    }
}

_FLAGS: Mapping[str, Mapping[str, Rule]] = {
    "training": {
        "grad_reduce_in_bf16": lambda on, _: _both("bf16") if on else {},
        "accumulate_allreduce_grads_in_fp32": lambda on, _: _both("fp32") if on else {},
        "grad_reduce_in_fp32": lambda on, _: _both("fp32") if on else None,
        "use_precision_aware_optimizer": _aware_flag,
        "store_param_remainders": lambda _, __: {},  # says what the word above means
    },
    "plan": {
        "optimizer_cpu_offload": lambda on, _: {"offload": "optimizer" if on else "none"},
        "sync_each_batch": lambda on, _: {"no_sync": not on},
    },
}
