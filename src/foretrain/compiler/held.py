"""Bytes per element of tensors that software keeps in other copies than the graph names.

- logits: the loss works on wider copies, a constant of the stack; a loss in chunks of the sequence
  makes the logits of one chunk, their gradient and the input's, before it goes to the next;
- the activated gate: where activation and product are two kernels, backward of the product reads
  the activated gate, which lives beside the product itself;
- RMSNorm in Python: its product in fp32 reads an fp32 copy of the input, and its scale reads the
  normalised values in the compute dtype; the input itself is not kept for it;
- FP8 and narrower: only what matrix products read is. Activations are bf16; a stack may keep the
  narrow copy of what only matrix products read again.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.compiler.block import LoweredBlock
from foretrain.compiler.flow import OpLaunch
from foretrain.graph.precision import LOW, Precision
from foretrain.stack import Stack
from foretrain.units import dtype_bytes

#: An RMSNorm of at least so many kernels is Python code, not one operator.
PYTHON_NORM = 4.0


def activation_bytes(precision: Precision) -> float:
    """Returns the bytes of one activation: those of bf16 where matrix products are narrower."""
    return 2.0 if precision.compute in LOW else precision.bytes("compute")


def held_bytes(lowered: LoweredBlock, precision: Precision, stack: Stack) -> Mapping[str, float]:
    """Returns the bytes per element of every tensor of a block that is not kept as named."""
    size = activation_bytes(precision)
    held: dict[str, float] = {}
    if precision.compute in LOW:
        held |= {name: size for name, t in lowered.tensors.items() if t.dtype == "compute"}
        if precision.compute in stack.low_saved:
            narrow = dtype_bytes(precision.compute)
            held |= dict.fromkeys(_read_by_products(lowered), narrow)
    for op in lowered.block.ops:
        output = op.outputs[0].tensor
        kernels = stack.kernels.get(op.cost, 1.0)
        gated = sum(o.tensor in op.saved for o in op.inputs) == 2 and op.kind == "pointwise"
        if gated and op.cost in ("swiglu", "geglu") and kernels >= 2.0:
            held[output] = held.get(output, size) + size
        elif op.cost == "rmsnorm" and kernels >= PYTHON_NORM:
            held[output] = size + (4.0 if size < 4.0 else size)
    held["logits"] = stack.logits_copies * dtype_bytes(stack.logits_dtype)
    if stack.loss_chunks > 1:
        for name, tensor in lowered.tensors.items():
            if "vocab" in tensor.dims and tensor.role != "weight" and tensor.dtype != "grad":
                size = held.get(name, precision.bytes(tensor.dtype))
                held[name] = size / stack.loss_chunks
    return held


def _read_by_products(lowered: LoweredBlock) -> set[str]:
    """Saved tensors that nothing but weight gradients read in backward."""
    readers: dict[str, set[str]] = {}
    for launch in lowered.backward:
        if isinstance(launch, OpLaunch):
            for name, _ in launch.reads:
                readers.setdefault(name, set()).add(launch.op.phase)
    saved = {name for name, _ in lowered.saved}
    return {name for name in saved if readers.get(name) == {"backward_weight"}}
