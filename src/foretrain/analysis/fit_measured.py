"""Measured values as people write them ('13.75s', '2900 tok/s/GPU'), as seconds per step."""

from __future__ import annotations

import re
from collections.abc import Mapping

from foretrain.analysis.fit import NOISE
from foretrain.errors import InputError, Problem
from foretrain.run.spec import RunSpec

#: Seconds in a unit of time.
SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

#: Spellings -> unit of time, or a rate: what is counted, and whether per device.
_TIMES: Mapping[str, str] = {
    "": "s",
    "sec": "s",
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "minutes": "min",
    "hours": "h",
    **{unit: unit for unit in SECONDS},
}
_COUNTED: Mapping[str, str] = {
    **dict.fromkeys(("tok", "tokens", "token"), "tokens"),
    **dict.fromkeys(("samples", "sample", "seq", "seqs", "sequences", "images"), "samples"),
    **dict.fromkeys(("it", "its", "iter", "iters", "step", "steps"), "steps"),
}
_DEVICES = ("gpu", "gpus", "device", "devices", "chip")
_PREFIX: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6}
_NUMBER = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
ALLOWED = "a time (13.75s, 412ms) or a rate (2900 tok/s/GPU, 186k tok/s, 12 samples/s)"


def measured_step_s(text: str, run: RunSpec, where: str = "--measured") -> float:
    """Returns the seconds per optimizer step that a measured value of `run` stands for.

    A plain number is seconds. Rates count the tokens or samples of the global batch, over the whole
    job or, with '/GPU', per device.

    Raises:
        InputError: the text is no positive time or rate, or the run counts no tokens.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise _bad(text, where)
    number = float(match["number"].replace(",", ""))
    seconds = _seconds(number, match["rest"].strip().lower(), run, where)
    if seconds is None:
        raise _bad(text, where)
    return seconds


def _seconds(number: float, unit: str, run: RunSpec, where: str) -> float | None:
    """Returns the seconds per step, None when unit or number make no sense."""
    if not 0.0 < number < float("inf"):
        return None
    top, slash, bottom = unit.replace(" per ", "/").replace(" ", "").partition("/")
    if top in _TIMES:  # seconds, or seconds per step
        whole = not slash or _COUNTED.get(bottom) == "steps"
        return number * SECONDS[_TIMES[top]] if whole else None
    prefix = top[0] if top[:1] in ("k", "m") and top[1:] in _COUNTED else ""
    counted = _COUNTED.get(top.removeprefix(prefix))
    second, _, device = bottom.partition("/")
    if counted is None or not bottom or _TIMES.get(second) != "s" or device not in ("", *_DEVICES):
        return None
    rate = number * _PREFIX[prefix] * (run.cluster.world_size if device else 1)
    return _work(counted, run, where) / rate


def _work(counted: str, run: RunSpec, where: str) -> float:
    """Returns what a step handles: steps, samples or tokens of the global batch."""
    if counted == "steps":
        return 1.0
    batch = float(run.training.global_batch)
    if counted == "samples":
        return batch
    if run.training.tokens is None:
        raise InputError(
            Problem(
                what="the model handles no tokens",
                where=where,
                way_out="give a time per step or samples/s",
            )
        )
    return batch * run.training.tokens


#: A scatter outside of these is a typing error.
LEAST_NOISE, MOST_NOISE = 0.005, 0.3


def noise_share(text: str | None) -> float:
    """Returns the scatter that `--noise` gives ('5%', '0.05') as a share, 2 % when absent.

    Raises:
        InputError: the text is no share from 0.5 % to 30 %.
    """
    if text is None:
        return NOISE
    word = text.strip()
    try:
        share = float(word.removesuffix("%")) / (100.0 if word.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not LEAST_NOISE <= share <= MOST_NOISE:
        raise InputError(
            Problem(
                what="not a scatter of measured steps",
                where="--noise",
                value=text,
                allowed=f"{LEAST_NOISE:.1%} to {MOST_NOISE:.0%}, as 2% or 0.02",
            )
        )
    return share


def _bad(text: str, where: str) -> InputError:
    return InputError(
        Problem(what="not a measured time or rate", where=where, value=text, allowed=ALLOWED)
    )
