"""How far a run can go: the largest sequence, micro-batch or number of layers that still fits.

Memory grows with each of them (a property test holds it), mostly in a straight line. So the limit
is looked for where the line through two known points crosses what the device has, and by doubling
and halving where that does not help; every look is a whole prediction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from foretrain.errors import InputError, Problem
from foretrain.frontends.families import MAX_LAYERS
from foretrain.frontends.spec import ModelSpec
from foretrain.predict import data_parallel, predict
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.strategy.checks import Numbers, check_plan

QUANTITIES = ("sequence", "microbatch", "layers")
#: Sequences are tried in steps of this many tokens, or of tp times 8 where that is more.
SEQUENCE_STEP = 128
#: No limit is looked for beyond this multiple of the step.
MOST_STEPS = 1 << 20

Predict = Callable[[RunSpec], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest value that fits with its result, and the next larger one that does not.

    `value` is 0 when not even one step fits; `beyond` is None when the model itself ends there,
    or when nothing larger was tried (`open_end`): memory does not limit this run.
    """

    quantity: str
    value: int
    step: int
    now: int
    result: Result | None
    beyond: Result | None
    open_end: bool = False


def find_limit(run: RunSpec, quantity: str, *, predict: Predict = predict) -> Limit:
    """Returns how far `quantity` (sequence, microbatch, layers) of a run can be raised.

    The micro-batch carries the global batch with it, layers come in whole pipeline stages.

    Raises:
        InputError: an unknown quantity, or one that the model of the run does not have.
    """
    now, step = _now(run, quantity), _step(run, quantity)
    known: dict[int, Result | None] = {}

    def fits(count: int) -> bool:
        if count not in known:
            changed = changed_run(run, quantity, count * step)
            known[count] = None if changed is None else predict(changed)
        found = known[count]
        return found is not None and found.fits

    def room(count: int) -> float | None:
        """Returns the bytes left (negative: too few) of a prediction that was made."""
        found = known.get(count)
        return found and found.memory.usable_bytes - found.memory.device_used_bytes

    low, high = 0, max(now // step, 1)
    while fits(high) and high < MOST_STEPS:
        low, high = high, min(_beyond(low, high, room), MOST_STEPS)
    open_end = fits(high)
    low = high if open_end else low
    halve = False
    while high - low > 1:
        width, middle = high - low, (low + high) // 2
        guess = middle if halve else _between(low, high, room)
        low, high = (guess, high) if fits(guess) else (low, guess)
        halve = not halve and 2 * (high - low) > width
    return Limit(
        quantity=quantity,
        value=low * step,
        step=step,
        now=now,
        result=known.get(low),
        beyond=known.get(low + 1),
        open_end=open_end,
    )


def _beyond(low: int, high: int, room: Callable[[int], float | None]) -> int:
    """Returns the next count to look at after two that fit: just beyond the end of their line."""
    first, last = room(low), room(high)
    if first is None or last is None or first <= last:
        return 2 * high
    return high + max(1, min(15 * high, ceil(1.02 * last / (first - last) * (high - low))))


def _between(low: int, high: int, room: Callable[[int], float | None]) -> int:
    """Returns a count between one that fits and one that does not: where their line says so."""
    first, last = room(low), room(high)
    if first is None or last is None or first <= last:
        return (low + high) // 2
    share = first / (first - last)
    return min(max(low + round(share * (high - low)), low + 1), high - 1)


def changed_run(run: RunSpec, quantity: str, value: int) -> RunSpec | None:
    """Returns the run with another sequence, micro-batch or number of layers; None if invalid."""
    training, dp = run.training, data_parallel(run)
    if quantity == "sequence":
        changed = replace(run, training=replace(training, sequence=value))
        limit = run.model.max_positions if isinstance(run.model, ModelSpec) else None
        learned = isinstance(run.model, ModelSpec) and run.model.positions == "learned"
        if learned and limit is not None and value > limit:
            return None
    elif quantity == "microbatch":
        batch = value * dp * training.accumulation(dp)
        changed = replace(run, training=replace(training, microbatch=value, global_batch=batch))
    elif isinstance(run.model, ModelSpec):
        plan = replace(run.plan, stages=None)
        changed = replace(run, model=replace(run.model, layers=value), plan=plan)
    else:
        return None
    if quantity == "layers" and value > MAX_LAYERS:
        return None
    numbers = Numbers(
        num_devices=run.cluster.world_size,
        sequence=changed.training.sequence,
        global_batch=changed.training.global_batch,
        microbatch=changed.training.microbatch,
    )
    return None if check_plan(changed.model, changed.plan, numbers) else changed


def _now(run: RunSpec, quantity: str) -> int:
    if quantity not in QUANTITIES:
        allowed = ", ".join(QUANTITIES)
        problem = Problem(what="unknown quantity", where="--max", value=quantity, allowed=allowed)
        raise InputError(problem)
    model, training = run.model, run.training
    fixed = not isinstance(model, ModelSpec) or model.image_sequence is not None
    if fixed and quantity != "microbatch":
        what = f"{model.name} has no {quantity} to change"
        raise InputError(Problem(what=what, where="--max", value=quantity, allowed="microbatch"))
    if run.plan.tree is not None and quantity == "layers":
        what = "the expanded tree of the run names its layers"
        raise InputError(Problem(what=what, where="--max", value=quantity, allowed="sequence"))
    values = {
        "sequence": training.sequence or 0,
        "microbatch": training.microbatch,
        "layers": model.layers,
    }
    return values[quantity]


def _step(run: RunSpec, quantity: str) -> int:
    plan = run.plan
    if quantity == "sequence":
        return max(SEQUENCE_STEP, 8 * plan.tp)
    return plan.pp * plan.interleave if quantity == "layers" else 1
