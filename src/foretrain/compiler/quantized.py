"""Weights in formats narrower than 16 bits: which are, and what their copies take.

- *narrow parameters* (`fp8_param_gather`): the weight itself is kept and gathered in the narrow
  format, by the linear layers of repeated blocks; embeddings and head stay in 16 bits;
- *copies*: software that quantises each weight once per step keeps the result until the update.

A product needs a weight in two layouts, forward and backward. Block formats are quantised along
either dim, so both are kept; of FP8 with one scale per tensor, only where no kernel reads the other
layout. See docs/explain/memory.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from foretrain.compiler.parameters import Unit, WeightGroup, merge
from foretrain.graph.precision import LOW, Precision
from foretrain.stack import Stack
from foretrain.units import dtype_bytes

#: Formats with a scale for each block of a row: the other layout has other scales.
BLOCK_FORMATS = ("mxfp8", "nvfp4")


def weight_dtype(unit: Unit, precision: Precision) -> str:
    """Returns the dtype that the weights of a unit are stored in."""
    narrow = precision.weight in LOW
    return "bf16" if narrow and not unit.repeated else precision.weight


def gather_dtype(unit: Unit, precision: Precision) -> str:
    """Returns the dtype in which the weights of a unit are gathered: never wider than compute."""
    if precision.weight in LOW:
        return weight_dtype(unit, precision)
    return "bf16" if precision.compute in LOW else precision.compute


def by_weight_dtype(
    units: Iterable[Unit], precision: Precision
) -> dict[str, tuple[WeightGroup, ...]]:
    """Returns the merged weight groups of units by the dtype of their weights."""
    groups: dict[str, list[WeightGroup]] = {}
    for unit in units:
        groups.setdefault(weight_dtype(unit, precision), []).extend(unit.groups)
    return {dtype: merge(found) for dtype, found in groups.items()}


def copy_bytes(unit: Unit, precision: Precision, stack: Stack, fp8_layouts: int) -> float:
    """Returns the bytes of quantised copies of a unit's weights that live all step.

    Gathered weights are quantised again in each pass, and their copies die with it.
    """
    compute = precision.compute
    if compute not in LOW or not stack.quantized_weights or not unit.repeated or unit.gathered:
        return 0.0
    layouts = 2 if compute in BLOCK_FORMATS else fp8_layouts
    beside = layouts - 1 if precision.weight in LOW else layouts
    return unit.elements() * beside * dtype_bytes(compute)
