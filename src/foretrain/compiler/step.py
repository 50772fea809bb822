"""The optimizer step of one pipeline stage: the rest of the reductions, norm, update, gathers."""

from __future__ import annotations

from collections.abc import Sequence

from foretrain.compiler.launches import LaunchList, StageContext, Tie
from foretrain.compiler.offload import host_step
from foretrain.compiler.optimizer import (
    buckets_segment,
    norm_segment,
    parts_segment,
    update_segment,
)
from foretrain.compiler.parameters import WeightGroup, merge
from foretrain.compiler.states import updated_elements
from foretrain.compiler.weights import WeightTraffic
from foretrain.program import Comm, CommEvent, Run, Segment


def write_step(launches: LaunchList, weights: WeightTraffic) -> None:
    """Writes the rest of the reductions, the tied weights, norm, update, parameter gather."""
    c = launches.context
    weights.flush(everything=True)
    ready = tuple(weights.reductions)
    weights.reductions += [_tied(launches, tie, ready) for tie in c.ties]
    if c.optimizer == "none":
        return
    groups = merge(group for unit in c.units() for group in unit.groups)
    elements = updated_elements(c)
    kept = sum(g.share(_zeroed(g), c.mesh) for g in groups)
    after = weights.reductions
    whole_sums = sum(g.elements for g in groups if _zeroed(g) != g.signature.accumulated)
    if whole_sums and after:  # copied to the buffers they are reduced in: read and written
        segment = buckets_segment(c.table, whole_sums, 2.0, c.precision)
        after = [_run_segment(launches, segment, after)]
    if c.stack.bucket_passes and after:
        reduced = sum(group.elements for group in groups)
        segment = buckets_segment(c.table, reduced, c.stack.bucket_passes, c.precision)
        after = [_run_segment(launches, segment, after)]
    host: list[int] = []
    if c.tree.runtime.offload != "none":
        host = [host_step(launches, tuple(after) or last_run(launches))]
        here = 1.0 - c.tree.runtime.offload_fraction
        elements, kept = round(here * elements), round(here * kept)
        if not elements:
            weights.publish_after(host)
            return
    whole = c.stack.whole_gradients and not c.stack.flat_step  # of all gradients, or of a shard
    clipped = kept if whole else elements
    if c.stack.grad_norm:
        norm = _run_segment(launches, norm_segment(c.table, clipped, c.precision), after)
        after = [_norm_all_reduce(launches, norm)]
    update = update_segment(
        c.table, c.optimizer, elements, kept, c.precision, c.factored, _step_bytes(c),
        clipped=clipped,
    )  # fmt: skip
    run = _run_segment(launches, update, after, sync=c.stack.grad_norm)
    gathers = weights.publish_after([run, *host])
    if gathers and c.stack.zero_gather_us:
        ranks = max(c.mesh.size(group.signature.master) for group in groups)
        count = sum(len(i.lowered.weights) for chunk in c.chunks for i in chunk)
        whole = sum(group.elements for group in groups)
        segment = parts_segment(c.table, whole, ranks * count, c.precision)
        _run_segment(launches, segment, gathers)


def _zeroed(group: WeightGroup) -> Sequence[str]:
    """The layout of the gradients that the next step sets to zero.

    Whole sums beside sharded weights (no_sync of FSDP) are freed as they are reduced.
    """
    signature = group.signature
    if signature.stored and not signature.accumulated:
        return signature.master
    return signature.accumulated


def last_run(launches: LaunchList) -> tuple[int, ...]:
    """Returns the handle of the last computation."""
    entries = launches.entries
    return (max(i for i, entry in enumerate(entries) if isinstance(entry, Run)),)


def _step_bytes(c: StageContext) -> float:
    """Bytes per parameter that live only while the update runs.

    Adam with foreach kernels makes the denominators of all parameters before it divides.
    """
    foreach = c.stack.optimizer == "foreach" and c.optimizer in ("adam", "adamw")
    flat = 4.0 if c.stack.flat_step else 0.0
    return flat + (c.precision.bytes("master") if foreach else 0.0)


def _run_segment(
    launches: LaunchList, segment: Segment, after: Sequence[int], *, sync: bool = False
) -> int:
    segments = launches.context.segments
    known = next((i for i, other in enumerate(segments) if other == segment), None)
    if known is None:
        segments.append(segment)
        known = len(segments) - 1
    return launches.add(Run(segments=(known,), slot="step", after=tuple(after), host_sync=sync))


def _norm_all_reduce(launches: LaunchList, norm: int) -> int:
    """The squared norm is summed over all ranks: every stage waits for the slowest here."""
    c = launches.context
    event = CommEvent(
        collective="all_reduce",
        bytes=4.0,
        dtype="fp32",
        ranks=tuple(range(c.mesh.world_size)),
    )
    return launches.add(
        Comm(
            label="gradient norm all-reduce",
            event=launches.event(event),
            stream="reduce",
            category="dp",
            axes=c.mesh.axes,
            after=(norm,),
            key="gradient norm",
        )
    )


def _tied(launches: LaunchList, tie: Tie, ready: tuple[int, ...]) -> int:
    """The gradient of weights that stand on several stages."""
    c = launches.context
    stride = c.mesh.stride("pp")
    ranks = tuple(stage * stride for stage in tie.stages)
    precision = c.precision
    event = CommEvent(
        collective="all_reduce",
        bytes=tie.elements * precision.bytes("grad_accumulate"),
        dtype=precision.grad_accumulate,
        ranks=ranks,
        sharers=min(stride, c.groups.devices_per_node),
    )
    return launches.add(
        Comm(
            label="tied embedding gradient all-reduce",
            event=launches.event(event),
            stream="tied",
            category="pp",
            axes=("pp",),
            after=ready,
            key=f"tied embedding {','.join(map(str, tie.stages))}",
        )
    )
