"""The rules by which an operator's gradients are derived, by their name in `Op.grad`."""

from __future__ import annotations

from collections.abc import Callable

from foretrain.graph.gradient_walk import Walk
from foretrain.graph.ir import Dim, Op, Operand

#: Rules that start a gradient instead of passing one on.
LOSSES = ("cross_entropy", "mean", "pair_loss")


def _is_weight(walk: Walk, operand: Operand) -> bool:
    return walk.block.tensor(operand.tensor).role == "weight"


def contraction_inputs(walk: Walk, op: Op) -> None:
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


def contraction_weights(walk: Walk, op: Op) -> None:
    """dw = dy x for every operand that is a weight, and the bias gradient as a column sum."""
    main = op.inputs[:2]
    for i, target in enumerate(main):
        if _is_weight(walk, target):
            walk.emit(
                op, "dw", "backward_weight", [target],
                inputs=[walk.dy(op), main[1 - i]], linear=(0, 1), flops=op.flops,
                fuse=f"{op.fuse}.dw" if op.fuse else None,
            )  # fmt: skip


def contraction_biases(walk: Walk, op: Op) -> None:
    """The gradient of a bias is a column sum of dy."""
    for bias in op.inputs[2:]:
        _bias_grad(walk, op, bias)


def _bias_grad(walk: Walk, op: Op, bias: Operand) -> None:
    dy = walk.dy(op)
    dims = tuple(op.dim(name) for name in dy.dims)
    source = Op(
        name=op.name, kind="reduction", cost="bias_grad", dims=dims,
        inputs=(), outputs=(), attributes={},
    )  # fmt: skip
    walk.emit(source, "db", "backward_weight", [bias], inputs=[dy], linear=(0,), flops=1.0)


def _conv2d(walk: Walk, op: Op) -> None:
    """Backward data (not for the images), backward weight, and the bias gradient as a sum."""
    contraction_inputs(walk, op)
    contraction_weights(walk, op)
    contraction_biases(walk, op)


def _attention(walk: Walk, op: Op) -> None:
    """One kernel for dq, dk, dv (and a table of positions): 2.5 times the forward FLOP."""
    walk.emit(
        op, "d", "backward", list(op.inputs),
        inputs=[walk.dy(op), *walk.saved(op)], flops=2.5 * op.flops,
    )  # fmt: skip


def _pointwise(walk: Walk, op: Op) -> None:
    targets = [operand for operand in op.inputs if walk.differentiable(operand)]
    walk.emit(op, "d", "backward", targets, inputs=[walk.dy(op), *walk.saved(op)], flops=op.flops)


def _norm(walk: Walk, op: Op) -> None:
    """dx and the gradients of the scale (and shift) in one operator."""
    saved = walk.saved(op)
    weights = [operand for operand in op.inputs if _is_weight(walk, operand)]
    read = {operand.tensor for operand in saved}
    scale = [operand for operand in weights[:1] if operand.tensor not in read]
    walk.emit(
        op, "d", "backward", [op.inputs[0], *weights],
        inputs=[walk.dy(op), *saved, *scale], flops=op.flops,
    )  # fmt: skip


def _linear(walk: Walk, op: Op) -> None:
    """A linear map of one operand: its transpose, through which partial sums pass too."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[walk.dy(op)], linear=(0,),
              flops=op.flops)  # fmt: skip


def _residual(walk: Walk, op: Op) -> None:
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


def _bias(walk: Walk, op: Op) -> None:
    """out = x + table: dx is dy itself; the table's gradient sums over what it does not index."""
    dy = walk.dy(op)
    walk.contribute(op.inputs[0].tensor, dy.tensor)
    for table in (operand for operand in op.inputs[1:] if _is_weight(walk, operand)):
        walk.emit(op, "db", "backward_weight", [table], inputs=[dy], linear=(0,),
                  cost="bias_grad", flops=1.0)  # fmt: skip


def _embedding(walk: Walk, op: Op) -> None:
    """Rows of the table receive the gradients of the tokens that read them."""
    tokens, table = op.inputs[0], op.inputs[1]
    walk.emit(op, "dw", "backward_weight", [table], inputs=[walk.dy(op), tokens], flops=1.0)


def _join(walk: Walk, op: Op) -> None:
    """Parts side by side: one kernel hands every part its piece of dy."""
    walk.emit(op, "d", "backward", op.inputs, inputs=[walk.dy(op)], cost="split")


def _cross(walk: Walk, op: Op) -> None:
    """out = x0 w + x: x takes dy itself, x0 and w a product with what was saved."""
    dy = walk.dy(op)
    x0, w, x = op.inputs
    walk.emit(op, "d", "backward", [x0, w], inputs=[dy, *walk.saved(op)[:2]], flops=2.0)
    walk.contribute(x.tensor, dy.tensor)


def _pair_loss(walk: Walk, op: Op) -> None:
    """The loss of predictions and targets, element by element."""
    y, targets = op.inputs
    walk.emit(op, "d", "backward", [y], inputs=[y, targets], flops=4.0)


def _sum(walk: Walk, op: Op) -> None:
    """out = x + y: both gradients are dy itself, without a kernel."""
    dy = walk.dy(op)
    for operand in op.inputs:
        walk.contribute(operand.tensor, dy.tensor)


def _select(walk: Walk, op: Op) -> None:
    """Chosen rows: their gradients are scattered into zeros."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[walk.dy(op)], linear=(0,),
              cost="scatter")  # fmt: skip


def _concat(walk: Walk, op: Op) -> None:
    """out = (token, x): x takes its part of dy as a copy, the token the sum of its rows."""
    x, token = op.inputs
    walk.emit(op, "d", "backward", [x], inputs=[walk.dy(op)], linear=(0,))
    walk.emit(op, "db", "backward_weight", [token], inputs=[walk.dy(op)], linear=(0,),
              cost="select")  # fmt: skip


def _mean(walk: Walk, op: Op) -> None:
    """The loss is the mean of x: its gradient is a constant."""
    walk.emit(op, "d", "backward", [op.inputs[0]], inputs=[], cost="zero")


def _cross_entropy(walk: Walk, op: Op) -> None:
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


RULES: dict[str, Callable[[Walk, Op], None]] = {
    "contraction": contraction_inputs,
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
