"""Prints how much more than its live bytes a PyTorch process needs, by the allocator's rules.

    python studies/memory/bert_replay.py

Replays three steps of BERT fine-tuning, tensor by tensor, through `allocator.py` on a device that
is just large enough: before a request fails, all segments without a live block are returned. What
is allocated follows the public code (NVIDIA DeepLearningExamples, modeling.py: what Python holds
and what autograd saves; gradients appear in the first backward, optimizer states in the first
step). The least device in which the steps run, over the most live bytes, is what no such run can do
without: `fragmentation` of the stack pytorch-apex. Nothing is fitted and no measured row is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from allocator import MIB, Allocator, Block

from foretrain.units import GIB

#: Layers, hidden size, heads, samples and bytes of a value: batches for devices of 16 to 80 GB.
RUNS = (
    (24, 1024, 16, 8, 4), (24, 1024, 16, 16, 4), (24, 1024, 16, 28, 2), (24, 1024, 16, 16, 2),
    (12, 768, 12, 48, 4), (12, 768, 12, 96, 2), (24, 1024, 16, 64, 4), (24, 1024, 16, 100, 2),
)  # fmt: skip
TOKENS = 384
VOCAB = 30522


class OutOfMemoryError(Exception):
    """No segment can be had."""


class Device(Allocator):
    """An allocator on a device of `capacity` bytes."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity

    def _segment(self, size: int, *, small: bool) -> Block:
        before = self.reserved
        block = super()._segment(size, small=small)
        if self.reserved > self.capacity:
            for pool in self._free.values():
                for _, _, whole in [p for p in pool if p[2].before is None and p[2].after is None]:
                    self._drop(whole)
                    self.reserved -= whole.size
        if self.reserved > self.capacity:
            self.reserved = before
            raise OutOfMemoryError
        return block


def parameters(layers: int, hidden: int) -> list[int]:
    """Returns the elements of every parameter."""
    matrices = [*[hidden * hidden, hidden] * 4, *[4 * hidden * hidden] * 2]
    layer = [*matrices, *[hidden] * 4, 4 * hidden, hidden]
    return [VOCAB * hidden, 512 * hidden, 2 * hidden, hidden, hidden, *layer * layers]


@dataclass(slots=True)
class Step:
    """The tensors of a training step, by name; `size` of an activation of the hidden size."""

    memory: Device
    size: int
    scores: int
    value: int
    held: dict[str, Block] = field(default_factory=dict[str, Block])

    def new(self, **sizes: int) -> None:
        """Makes tensors."""
        for name, size in sizes.items():
            self.held[name] = self.memory.take(size)

    def drop(self, *names: str) -> None:
        """Frees tensors."""
        for name in names:
            self.memory.give(self.held.pop(name))

    def keep(self, layer: int, *names: str) -> None:
        """Marks tensors as saved by a layer."""
        for name in names:
            self.held[f"{layer}.{name}"] = self.held.pop(name)

    def forward(self, layer: int) -> None:
        """Runs a layer forward; x is its input, saved by whoever made it."""
        t, a, v = self.size, self.scores, self.value
        self.new(ql=t, kl=t, vl=t, q=t, k=t, s0=a, s1=a)
        self.drop("s0")
        self.new(s2=a)
        self.drop("s1")
        self.new(soft=a, probs=a, pmask=a // v, v=t, ctx=t, ctxc=t)
        self.drop("s2", "ql", "kl", "vl", "ctx")
        self.new(d0=t, d1=t, dmask=t // v)
        self.drop("d0")
        self.new(sum1=t)
        self.drop("d1")
        self.new(ln1=t, up=4 * t, act=4 * t, o0=t, o1=t, omask=t // v)
        self.drop("o0")
        self.new(sum2=t)
        self.drop("o1")
        self.new(x=t)
        self.keep(layer, "q", "k", "soft", "probs", "pmask", "v", "ctxc", "dmask", "sum1", "ln1")
        self.keep(layer, "up", "act", "omask", "sum2", "x")

    def backward(self, layer: int) -> None:
        """Runs a layer backward; g is the gradient of its output."""
        t, a = self.size, self.scores

        def saved(*names: str) -> list[str]:
            return [f"{layer}.{name}" for name in names]

        self.drop(*saved("x"))
        self.new(g1=t)
        self.drop("g", *saved("sum2"))
        self.new(g2=t, gact=4 * t)
        self.drop("g2", *saved("omask", "act"))
        self.new(gup=4 * t)
        self.drop("gact", *saved("up"))
        self.new(g3=t, g4=t)
        self.drop("gup", "g1", "g3", *saved("ln1"))
        self.new(g5=t)
        self.drop("g4", *saved("sum1"))
        self.new(g6=t, gctx=t)
        self.drop("g6", *saved("dmask", "ctxc"))
        self.new(gprobs=a, gv=t)
        self.drop("gctx", *saved("probs", "v"))
        self.new(gsoft=a)
        self.drop("gprobs", *saved("pmask"))
        self.new(gs=a)
        self.drop("gsoft", *saved("soft"))
        self.new(gs1=a)
        self.drop("gs")
        self.new(gq=t, gk=t)
        self.drop("gs1", *saved("q", "k"))
        self.new(gx=t, gy=t, gz=t, g=t)
        self.drop("gx", "gy", "gz", "gq", "gk", "gv", "g5")


def run(capacity: int, layers: int, hidden: int, heads: int, samples: int, value: int) -> int:
    """Returns the most live bytes of three steps. Raises OutOfMemoryError."""
    memory = Device(capacity)
    shapes = parameters(layers, hidden)
    for n in shapes:
        memory.take(value * n)
    step = Step(
        memory, samples * TOKENS * hidden * value,
        samples * heads * TOKENS * TOKENS * value, value,
    )  # fmt: skip
    for number in range(3):
        step.new(x=step.size)
        step.keep(-1, "x")
        for layer in range(layers):
            step.forward(layer)
        step.new(g=step.size)
        for layer in reversed(range(layers)):
            step.backward(layer)
            if number == 0:  # gradients stay from the first backward on
                for n in shapes[5 + 16 * layer : 21 + 16 * layer]:
                    memory.take(value * n)
        step.drop("g", "-1.x")
        if number == 0:  # the first step makes the optimizer's states, of fp16 a master copy too
            for n in shapes:
                for _ in range(2 if value == 4 else 3):
                    memory.take(4 * n)
    return int(memory.allocated)


def needed(live: int, arguments: tuple[int, int, int, int, int]) -> int:
    """Returns the least capacity in which a run ends, to 16 MiB."""
    low, high = live // (16 * MIB), 2 * live // (16 * MIB)
    while low < high:
        middle = (low + high) // 2
        try:
            run(middle * 16 * MIB, *arguments)
            high = middle
        except OutOfMemoryError:
            low = middle + 1
    return low * 16 * MIB


def lines() -> Iterator[str]:
    """Yields a line for each run."""
    for arguments in RUNS:
        live = run(2**50, *arguments)
        least = needed(live, arguments)
        layers, hidden, _, samples, value = arguments
        yield (
            f"{layers:2d} layers of {hidden}, {samples:3d} samples, {8 * value} bits: live "
            f"{live / GIB:5.1f} GiB, needed {least / GIB:5.1f}, holes {least / live - 1:.1%}\n"
        )


if __name__ == "__main__":
    sys.stdout.writelines(lines())
