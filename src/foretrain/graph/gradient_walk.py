"""Gradients known so far, while the operators of a block are walked from last to first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretrain.graph.ir import Block, Dim, Op, Operand, Phase, Tensor

#: The operator that starts the gradient of the side tensor.
SIDE_ZERO = "side.zero"


def grad_name(tensor: str) -> str:
    """Returns the name of the gradient of a tensor."""
    return f"d.{tensor}"


@dataclass(slots=True)
class Walk:
    """Gradients known so far while walking the operators from last to first."""

    block: Block
    ops: list[Op] = field(default_factory=list[Op])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    grads: dict[str, str] = field(default_factory=dict[str, str])

    def has_grad(self, op: Op) -> bool:
        """Returns whether a gradient of the main output of `op` has arrived."""
        return op.outputs[0].tensor in self.grads

    def dy(self, op: Op) -> Operand:
        """Returns the gradient of the main output, indexed as the output is."""
        return Operand(tensor=self.grads[op.outputs[0].tensor], dims=op.outputs[0].dims)

    def tensor(self, name: str) -> Tensor:
        """Returns a forward tensor or a gradient."""
        return self.tensors.get(name) or self.block.tensor(name)

    def declare(self, name: str, like: Tensor) -> str:
        """Declares a gradient tensor shaped like `like`."""
        dtype = "grad" if like.role == "weight" else "compute"
        self.tensors[name] = Tensor(name=name, dims=like.dims, shape=like.shape, dtype=dtype)
        return name

    def fresh(self, tensor: str) -> str:
        """Returns the name of a new contribution to the gradient of `tensor`."""
        name, count = grad_name(tensor), 0
        while name in self.tensors:
            count += 1
            name = f"{grad_name(tensor)}.{count}"
        return self.declare(name, self.block.tensor(tensor))

    def emit(
        self,
        source: Op,
        suffix: str,
        phase: Phase,
        targets: Sequence[Operand],
        /,
        *,
        inputs: Sequence[Operand],
        linear: tuple[int, ...] = (),
        cost: str | None = None,
        flops: float = 0.0,
        fuse: str | None = None,
    ) -> None:
        """Appends the operator that computes the gradients of the `targets` operands."""
        fuse = fuse or (f"{source.fuse}.dx" if source.fuse else None)
        outputs = [Operand(tensor=self.fresh(t.tensor), dims=t.dims) for t in targets]
        kept = {dim for output in outputs for dim in output.dims}
        self.ops.append(
            Op(
                name=f"{source.name}.{suffix}",
                kind=source.kind,
                cost=cost or source.cost,
                dims=tuple(
                    Dim(name=d.name, size=d.size, reduction=d.name not in kept) for d in source.dims
                ),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                linear=linear,
                flops=flops,
                density=source.density,
                grad="none",
                fuse=fuse,
                attributes=source.attributes,
                phase=phase,
                source=source.name,
            )
        )
        for target, output in zip(targets, outputs, strict=True):
            self.contribute(target.tensor, output.tensor, fuse)

    def contribute(self, tensor: str, grad: str, fuse: str | None = None) -> None:
        """Adds a contribution; a second one is summed by an operator that partial sums pass."""
        if tensor not in self.grads:
            self.grads[tensor] = grad
            return
        like = self.block.tensor(tensor)
        dims = like.dims
        total = self.fresh(tensor)
        self.ops.append(
            Op(
                name=f"{tensor}.grad_add",
                kind="pointwise",
                cost="grad_add",
                dims=tuple(Dim(name=d, size=s) for d, s in zip(dims, like.shape, strict=True)),
                inputs=(
                    Operand(tensor=self.grads[tensor], dims=dims),
                    Operand(tensor=grad, dims=dims),
                ),
                outputs=(Operand(tensor=total, dims=dims),),
                linear=(0, 1),
                flops=1.0,
                grad="none",
                fuse=fuse,
                phase="backward",
            )
        )
        self.grads[tensor] = total

    def start_side(self, side: str) -> None:
        """Starts the gradient of the side tensor at zero: the last block does not read it."""
        tensor = self.block.tensor(side)
        dims = tuple(Dim(name=d, size=s) for d, s in zip(tensor.dims, tensor.shape, strict=True))
        grad = self.declare(grad_name(side), tensor)
        output = Operand(tensor=grad, dims=tensor.dims)
        self.ops.append(
            Op(name=SIDE_ZERO, kind="pointwise", cost="zero", dims=dims, inputs=(),
               outputs=(output,), grad="none", phase="backward")
        )  # fmt: skip
        self.grads[side] = grad

    def differentiable(self, operand: Operand) -> bool:
        """Returns whether a gradient of the operand is wanted."""
        if operand.tensor in self.block.arrivals:
            return True
        return self.block.tensor(operand.tensor).role in ("weight", "activation")

    def saved(self, op: Op) -> list[Operand]:
        """Returns the operands of `op` that its backward reads again."""
        return [o for o in (*op.inputs, *op.outputs) if o.tensor in op.saved]
