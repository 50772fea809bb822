"""The Plan: the few knobs that users know. A preset expands it into a StrategyTree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Preset = Literal["megatron", "fsdp", "deepspeed", "ddp", "dlrm", "plain"]
PRESETS: tuple[str, ...] = ("megatron", "fsdp", "deepspeed", "ddp", "dlrm", "plain")
SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b", "interleaved")
OFFLOAD: tuple[str, ...] = ("none", "optimizer", "parameters")
RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
#: Parts of a layer that Megatron recomputes on their own (`recompute_modules`).
RECOMPUTE_MODULES: tuple[str, ...] = ("core_attn", "layernorm", "mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in backward; `layers` limits it to the first n layers of a stage.

    `modules` are the parts of a layer that selective recompute repeats, where it is not the stack
    that says so.
    """

    mode: str = "none"
    layers: int | None = None
    modules: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """Returns the setting of a layer: the mode, or its modules joined by +."""
        return "+".join(self.modules) or self.mode


def recompute_modules(word: str) -> tuple[str, ...]:
    """Returns the modules that the setting of a layer names, () for a mode or an unknown word."""
    modules = tuple(word.split("+"))
    return modules if all(module in RECOMPUTE_MODULES for module in modules) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What may run beside computation; None: what the stack does."""

    grad: bool | None = None
    param: bool | None = None
    tp: bool | None = None
    p2p: bool | None = None
    tables: bool | None = None  # the exchange of embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees and choices. `dp` None is derived; `shard` None shards over all of dp.

    `tables` maps patterns of table names to a way of strategy/tables.py, or to the rank that holds
    them; `assignment` says how the other table-wise ones get their ranks. `overrides` maps a path
    pattern ("layers.*.mlp.down") to node settings, see strategy/tree.py.
    `tree` replaces the preset's expansion when given (the output of `explain plan`).
    """

    preset: str = "megatron"
    tp: int = 1
    pp: int = 1
    dp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    shard: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    interleave: int = 1
    schedule: str | None = None
    in_flight: int | tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None
    recompute: Recompute = field(default_factory=Recompute)
    reshard: bool = True  # FSDP: drop gathered weights after forward
    no_sync: bool | None = None  # sharded gradients are summed whole and reduced once per step
    offload: str = "none"
    optimizer_offload_fraction: float = 1.0  # of the parameters that the CPU updates
    cpu_offloading_num_layers: int = 0  # the first layers whose activations wait on the host
    expandable_segments: bool | None = None  # of the allocator; None: what the stack does
    bucket_mib: float | None = None
    prefetch: int = 1
    overlap: Overlap = field(default_factory=Overlap)
    order: tuple[str, ...] | None = None
    tables: Mapping[str, str | int] = field(default_factory=dict[str, "str | int"])
    assignment: str = "greedy-size"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    tree: Mapping[str, Any] | None = None
