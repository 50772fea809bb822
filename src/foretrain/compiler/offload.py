"""Offload to the host: what leaves the device, and the transfers that bring it back.

`optimizer`   master copy, moments and the gradients that the host reads live on the host. After
              the reduction the gradients go down, the CPU updates, the weights come up; of a share
              of the parameters where the plan says so, and the device updates the others meanwhile.
`parameters`  the shards of the weights too: every gather is preceded by a copy of the shard.

Copies run on streams of their own (host-to-device, device-to-host) over pinned buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretrain.compiler.launches import LaunchList, StageContext
from foretrain.compiler.optimizer import copy_bytes, state_bytes, update_bytes
from foretrain.compiler.parameters import WeightGroup, merge
from foretrain.program import Comm, CommEvent

MODES = ("none", "optimizer", "parameters")


def moves_gradients(context: StageContext) -> bool:
    """Returns whether reduced gradients wait on the host: they are sharded and kept there."""
    shards = any(g.signature.accumulated for unit in context.units() for g in unit.groups)
    return context.tree.runtime.offload != "none" and shards


def host_bytes(context: StageContext, activations: float) -> dict[str, float]:
    """Returns what one rank keeps in host memory, by part; empty without offload."""
    waiting = {"activations": activations} if activations else {}
    mode = context.tree.runtime.offload
    if mode == "none" or context.optimizer == "none":
        return waiting
    precision, mesh = context.precision, context.mesh
    groups = merge(group for unit in context.units() for group in unit.groups)
    updated = sum(g.share(g.signature.master, mesh) for g in groups)
    updated *= context.tree.runtime.offload_fraction
    states = state_bytes(context.optimizer, precision, context.factored)
    parts = {"optimizer": updated * states, "gradients": updated * precision.bytes("master")}
    if mode == "parameters":
        stored = sum(g.share(g.signature.stored, mesh) for g in groups)
        parts["weights"] = stored * precision.bytes("weight")
    return {**parts, **waiting}


def moved_off(context: StageContext, parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the device's persistent parts without what lives on the host."""
    mode = context.tree.runtime.offload
    gone = {"optimizer": mode != "none", "weights": mode == "parameters"}
    gone["gradients"] = moves_gradients(context)
    kept = 1.0 - context.tree.runtime.offload_fraction
    return {
        part: kept * value if gone.get(part.split()[-1]) else value for part, value in parts.items()
    }


def copy(
    launches: LaunchList,
    num_bytes: float,
    *,
    label: str,
    down: bool,
    after: tuple[int, ...] = (),
    taken: Mapping[str, float] | None = None,
    freed: Mapping[str, float] | None = None,
) -> int:
    """Returns the handle of a copy to the host (`down`) or to the device.

    Device memory `taken` when it starts and `freed` when it ends, by part.
    """
    return _host_work(
        launches,
        "device_to_host" if down else "host_to_device",
        num_bytes,
        label=label,
        stream="device-to-host" if down else "host-to-device",
        after=after,
        delta_start=taken,
        delta_end={part: -value for part, value in (freed or {}).items()},
    )


def host_step(launches: LaunchList, after: tuple[int, ...]) -> int:
    """Returns the handle of the last transfer of an optimizer step on the host."""
    c = launches.context
    groups: tuple[WeightGroup, ...] = merge(g for unit in c.units() for g in unit.groups)
    updated = sum(g.share(g.signature.master, c.mesh) for g in groups)
    updated *= c.tree.runtime.offload_fraction
    ready = after
    if not moves_gradients(c):
        size = updated * c.precision.bytes("grad_accumulate")
        ready = (copy(launches, size, label="gradients to the host", down=True, after=after),)
    per_parameter = update_bytes(c.optimizer, c.precision, c.factored) + copy_bytes(c.precision)
    update = _host_work(
        launches,
        "host_update",
        updated * per_parameter,
        label=f"{c.optimizer} update on the host",
        stream="cpu",
        after=ready,
    )
    if c.tree.runtime.offload == "parameters":
        return update
    size = updated * c.precision.bytes("weight")
    return copy(launches, size, label="updated weights to the device", down=False, after=(update,))


def _host_work(
    launches: LaunchList, kind: str, num_bytes: float, *, label: str, stream: str,
    after: tuple[int, ...], delta_start: Mapping[str, float] | None = None,
    delta_end: Mapping[str, float] | None = None,
) -> int:  # fmt: skip
    event = CommEvent(
        collective=kind,  # pyright: ignore[reportArgumentType]
        bytes=num_bytes,
        dtype="fp32",
        ranks=(0,),
    )
    return launches.add(
        Comm(
            label=label,
            event=launches.event(event),
            stream=stream,
            category="optimizer" if kind == "host_update" else "copy",
            after=after,
            delta_start=delta_start or {},
            delta_end=delta_end or {},
        )
    )
