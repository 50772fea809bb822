"""Backward operators, derived from the forward operators of a block by rule.

Every forward operator names its rule (`Op.grad`). Derived operators keep the iteration dims of
their source, so they inherit its splits: a dim that the forward operator kept and a gradient does
not index becomes a reduction, and its split leaves partial sums. See docs/explain/placements.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from foretrain.errors import InternalError
from foretrain.graph.ir import Block, Dim, Op, Operand, Phase, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The derived operators of a block in launch order, and the names they use.

    `weight_grads` maps a weight to its gradient; `input_grad` is the gradient that leaves to the
    previous block, `output_grad` the one that arrives from the next; `side_grad_in` and `side_grad`
    are the same of the tensor that goes along (`Block.side`): the sum of what later layers gave.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    weight_grads: Mapping[str, str]
    input_grad: str | None
    output_grad: str | None
    side_grad_in: str | None = None
    side_grad: str | None = None


#: The operator that starts the gradient of the side tensor.
SIDE_ZERO = "side.zero"
#: Rules that start a gradient instead of passing one on.
LOSSES = ("cross_entropy", "mean", "pair_loss")


def grad_name(tensor: str) -> str:
    """Returns the name of the gradient of a tensor."""
    return f"d.{tensor}"


def derive_backward(block: Block) -> Backward:
    """Returns the backward operators of `block` in the order autograd launches them."""
    walk = _Walk(block)
    if block.output is not None:
        walk.grads[block.output] = grad_name(block.output)
        walk.declare(grad_name(block.output), block.tensor(block.output))
    if block.side is not None and block.output is not None:
        walk.grads[block.side] = grad_name(block.side)
        walk.declare(grad_name(block.side), block.tensor(block.side))
    for _, group in groupby(reversed(block.ops), key=lambda op: op.fuse or op.name):
        walk.derive(list(group))
    if block.side is not None and block.output is None:
        walk.start_side(block.side)
    side = block.side or ""
    return Backward(
        ops=tuple(walk.ops),
        tensors=tuple(walk.tensors.values()),
        weight_grads={w.name: walk.grads[w.name] for w in block.weights if w.name in walk.grads},
        input_grad=walk.grads.get(block.input) if block.input else None,
        output_grad=grad_name(block.output) if block.output else None,
        side_grad_in=grad_name(side) if side and block.output is not None else None,
        side_grad=None if block.makes_side else walk.grads.get(side),
    )


@dataclass(slots=True)
class _Walk:
    """Gradients known so far while walking the operators from last to first."""

    block: Block
    ops: list[Op] = field(default_factory=list[Op])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    grads: dict[str, str] = field(default_factory=dict[str, str])

    def derive(self, group: Sequence[Op]) -> None:
        """Derives operators that read the same input together: all data gradients first.

        Their contributions to that input are summed before they join what is there already (the
        skip of a post-norm layer): partial sums are then reduced once.
        """
        known: dict[str, str] = {}
        if group[0].grad == "contraction":
            shared = {op.inputs[0].tensor: op for op in group}
            known = {name: self.grads.pop(name) for name in shared if name in self.grads}
        for op in group:
            if op.grad not in RULES:
                raise InternalError(f"operator {op.name} has no gradient rule {op.grad!r}")
            if op.grad == "contraction" and self.has_grad(op):
                _contraction_inputs(self, op)
            elif op.grad != "none" and (op.grad in LOSSES or self.has_grad(op)):
                RULES[op.grad](self, op)
        for op in group:
            if op.grad == "contraction" and self.has_grad(op):
                _contraction_weights(self, op)
        for op in group:
            if op.grad == "contraction" and self.has_grad(op):
                _contraction_biases(self, op)
        for name, grad in known.items():
            self.contribute(name, grad)

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


def _is_weight(walk: _Walk, operand: Operand) -> bool:
    return walk.block.tensor(operand.tensor).role == "weight"


def _contraction_inputs(walk: _Walk, op: Op) -> None:
    """dx = dy w for every operand that is an activation; linear in both operands."""
    main = op.inputs[:2]
    for i, target in enumerate(main):
        if _is_weight(walk, target) or not walk.differentiable(target):
            continue
        walk.emit(
            op, f"d{i}", "backward_input", [target],
            inputs=[walk.dy(op), main[1 - i]], linear=(0, 1), flops=op.flops,
            fuse=f"{op.fuse}.dx" if op.fuse else None,
        )  # fmt: skip


def _contraction_weights(walk: _Walk, op: Op) -> None:
    """dw = dy x for every operand that is a weight, and the bias gradient as a column sum."""
    main = op.inputs[:2]
    for i, target in enumerate(main):
        if _is_weight(walk, target):
            walk.emit(
                op, "dw", "backward_weight", [target],
                inputs=[walk.dy(op), main[1 - i]], linear=(0, 1), flops=op.flops,
                fuse=f"{op.fuse}.dw" if op.fuse else None,
            )  # fmt: skip


def _contraction_biases(walk: _Walk, op: Op) -> None:
    for bias in op.inputs[2:]:
        _bias_grad(walk, op, bias)


def _bias_grad(walk: _Walk, op: Op, bias: Operand) -> None:
    dy = walk.dy(op)
    dims = tuple(op.dim(name) for name in dy.dims)
    source = Op(
        name=op.name, kind="reduction", cost="bias_grad", dims=dims,
        inputs=(), outputs=(), attributes={},
    )  # fmt: skip
    walk.emit(source, "db", "backward_weight", [bias], inputs=[dy], linear=(0,), flops=1.0)


def _conv2d(walk: _Walk, op: Op) -> None:
    """Backward data (not for the images), backward weight, and the bias gradient as a sum."""
    _contraction_inputs(walk, op)
    _contraction_weights(walk, op)
    _contraction_biases(walk, op)


def _attention(walk: _Walk, op: Op) -> None:
    """One kernel for dq, dk, dv (and a table of positions): 2.5 times the forward FLOP."""
    walk.emit(
        op, "d", "backward", list(op.inputs),
        inputs=[walk.dy(op), *walk.saved(op)], flops=2.5 * op.flops,
    )  # fmt: skip


def _pointwise(walk: _Walk, op: Op) -> None:
    targets = [operand for operand in op.inputs if walk.differentiable(operand)]
    walk.emit(op, "d", "backward", targets, inputs=[walk.dy(op), *walk.saved(op)], flops=op.flops)


def _norm(walk: _Walk, op: Op) -> None:
    """dx and the gradients of the scale (and shift) in one operator."""
    saved = walk.saved(op)
    weights = [operand for operand in op.inputs if _is_weight(walk, operand)]
    read = {operand.tensor for operand in saved}
    scale = [operand for operand in weights[:1] if operand.tensor not in read]
    walk.emit(
        op, "d", "backward", [op.inputs[0], *weights],
        inputs=[walk.dy(op), *saved, *scale], flops=op.flops,
    )  # fmt: skip


def _linear(walk: _Walk, op: Op) -> None:
    """A linear map of one operand: its transpose, through which partial sums pass too."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[walk.dy(op)], linear=(0,),
              flops=op.flops)  # fmt: skip


def _residual(walk: _Walk, op: Op) -> None:
    """out = dropout(x + bias) + skip: the skip's gradient is dy itself, without a kernel."""
    skip = op.inputs[-1]
    dy = walk.dy(op)
    masks = walk.saved(op)
    if masks:
        walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[dy, *masks], cost="dropout",
                  flops=1.0)  # fmt: skip
        inner = Operand(tensor=walk.grads[op.inputs[0].tensor], dims=op.inputs[0].dims)
    else:
        walk.contribute(op.inputs[0].tensor, dy.tensor)
        inner = dy
    for bias in op.inputs[1:-1]:
        walk.emit(op, "db", "backward_weight", [bias], inputs=[inner], linear=(0,),
                  cost="bias_grad", flops=1.0)  # fmt: skip
    walk.contribute(skip.tensor, dy.tensor)


def _bias(walk: _Walk, op: Op) -> None:
    """out = x + table: dx is dy itself; the table's gradient sums over what it does not index."""
    dy = walk.dy(op)
    walk.contribute(op.inputs[0].tensor, dy.tensor)
    for table in (operand for operand in op.inputs[1:] if _is_weight(walk, operand)):
        walk.emit(op, "db", "backward_weight", [table], inputs=[dy], linear=(0,),
                  cost="bias_grad", flops=1.0)  # fmt: skip


def _embedding(walk: _Walk, op: Op) -> None:
    """Rows of the table receive the gradients of the tokens that read them."""
    tokens, table = op.inputs[0], op.inputs[1]
    walk.emit(op, "dw", "backward_weight", [table], inputs=[walk.dy(op), tokens], flops=1.0)


def _join(walk: _Walk, op: Op) -> None:
    """Parts side by side: one kernel hands every part its piece of dy."""
    walk.emit(op, "d", "backward", op.inputs, inputs=[walk.dy(op)], cost="split")


def _cross(walk: _Walk, op: Op) -> None:
    """out = x0 w + x: x takes dy itself, x0 and w a product with what was saved."""
    dy = walk.dy(op)
    x0, w, x = op.inputs
    walk.emit(op, "d", "backward", [x0, w], inputs=[dy, *walk.saved(op)[:2]], flops=2.0)
    walk.contribute(x.tensor, dy.tensor)


def _pair_loss(walk: _Walk, op: Op) -> None:
    """The loss of predictions and targets, element by element."""
    y, targets = op.inputs
    walk.emit(op, "d", "backward", [y], inputs=[y, targets], flops=4.0)


def _sum(walk: _Walk, op: Op) -> None:
    """out = x + y: both gradients are dy itself, without a kernel."""
    dy = walk.dy(op)
    for operand in op.inputs:
        walk.contribute(operand.tensor, dy.tensor)


def _select(walk: _Walk, op: Op) -> None:
    """Chosen rows: their gradients are scattered into zeros."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[walk.dy(op)], linear=(0,),
              cost="scatter")  # fmt: skip


def _concat(walk: _Walk, op: Op) -> None:
    """out = (token, x): x takes its part of dy as a copy, the token the sum of its rows."""
    x, token = op.inputs
    walk.emit(op, "d", "backward", [x], inputs=[walk.dy(op)], linear=(0,))
    walk.emit(op, "db", "backward_weight", [token], inputs=[walk.dy(op)], linear=(0,),
              cost="select")  # fmt: skip


def _mean(walk: _Walk, op: Op) -> None:
    """The loss is the mean of x: its gradient is a constant."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[], cost="zero")


def _cross_entropy(walk: _Walk, op: Op) -> None:
    """dlogits from the saved logits, maximum and sum: no communication in backward."""
    logits = walk.block.tensor(op.saved[0])
    dims = tuple(Dim(name=d, size=s) for d, s in zip(logits.dims, logits.shape, strict=True))
    stats = [operand for operand in op.inputs if operand.tensor in op.saved[1:]]
    source = Op(
        name=op.name, kind="pointwise", cost="cross_entropy", dims=dims, inputs=(), outputs=(),
        attributes=op.attributes,
    )  # fmt: skip
    operand = Operand(tensor=logits.name, dims=logits.dims)
    walk.emit(source, "d", "backward", [operand], inputs=[operand, *stats], flops=4.0)


RULES: dict[str, Callable[[_Walk, Op], None]] = {
    "contraction": _contraction_inputs,
    "conv2d": _conv2d,
    "attention": _attention,
    "pointwise": _pointwise,
    "softmax": _pointwise,
    "dropout": _pointwise,
    "norm": _norm,
    "linear": _linear,
    "residual": _residual,
    "bias": _bias,
    "embedding": _embedding,
    "join": _join,
    "cross": _cross,
    "pair_loss": _pair_loss,
    "sum": _sum,
    "select": _select,
    "concat": _concat,
    "mean": _mean,
    "cross_entropy": _cross_entropy,
    "none": lambda walk, op: None,
}
