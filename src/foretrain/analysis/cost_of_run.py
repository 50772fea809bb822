"""What a token budget costs: steps, days, device-hours, and money from the catalog's prices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from foretrain.errors import InputError, Problem
from foretrain.hardware import find_price
from foretrain.hardware.catalog import Price
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Band, Result

SECONDS_PER_DAY = 86_400.0

_SCALES: Mapping[str, float] = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "b": 1e9,
    "bn": 1e9,
    "g": 1e9,
    "t": 1e12,
}
_COUNT = re.compile(
    r"(\d{1,3}(?:[,_]\d{3})+|\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """A token budget; bands follow from the band of the step time.

    `price` is None where the catalog knows none, and then so is `usd`. Time is that of the steps
    alone: failures, evaluation and checkpoints come on top.
    """

    tokens: float
    tokens_per_step: float
    steps: int
    days: Band
    device_hours: Band
    usd: Band | None
    price: Price | None


def parse_tokens(text: str, where: str = "--tokens") -> float:
    """Returns a number of tokens from '1T', '300B', '1.5e12' or '15,000,000'.

    Raises:
        InputError: the text is no positive count.
    """
    match = _COUNT.fullmatch(text.strip())
    scale = _SCALES.get(match[2].lower()) if match else None
    tokens = float(re.sub("[,_]", "", match[1])) * scale if match and scale else 0.0
    if not 0.0 < tokens < 1e24:
        raise InputError(
            Problem(
                what="not a number of tokens",
                where=where,
                value=text,
                allowed="a positive count such as 1T, 300B, 20M or 1.5e12",
            )
        )
    return tokens


def token_budget(text: str, run: RunSpec, where: str = "--tokens") -> float:
    """Returns the tokens of a budget for a run; InputError also where its model counts none."""
    tokens = parse_tokens(text, where)
    if run.training.sequence is None:
        raise InputError(Problem(what="the model handles no tokens", where=where, value=text))
    return tokens


def cost_of_run(result: Result, run: RunSpec, tokens: float) -> RunCost:
    """Returns what training on `tokens` takes; a step that is begun counts whole."""
    step = result.step_time_s
    per_step = (result.tokens_per_s or 0.0) * step.value
    steps = max(1, ceil(tokens / per_step * (1.0 - 1e-12)))
    price = find_price(run.cluster.device.name)
    hours = steps * run.cluster.world_size / 3600.0
    return RunCost(
        tokens=tokens,
        tokens_per_step=per_step,
        steps=steps,
        days=_scaled(step, steps / SECONDS_PER_DAY),
        device_hours=_scaled(step, hours),
        usd=None if price is None else _scaled(step, hours * price.usd_per_hour),
        price=price,
    )


def _scaled(band: Band, factor: float) -> Band:
    return Band(value=factor * band.value, low=factor * band.low, high=factor * band.high)
