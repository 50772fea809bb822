"""The pipeline: a run becomes a graph, a tree, a program, a simulation, a result."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from foretrain.compiler.lower import Job, compile_program
from foretrain.cost.adjust import Adjustments, adjust_prices
from foretrain.cost.calibration import tables_of_user
from foretrain.cost.model import CostModel, build_cost_model
from foretrain.cost.prices import Prices
from foretrain.cost.user_calibration import UserCalibration, current_calibration
from foretrain.cost.user_files import calibrated_by, read_files
from foretrain.errors import InputError, Problem
from foretrain.frontends.build import build_graph, flops_per_sample
from foretrain.graph.ir import Graph
from foretrain.program import ComputeEvent, Event, Program, Run
from foretrain.run.spec import RunSpec
from foretrain.simulator.device_memory import device_memory, host_used, worst_memory
from foretrain.simulator.result import MemoryResult, Result
from foretrain.simulator.simulate import (
    Simulated,
    event_costs,
    event_times,
    simulate,
    step_band,
)
from foretrain.simulator.timeline import build_timeline
from foretrain.strategy.presets import build_tree
from foretrain.strategy.tree import StrategyTree
from foretrain.units import GIB

CATEGORIES: tuple[str, ...] = ("tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The stages of a run before pricing."""

    graph: Graph
    tree: StrategyTree
    program: Program


def data_parallel(run: RunSpec) -> int:
    """Returns the number of data-parallel replicas of a run."""
    return run.cluster.world_size // (run.plan.tp * run.plan.pp * run.plan.cp)


def compile_run(run: RunSpec, *, by_module: bool = False) -> Compiled:
    """Returns graph, strategy tree and program of a run; live bytes by part, or by module."""
    dp = data_parallel(run)
    training = run.training
    graph = build_graph(
        run.model,
        batch=training.microbatch * dp,
        sequence=training.sequence,
        target_sequence=training.target_sequence,
        image=training.image,
        attention=run.stack.attention,
        fused_scores=run.stack.fused_scores,
    )
    tree = build_tree(
        run.plan,
        run.model,
        world_size=run.cluster.world_size,
        accumulation=training.accumulation(dp),
        stack=run.stack,
    )
    job = Job(
        precision=training.roles,
        optimizer=training.optimizer,
        stack=run.stack,
        devices_per_node=run.cluster.devices_per_node,
        samples_per_step=training.global_batch,
        table_optimizer=training.table_optimizer,
        by_module=by_module,
        fp8_layouts=run.cluster.device.fp8_layouts,
    )
    return Compiled(graph=graph, tree=tree, program=compile_program(graph, tree, job))


def alive_by_module(run: RunSpec) -> tuple[Mapping[str, float], ...]:
    """Returns for each rank class what is alive at its peak, bytes by module.

    The same simulation as `predict` with another booking: the sums are those of the parts.
    """
    compiled = compile_run(run, by_module=True)
    model = build_cost_model(run.cluster, run.stack, curves=current_calibration().curves)
    overlap = {name: model.overlap(name) for name in CATEGORIES}
    times = event_times(model.price(compiled.program.events), overlap, plain=False)
    return tuple(peak.parts for peak in simulate(compiled.program, times).peaks)


def predict(
    run: RunSpec,
    *,
    flat: bool = False,
    plain: bool = False,
    strict: bool = False,
    timeline: bool = False,
    adjust: Adjustments | None = None,
    calibration: UserCalibration | str | Path | Sequence[str | Path] | None = None,
) -> Result:
    """Returns the prediction of a run.

    `flat` simulates every rank; `plain` leaves out overlap slowdown and link sharing; `strict`
    refuses operators without a cost model; `timeline` fills Result.timeline; `adjust` scales
    constants of the cost model; what `calibration` has measured wins over them: curves, or the path
    of a calibration file, or several, of which a later one wins.
    """
    if calibration is not None and not isinstance(calibration, UserCalibration):
        paths = [calibration] if isinstance(calibration, str | Path) else calibration
        with calibrated_by(read_files(paths)):
            return predict(
                run, flat=flat, plain=plain, strict=strict, timeline=timeline, adjust=adjust
            )
    with collector_paused():
        return _predict(
            run,
            flat=flat,
            plain=plain,
            strict=strict,
            timeline=timeline,
            adjust=adjust or Adjustments(),
            calibration=calibration or current_calibration(),
        )


@contextmanager
def collector_paused() -> Generator[None]:
    """Yields with the cycle collector off.

    A prediction makes up to millions of small objects that nearly all live to its end; to walk
    over them again and again took a quarter of the time of large jobs.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _predict(
    run: RunSpec,
    *,
    flat: bool,
    plain: bool,
    strict: bool,
    timeline: bool,
    adjust: Adjustments,
    calibration: UserCalibration,
) -> Result:
    started = perf_counter()
    compiled = compile_run(run)
    model = build_cost_model(run.cluster, run.stack, curves=calibration.curves)
    prices = adjust_prices(model.price(compiled.program.events), adjust)
    warnings = _unmodelled(model, compiled.program, prices, strict=strict)
    overlap = {name: model.overlap(name) for name in CATEGORIES}
    simulated = simulate(compiled.program, event_times(prices, overlap, plain=plain), flat=flat)
    result = _assemble(run, compiled, prices, simulated, model.run_band)
    if timeline:
        result = replace(result, timeline=build_timeline(compiled.program, simulated))
    return replace(
        result,
        assumptions=(
            *result.assumptions,
            *(f"constant of the cost model adjusted: {word}" for word in adjust.words()),
            *_calibrated(calibration, compiled.program, model),
        ),
        warnings=(*run.warnings, *warnings),
        mode="flat" if flat else "hierarchical",
        simulation_s=perf_counter() - started,
    )


def _calibrated(
    calibration: UserCalibration, program: Program, model: CostModel
) -> tuple[str, ...]:
    """Says what a calibration file decided, and how far its curves were stretched."""
    kinds = ", ".join(tables_of_user(model.cluster.device.name))
    refitted = (f"calibration: your constants of {kinds} go before the shipped ones",)
    refitted = refitted if kinds else ()
    if not calibration.curves:
        return refitted
    lines = [f"calibration {calibration.path}: {line}" for line in model.calibrated(program.events)]
    if not lines:
        lines = [f"calibration {calibration.path}: no group of this run was measured"]
    return (*refitted, *lines)


def _unmodelled(
    model: CostModel, program: Program, prices: Prices, *, strict: bool
) -> tuple[str, ...]:
    """Warns of (or refuses) operators without a cost model, with their share of event time."""
    missing = model.unmodelled(program.events)
    if not missing:
        return ()
    counts = program.event_counts()
    total = sum(n * float(prices.value_s[i]) for i, n in counts.items())
    shares: dict[str, float] = {}
    for i in missing:
        event = program.events[i]
        if isinstance(event, ComputeEvent):
            share = counts.get(i, 0) * float(prices.value_s[i]) / total
            shares[event.op] = shares.get(event.op, 0.0) + share
    texts = [
        f"operator {op} has no cost model ({share:.1%} of the event time)"
        for op, share in shares.items()
    ]
    if strict:
        raise InputError(
            [Problem(what=text, way_out="leave --strict out to estimate it") for text in texts]
        )
    return tuple(texts)


def _assemble(
    run: RunSpec, compiled: Compiled, prices: Prices, simulated: Simulated, run_band: float
) -> Result:
    training, cluster = run.training, run.cluster
    band, provenance = step_band(compiled.program, prices, simulated, run_band=run_band)
    samples = training.global_batch / band.value
    tokens = samples * training.tokens if training.tokens else None
    world = cluster.world_size
    flops, full = (
        training.global_batch
        * flops_per_sample(
            run.model,
            sequence=training.sequence,
            target_sequence=training.target_sequence,
            image=training.image,
            causal_half=half,
        )
        for half in (True, False)
    )
    executed = flops + _recomputed_flops(compiled.program)
    dtype = training.roles.compute
    peaks = cluster.device.peak_flops  # a TPU has no fp32 peak to fall back on
    peak = peaks[_peak_name(dtype)] if _peak_name(dtype) in peaks else peaks["fp32"]
    per_second = band.value * world * peak
    device = run.cluster.device
    memories = [
        device_memory(compiled.program, i, peak, run.stack, device)
        for i, peak in enumerate(simulated.peaks)
    ]
    memory = replace(
        worst_memory(compiled.program, memories, simulated.peaks, device),
        host_used_bytes=host_used(compiled.program, cluster.devices_per_node),
        host_capacity_bytes=cluster.host_memory_bytes,
    )
    classes = tuple(
        replace(
            c,
            peak_allocated_bytes=m.allocated,
            peak_reserved_bytes=m.reserved,
            device_used_bytes=m.used,
        )
        for c, m in zip(simulated.classes, memories, strict=True)
    )
    return Result(
        step_time_s=band,
        samples_per_s=samples,
        tokens_per_s=tokens,
        tokens_per_s_per_device=None if tokens is None else tokens / world,
        model_flops_per_step=flops,
        model_flops_full_attention=full,
        hardware_flops_per_step=executed,
        peak_flops_per_device=peak,
        peak_dtype=dtype,
        mfu=flops / per_second,
        hfu=executed / per_second,
        fits=memory.fits,
        bubble_fraction=sum(c.bubble_s for c in simulated.classes)
        / (len(simulated.classes) * band.value),
        memory=memory,
        time_parts=simulated.classes[simulated.last_class].parts,
        last_class=simulated.last_class,
        classes=classes,
        events=event_costs(compiled.program, prices),
        timeline=(),
        memory_timeline=tuple(peak.timeline for peak in simulated.peaks),
        program=compiled.program,
        provenance=provenance,
        assumptions=(
            *run.assumptions,
            *_full_attention(flops, full),
            *_above_peak(flops / per_second),
            *_unknown_host(memory),
        ),
        warnings=(),
        mode="hierarchical",
        sample_word="samples" if training.image is None else "images",
    )


def _full_attention(flops: float, full: float) -> tuple[str, ...]:
    if full == flops:
        return ()
    return (f"model FLOP per step with full attention (published Megatron figures): {full:.6g}",)


def _unknown_host(memory: MemoryResult) -> tuple[str, ...]:
    if not memory.host_used_bytes or memory.host_capacity_bytes is not None:
        return ()
    need = f"{memory.host_used_bytes / GIB:.0f} GiB"
    return (f"host memory is not stated: each node needs {need} for what is offloaded to it",)


def _above_peak(mfu: float) -> tuple[str, ...]:
    if mfu <= 1.0:
        return ()
    return ("MFU above 1: it counts the FLOP of direct convolution, Winograd kernels need fewer",)


def _peak_name(dtype: str) -> str:
    return "fp8" if dtype == "mxfp8" else dtype


def _recomputed_flops(program: Program) -> float:
    """FLOP of contractions and attention that all devices run again in backward in one step."""
    again = [
        sum(
            _contraction_flops(program.events[item.event])
            for item in segment.items
            if item.category == "recompute"
        )
        for segment in program.segments
    ]
    return sum(
        len(rank_class.ranks) * again[segment]
        for rank_class in program.classes
        for entry in rank_class.entries
        if isinstance(entry, Run)
        for segment in entry.segments
    )


def _contraction_flops(event: Event) -> float:
    if isinstance(event, ComputeEvent) and event.op in ("gemm", "attention", "conv2d"):
        return event.flops
    return 0.0
