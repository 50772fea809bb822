"""Two training steps of nanotron's first stage, tensor by tensor, through the caching allocator.

Usage: python studies/memory/nanotron_replay.py measured_runs.csv.gz [EVERY]

What is allocated follows the public code of nanotron (models/llama.py, tensor_parallel/functional,
optim/gradient_accumulator, optim/zero, distributed.py). Nothing is fitted. Printed for each way of
treating the buffers of collectives: median error, nine in ten, bias of the reserved memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from allocator import MIB, Allocator, Block
from nanotron_memory import number, read, say, spec_of

from foretrain.frontends.spec import ModelSpec
from foretrain.strategy.stages import stages_by_cost
from foretrain.units import GIB

Saved = dict[str, Block]


@dataclass(kw_only=True)
class Stage:
    """The first stage of one run; `waits` keeps buffers of collectives until the host waits."""

    row: Mapping[str, str]
    waits: bool
    memory: Allocator = field(default_factory=Allocator)
    waiting: list[Block] = field(default_factory=list[Block])
    ahead: bool = False

    def __post_init__(self) -> None:
        self.spec: ModelSpec = spec_of(self.row)
        self.tp, self.pp, self.dp = (number(self.row, k) for k in ("tp", "pp", "dp"))
        self.steps = number(self.row, "ga_steps")
        self.layers = stages_by_cost(self.spec, self.pp)[0] if self.pp > 1 else self.spec.layers
        self.head = self.pp == 1
        self.tokens = number(self.row, "mbs") * number(self.row, "seq_len")
        h, f = self.spec.hidden, self.spec.ffn
        self.whole = 2 * self.tokens * h  # a residual of all tokens
        self.part = self.whole // self.tp
        self.wide = 2 * self.tokens * f // self.tp
        self.logits = self.tokens * self.spec.vocab // self.tp
        layer = (
            h,
            3 * h * h // self.tp,
            h * h // self.tp,
            h,
            2 * f * h // self.tp,
            f * h // self.tp,
        )
        table = self.spec.vocab * h // self.tp
        untied = self.head and not self.spec.tied
        head = ((h, table) if untied else (h,)) if self.head else ()
        self.weights = (table, *(layer * self.layers), *head)

    def run(self) -> Allocator:
        """Returns the allocator after two steps; optimizer states come in the first."""
        take, count = self.memory.take, sum(self.weights)
        zero = self.row["zero_stage"] == "1"
        shards = self.dp if zero else 1
        for weight in self.weights:
            take(2 * weight)
        take(4 * count)
        take(4 * count // shards)
        if self.dp > 1 and not zero:
            self._buckets()
        if self.tp > 1:  # the global buffers of gathered inputs and gradients
            take(self.whole)
            take(self.whole)
        for step in range(2):
            self._micro_batches()
            if step == 0:
                for weight in self.weights:
                    take(4 * weight // shards)
                    take(4 * weight // shards)
            if zero and self.dp > 1:
                flat = [take(2 * count // self.dp) for _ in range(self.dp + 1)]
                for block in (*flat, take(2 * count)):
                    self.memory.give(block)
        return self.memory

    def _buckets(self) -> None:
        size = 0
        for weight in reversed(self.weights):
            size += 2 * weight
            if size >= 25 * MIB:
                self.memory.take(size)
                size = 0
        if size:
            self.memory.take(size)

    def _micro_batches(self) -> None:
        """One forward, one backward; a few micro-batches reach the steady state."""
        alive = min(self.pp, self.steps)
        flight: list[tuple[list[Saved], Block | None]] = []
        self.ahead = False  # a step begins with a device that has nothing to do
        for number_of in range(min(self.steps, alive + 3)):
            flight.append(self._forward())
            if number_of >= alive - 1:
                self._catch_up()
                self.ahead = True
                self._backward(*flight.pop(0))
        while flight:
            self._catch_up()
            self._backward(*flight.pop(0))
        self._catch_up()

    def _catch_up(self) -> None:
        for block in self.waiting:
            self.memory.give(block)
        self.waiting.clear()

    def _sent(self, block: Block) -> None:
        """Frees what a collective reads: at once, or when the host has waited for the device."""
        if self.waits and self.ahead:
            self.waiting.append(block)
        else:
            self.memory.give(block)

    def _reduced(self) -> Block:
        """A row-parallel product: whole, then this rank's part."""
        if self.tp == 1:
            return self.memory.take(self.part)
        whole = self.memory.take(self.whole)
        part = self.memory.take(self.part)
        self._sent(whole)
        return part

    def _forward(self) -> tuple[list[Saved], Block | None]:
        take, give = self.memory.take, self.memory.give
        x = self._reduced()
        layers: list[Saved] = []
        for _ in range(self.layers):
            kept: Saved = {"x": x, "normed": take(self.part)}
            joined = take(3 * self.part)
            split = take(3 * self.part)
            give(joined)
            pair = take(2 * self.part)
            kept["kv"] = take(2 * self.part)
            give(pair)
            kept["q"] = take(self.part)
            give(split)
            kept["out"] = take(self.part)
            kept["lse"] = take(4 * self.tokens * self.spec.heads // self.tp)
            projected = self._reduced()
            kept["x2"] = take(self.part)
            give(projected)
            kept["normed2"] = take(self.part)
            kept["gate_up"] = take(2 * self.wide)
            kept["silu"], kept["product"] = take(self.wide), take(self.wide)
            projected = self._reduced()
            x = take(self.part)
            give(projected)
            layers.append(kept)
        if not self.head:
            return layers, x
        normed, low = take(self.part), take(2 * self.logits)
        single = take(4 * self.logits)
        give(low)
        softmax = take(4 * self.logits)
        give(single)
        layers.append({"x": x, "normed": normed, "softmax": softmax})
        return layers, None

    def _backward(self, layers: list[Saved], sent: Block | None) -> None:
        take, give = self.memory.take, self.memory.give
        gradients: list[Block] = []
        gradient = take(self.part)
        give(sent)
        for kept in reversed(layers):
            if "softmax" in kept:
                self._head_backward(kept, gradients)
                continue
            self._mlp_backward(kept, gradients)
            summed = take(self.part)
            give(gradient)
            give(kept["x2"])
            self._attention_backward(kept, gradients)
            gradient = take(self.part)
            give(summed)
            give(kept["x"])
        gradients.append(take(2 * self.spec.vocab * self.spec.hidden // self.tp))
        give(gradient)
        for block in gradients:
            give(block)

    def _head_backward(self, kept: Saved, gradients: list[Block]) -> None:
        take, give = self.memory.take, self.memory.give
        low = take(2 * self.logits)
        give(kept["softmax"])
        gradients.append(take(2 * self.spec.vocab * self.spec.hidden // self.tp))
        give(self._input_gradient(low))
        give(kept["normed"])
        give(kept["x"])

    def _mlp_backward(self, kept: Saved, gradients: list[Block]) -> None:
        take, give = self.memory.take, self.memory.give
        matrix = 2 * self.spec.hidden * self.spec.ffn // self.tp
        product = take(self.wide)
        gradients.append(take(matrix))
        give(kept["product"])
        first, second = take(self.wide), take(self.wide)
        give(product)
        give(kept["silu"])
        gate = take(self.wide)
        give(first)
        both = take(2 * self.wide)
        for block in (gate, second, kept["gate_up"]):
            give(block)
        gradients.append(take(2 * matrix))
        give(self._input_gradient(both))
        give(kept["normed2"])

    def _attention_backward(self, kept: Saved, gradients: list[Block]) -> None:
        take, give = self.memory.take, self.memory.give
        matrix = 2 * self.spec.hidden * self.spec.hidden // self.tp
        out = take(self.part)
        gradients.append(take(matrix))
        scores = [take(self.part), take(2 * self.part), take(2 * self.part)]
        give(take(2 * self.part))  # dq accumulates in fp32
        for name in ("q", "out", "lse", "kv"):
            give(kept[name])
        give(out)
        stacked = take(3 * self.part)
        for block in scores:
            give(block)
        joined = take(3 * self.part)
        give(stacked)
        gradients.append(take(3 * matrix))
        give(self._input_gradient(joined))
        give(kept["normed"])

    def _input_gradient(self, output: Block) -> Block:
        """The gradient of a column-parallel input: whole, then this rank's part."""
        found = self._reduced()
        self.memory.give(output)
        return found


def main() -> None:
    """Prints how near the replay comes, with and without waiting buffers."""
    rows = read(Path(sys.argv[1]))[:: int(sys.argv[2]) if len(sys.argv) > 2 else 8]
    groups = {
        "tp = 1": [r for r in rows if number(r, "tp") == 1],
        "tp > 1": [r for r in rows if number(r, "tp") > 1],
    }
    for name, chosen in groups.items():
        for waits in (False, True):
            _report(f"{name}, buffers {'wait' if waits else 'are free at once'}", chosen, waits)


def _report(name: str, rows: Sequence[Mapping[str, str]], waits: bool) -> None:
    ratios = sorted(
        Stage(row=r, waits=waits).run().reserved / GIB / float(r["peak_mem_gib"]) - 1 for r in rows
    )
    errors = sorted(map(abs, ratios))
    say(f"{name}: {len(rows)} rows, median {median(errors):.3f}, nine in ten "
        f"{errors[int(0.9 * len(errors))]:.3f}, bias {median(ratios):+.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
