"""What travels in a narrow format: only what narrow products read, and only when it is gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support import STACK, compile_small, llama

from foretrain.graph.precision import Precision
from foretrain.program import CommEvent
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan

TOKENS, HIDDEN = 2 * 32, 64


def sent(compute: str, *, stack: Stack = STACK, **plan: Any) -> set[tuple[str, str, float]]:
    """Collective, dtype and bytes of everything that tensor or context parallelism moves."""
    precision = Precision(compute=compute, grad_reduce="fp32", grad_accumulate="fp32")
    small = compile_small(
        llama(), Plan(preset="megatron", **plan), 2, precision=precision, stack=stack
    )
    found: set[tuple[str, str, float]] = set()
    for segment in small.program.segments:
        for item in segment.items:
            event = small.program.events[item.event]
            if isinstance(event, CommEvent) and item.category in ("tp", "cp"):
                found.add((event.collective, event.dtype, event.bytes))
    return found


@pytest.mark.parametrize(("compute", "size"), [("fp8", 1.0), ("nvfp4", 9 / 16)])
def test_products_gather_narrow_and_reduce_in_bf16(compute: str, size: float) -> None:
    layer = TOKENS * HIDDEN
    moved = sent(compute, tp=2, sequence_parallel=True)
    assert ("all_gather", compute, layer * size) in moved
    assert {dtype for kind, dtype, _ in moved if kind != "all_gather"} <= {"bf16", "fp32"}
    assert ("reduce_scatter", "bf16", layer * 2.0) in moved


def test_without_sequence_parallelism_nothing_is_narrow() -> None:
    assert all(dtype != "fp8" for _, dtype, _ in sent("fp8", tp=2, sequence_parallel=False))


def test_keys_and_values_travel_in_bf16() -> None:
    moved = sent("fp8", cp=2)
    assert moved
    assert all(dtype != "fp8" for _, dtype, _ in moved)


def test_software_may_gather_before_it_casts() -> None:
    wide = replace(STACK, low_gather=False)
    moved = sent("fp8", stack=wide, tp=2, sequence_parallel=True)
    assert all(dtype != "fp8" for _, dtype, _ in moved)
    assert moved == sent("bf16", tp=2, sequence_parallel=True)


def test_stages_exchange_bf16() -> None:
    precision = Precision(compute="fp8", grad_reduce="fp32", grad_accumulate="fp32")
    small = compile_small(llama(), Plan(preset="megatron", pp=2), 2, precision=precision)
    transfers = {
        (event.dtype, event.bytes)
        for event in small.program.events
        if isinstance(event, CommEvent) and event.collective == "send_recv"
    }
    assert transfers == {("bf16", TOKENS * HIDDEN * 2.0)}
