"""Pricing the rows of a table: one cost model per device and stack, every row with a status."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrain.catalog import names
from foretrain.cost.answer import width
from foretrain.cost.calibration import tables_of_user
from foretrain.cost.compute import convolution, memory_bound
from foretrain.cost.machine import Machine
from foretrain.cost.model import build_cost_model, provider
from foretrain.errors import InputError
from foretrain.hardware.grammar import parse_cluster
from foretrain.hardware.names import find_device, find_devices
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack
from foretrain.stack import Stack
from foretrain.validation.ops.events import Unsupported, events_of, op_of
from foretrain.validation.ops.table import OpRow

#: The stack of rows that name none, or name a kernel instead.
USUAL = "pytorch-eager"
#: Of the host's time for an operator, what comes after its launch; and the least time from the
#: launch to the event behind it. PyTorch calls of six devices (studies/costs/calls.py).
BEHIND_S, ALONE_S = 5e-6, 15e-6
#: Operands below so many bytes are a matter of floors, below so many sizes of L2 one of caches.
SMALL_BYTES, FITS_L2 = 1e6, 1.3
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOutcome:
    """One row with its status; times in seconds, None unless the status is ok."""

    row: OpRow
    status: Literal["ok", "unsupported", "error"]
    reason: str | None = None
    assumed: tuple[str, ...] = ()
    device: str = ""
    op: str = ""
    events: tuple[ComputeEvent, ...] = ()
    value_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None


def predict_ops(rows: Sequence[OpRow]) -> list[OpOutcome]:
    """Returns one outcome per row, in order; nothing is dropped."""
    outcomes = [prepared(row) for row in rows]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, outcome in enumerate(outcomes):
        if outcome.status == "ok":
            groups.setdefault((outcome.device, outcome.row.stack, outcome.op), []).append(i)
    for (device, stack, _), indices in groups.items():
        priced = _priced(device, stack, [outcomes[i] for i in indices])
        for i, outcome in zip(indices, priced, strict=True):
            outcomes[i] = outcome
    return outcomes


def stack_of(name: str) -> tuple[Stack, tuple[str, ...]]:
    """Returns the stack that a table names, and what was assumed.

    A name of the catalog is that stack. Any other name is taken for a kernel: one launch that moves
    what an ideally fused kernel moves; calibration files may hold constants of their own for it
    (`kernels` of gemm.toml, for example).
    """
    if name and name.lower().replace("_", "-") in names("stacks"):
        return replace(load_stack(name), autocast_bytes={}), ()  # calls stand alone
    usual = load_stack(USUAL)
    if not name:  # nothing says which kernel of a narrow format: the mean of all
        return replace(usual, low_kernels={}), (f"stack {USUAL}",)
    return replace(
        usual, gemm_kernel=name, attention_kernel=name, kernels={}, eager_bytes={}, half_share=1.0
    ), ()


def prepared(row: OpRow) -> OpOutcome:
    """Returns a row with its device and events, not yet priced, or why it cannot be."""
    devices = find_devices(row.device) if row.device else ()
    if not devices:
        return OpOutcome(row=row, status="unsupported", reason=f"unknown device {row.device!r}")
    try:
        op, events = op_of(row), events_of(row)
    except Unsupported as why:
        return OpOutcome(row=row, status="unsupported", reason=str(why))
    device = max(devices, key=lambda d: (d.form == "sxm", d.memory_gb))
    assumed = stack_of(row.stack)[1]
    if len(devices) > 1:
        assumed = (f"device {device.name}", *assumed)
    return OpOutcome(
        row=row, status="ok", assumed=assumed, device=device.name, op=op, events=events
    )


def _priced(device: str, stack: str, outcomes: Sequence[OpOutcome]) -> list[OpOutcome]:
    try:
        cluster = parse_cluster(f"1x1 {device}")
        model = build_cost_model(cluster, stack_of(stack)[0], warm=False)  # isolated kernels
        prices = model.price([event for outcome in outcomes for event in outcome.events])
    except InputError as error:
        reason = "; ".join(str(problem) for problem in error.problems)
        return [replace(o, status="unsupported", reason=reason) for o in outcomes]
    except Exception as error:  # noqa: BLE001 - reported as our fault, the other groups go on
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('foretrain/')[2]}:{place.lineno}"
        reason = f"{type(error).__name__} in {where}: {error}"
        return [replace(o, status="error", reason=reason) for o in outcomes]
    counts = [len(outcome.events) for outcome in outcomes]
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
    host = np.add.reduceat(prices.host_s, starts)
    host, alone, known = called(outcomes, host)
    slow = width("fitted", "host")
    wide = np.array([kernel_width(outcome) for outcome in outcomes])
    value, low, high = (
        np.add.reduceat(x, starts) for x in (prices.value_s, prices.low_s, prices.high_s)
    )
    low, high = np.minimum(low, value / wide), np.maximum(high, value * wide)
    value, low, high = (
        timed_alone(x, host, alone, pace=np.where(known, 1.0, pace))
        for x, pace in ((value, 1.0), (low, 1.0 / slow), (high, slow))
    )
    return [
        replace(
            outcome,
            value_s=float(value[i]),
            low_s=float(low[i]),
            high_s=float(high[i]),
        )
        for i, outcome in enumerate(outcomes)
    ]


def kernel_width(outcome: OpOutcome) -> float:
    """Returns the least interval factor of a row, by its size.

    A table of kernels that move data says neither whether it found them in L2 nor how they were
    written; calls of PyTorch, or the user's own measurements, are what their constants were
    fitted to.
    """
    known = (
        outcome.row.launch_included
        or outcome.row.host_us is not None
        or "memory" in tables_of_user(outcome.device)
    )
    if known or provider(outcome.op) is not memory_bound.price:
        return 1.0
    return width("table", f"memory_{kernel_class(outcome)}")


def kernel_class(outcome: OpOutcome) -> str:
    """Returns the size of what a kernel moves: small (of its floor), cached (of L2) or large."""
    moved = max(event.bytes for event in outcome.events)
    if moved < SMALL_BYTES:
        return "small"
    return "cached" if moved < FITS_L2 * find_device(outcome.device).l2_bytes else "large"


def called(
    outcomes: Sequence[OpOutcome], host: Array
) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns the host's seconds, which rows are calls timed alone, and which state their host.

    `host`: what the stacks say of the operators. Calls of a collection whose host was fitted beside
    its kernels take what it took on average.
    """
    stated = np.array([outcome.row.host_us is not None for outcome in outcomes])
    alone = stated | np.array([outcome.row.launch_included for outcome in outcomes])
    seconds = host.copy()
    fitted: dict[tuple[str, str, str], float | None] = {}
    for i, outcome in enumerate(outcomes):
        if not alone[i]:
            continue
        if outcome.row.host_us is not None:
            seconds[i] = outcome.row.host_us * 1e-6 + BEHIND_S
        elif outcome.op == "conv2d":
            key = (outcome.device, outcome.row.stack, outcome.events[0].dtype)
            if key not in fitted:
                machine = Machine(device=find_device(key[0]), stack=stack_of(key[1])[0])
                fitted[key] = convolution.call_seconds(machine, key[2])
            mean = fitted[key]
            seconds[i] = host[i] if mean is None else mean + BEHIND_S
    return seconds, alone, stated


def timed_alone(
    seconds: Array, host: Array, alone: NDArray[np.bool_], *, pace: Array | float = 1.0
) -> Array:
    """Returns what two events around a call measure where `alone` is set, else the kernels' time.

    The first event passes on an idle device: the time of the host until the launch counts whole.
    `pace` multiplies the times of the host: those of tables differ.
    """
    before = np.maximum(host - BEHIND_S, 0.0)
    return np.where(alone, pace * before + np.maximum(seconds, pace * ALONE_S), seconds)
