"""In which format activations and their gradients travel where products are narrower than 16 bits.

Only what a narrow product reads is cast, and software casts its own part before it gathers the
whole (Transformer Engine's linear layers, torchao's tensor-parallel styles with one scale per
tensor). Everything else is made and added up in bf16 and travels so: outputs that are reduced over
ranks, keys and values of attention, boundaries of stages.
"""

from __future__ import annotations

from collections.abc import Iterable

from foretrain.compiler.flow import OpLaunch, Relayout
from foretrain.graph.precision import LOW, Precision


def is_narrow(relayout: Relayout, launches: Iterable[object]) -> bool:
    """Returns whether a re-layout gathers what a product of narrow operands reads."""
    if any(step.collective != "all_gather" for step in relayout.steps):
        return False
    return any(
        launch.op.cost == "gemm" and launch.op.attributes.get("low_precision") is not False
        for launch in launches
        if isinstance(launch, OpLaunch) and relayout.target in launch.reads
    )


def wire_dtype(
    relayout: Relayout, launches: Iterable[object], precision: Precision, *, low_gather: bool
) -> str:
    """Returns the dtype in which a re-layout travels.

    Args:
        relayout: the change of layout.
        launches: those of its segment; the readers among them decide.
        precision: of the run.
        low_gather: whether the software casts before it gathers (`Stack.low_gather`).
    """
    dtype = precision.dtype(relayout.tensor.dtype)
    if dtype in LOW and not (low_gather and is_narrow(relayout, launches)):
        return "bf16"
    return dtype


def activation_dtype(precision: Precision) -> str:
    """Returns the dtype of activations between operators: bf16 where products are narrower."""
    return "bf16" if precision.compute in LOW else precision.compute
