"""What software keeps beside the tensors of the graph, offload, limits: numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.analysis.events import bottleneck_shares
from foretrain.analysis.limits import find_limit
from foretrain.cost.model import build_cost_model
from foretrain.errors import InputError
from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.spec import ModelSpec
from foretrain.graph.precision import Precision
from foretrain.hardware import find_device
from foretrain.hardware.device import Device
from foretrain.predict import compile_run, predict
from foretrain.program import Comm, CommEvent
from foretrain.report.limit_text import render_limit
from foretrain.report.words import gib
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.device_memory import device_memory
from foretrain.simulator.memory import Peak
from foretrain.simulator.simulate import simulate
from foretrain.strategy.plan import Overlap, Plan, Recompute
from foretrain.strategy.stages import stages_by_cost
from foretrain.units import GIB
from support import STACK, compile_small, flat_times, llama, segment

AUTOCAST = Precision(weight="fp32", grad="fp32", grad_accumulate="fp32", master=None)


def device_of(gib: float) -> Device:
    return replace(find_device("a100-sxm-80gb"), memory_bytes=gib * GIB)


def run_of(**plan: object) -> RunSpec:
    return load_run(
        {
            "model": {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "vocab": 2048},
            "training": {"sequence": 512, "microbatch": 1, "global_batch": 32},
            "plan": plan,
            "cluster": "1x8 a100-sxm-80gb",
        }
    )


# -- copies --------------------------------------------------------------------------------------


def test_autocast_keeps_cast_weights_until_backward() -> None:
    plan = Plan(preset="plain", zero=0)
    program = compile_small(llama(), plan, 1, precision=AUTOCAST).program
    forward = segment(program, "layers.0 forward").delta()["weight copies"]
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert forward == 2 * layer
    assert segment(program, "layers.0 backward").delta()["weight copies"] == -forward


def test_cast_weights_of_a_recomputed_block_die_with_each_pass() -> None:
    plan = Plan(preset="plain", zero=0, recompute=Recompute(mode="full"))
    program = compile_small(llama(), plan, 1, precision=AUTOCAST).program
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    for which in ("forward", "backward"):
        items = segment(program, f"layers.0 {which}").items
        changes = [item.delta.get("weight copies", 0.0) for item in items]
        assert max(changes) == 2 * layer
        assert sum(changes) == 0.0


def test_free_blocks_fill_a_device_and_never_decide() -> None:
    run = run_of(preset="fsdp", zero=3)
    compiled = compile_run(run)
    peak = Peak(parts={"activations": 60 * GIB, "gathered weights": GIB}, moment="", timeline=())
    stack = replace(run.stack, fragmentation=0.1, gather_slack=0.5, pipeline_slack=0.0)
    used = [
        device_memory(compiled.program, 0, peak, stack, device_of(usable)).used / GIB
        for usable in (200.0, 80.0, 60.0)
    ]
    needed = 1.1 * (61 + stack.workspace_gib) + stack.communicator_gib + stack.context_gib
    assert used == pytest.approx([needed + 0.5 * (61 + stack.workspace_gib), 77.6, needed])


def test_ddp_holds_its_buckets_beside_the_gradients() -> None:
    found = compile_small(llama(), Plan(preset="ddp", zero=0), 4, precision=AUTOCAST).program
    persistent = found.classes[0].persistent
    assert persistent["gradient buckets"] == persistent["gradients"]
    alone = compile_small(llama(), Plan(preset="ddp", zero=0), 1, precision=AUTOCAST).program
    assert "gradient buckets" not in alone.classes[0].persistent


def test_deepspeed_holds_one_bucket() -> None:
    plan = Plan(preset="deepspeed", zero=1, bucket_mib=0.01)
    persistent = compile_small(llama(), plan, 4).program.classes[0].persistent
    assert persistent["gradient buckets"] == 0.01 * 2**20


def test_foreach_adam_makes_a_denominator_for_every_parameter() -> None:
    stack = replace(STACK, optimizer="foreach")
    plan = Plan(preset="plain", zero=0)
    program = compile_small(llama(), plan, 1, stack=stack, precision=AUTOCAST).program
    items = segment(program, "optimizer").items
    (temporary,) = [i.transient["optimizer step"] for i in items if "optimizer step" in i.transient]
    assert temporary == 4 * compile_small(llama(), plan, 1).graph.num_parameters


@pytest.mark.parametrize(("kernels", "extra"), [(1.0, 0.0), (2.0, 2.0 * 96)])
def test_an_activation_and_its_product_in_two_kernels_keep_the_gate(
    kernels: float, extra: float
) -> None:
    stack = replace(STACK, kernels={"swiglu": kernels})
    plan = Plan(zero=0)
    usual = segment(compile_small(llama(), plan, 1).program, "layers.0 forward").delta()
    found = segment(
        compile_small(llama(), plan, 1, stack=stack).program, "layers.0 forward"
    ).delta()
    assert found["activations"] - usual["activations"] == 2 * 32 * extra


def test_fp8_halves_only_what_matrix_products_read() -> None:
    fp8 = Precision(compute="fp8", grad_reduce="fp32", grad_accumulate="fp32")
    plan = Plan(zero=0)

    def kept(precision: Precision, **stack: object) -> float:
        made = replace(STACK, **stack)  # type: ignore[arg-type]
        program = compile_small(llama(), plan, 1, precision=precision, stack=made).program
        return segment(program, "layers.0 forward").delta()["activations"]

    assert kept(fp8) == kept(Precision())
    assert 0.5 * kept(fp8) < kept(fp8, low_saved=("fp8",)) < kept(fp8)


def test_gradients_that_wait_die_with_their_accumulation() -> None:
    stack = replace(STACK, late_accumulate=True)
    program = compile_small(llama(), Plan(pp=2, zero=0), 2, stack=stack).program
    changes: dict[str, float] = {}
    for entry in program.classes[0].entries:
        for part, value in entry.delta_end.items():
            changes[part] = changes.get(part, 0.0) + value
        for index in getattr(entry, "segments", ()):
            value = program.segments[index].delta().get("new gradients", 0.0)
            changes["new gradients"] = changes.get("new gradients", 0.0) + value
    assert changes["new gradients"] == 0.0
    peak = simulate(program, flat_times(program)).peaks[0]
    assert peak.parts.get("new gradients", 0.0) >= 0.0


def test_a_head_that_costs_four_layers_shortens_the_last_stages() -> None:
    spec = resolve_model(
        {"family": "llama", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072}
    )
    assert isinstance(spec, ModelSpec)
    assert stages_by_cost(spec, 2) == (11, 5)  # a share of 10 layers is exceeded by the eleventh
    assert stages_by_cost(spec, 4) == (6, 5, 5, 0)
    assert sum(stages_by_cost(spec, 8)) == 16
    assert all(stages_by_cost(spec, 8)[:-1])


def test_as_many_stages_as_layers_are_divided_by_cost_too() -> None:
    run = load_run(
        {
            "model": {
                "family": "llama", "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408,
                "vocab": 8192,
            },
            "training": {"sequence": 512, "microbatch": 1, "global_batch": 8},
            "plan": {"pp": 8},
            "cluster": "1x8 h100-sxm",
            "stack": "nanotron",
        }
    )  # fmt: skip
    assert run.plan.stages is not None
    assert run.plan.stages[0] == 2  # one layer is less than a stage's share of layers and head
    assert sum(run.plan.stages) == 8


def test_replicas_without_zero_hold_ddp_buckets_where_the_stack_says_so() -> None:
    stack = replace(STACK, ddp_buckets=True)
    bf16 = {"grad": "bf16", "grad_accumulate": "fp32"}
    precision = replace(Precision(), **bf16)
    held = [
        compile_small(llama(), Plan(zero=zero), 2, stack=stack, precision=precision)
        .program.classes[0]
        .persistent
        for zero in (0, 1)
    ]
    assert held[0]["gradient buckets"] == held[0]["gradients"] / 2
    assert "gradient buckets" not in held[1]


def test_a_flat_gather_copies_the_new_weights_twice_and_one_copy_finds_no_hole() -> None:
    stack = replace(STACK, flat_gather=True)
    plan = Plan(zero=1, overlap=Overlap(param=False))
    compiled = compile_small(llama(), plan, 2, stack=stack)
    (rank_class,) = compiled.program.classes
    weights = 2.0 * compiled.graph.num_parameters
    assert rank_class.flat_step_bytes == pytest.approx(weights, rel=1e-3)
    gathers = [e for e in rank_class.entries if isinstance(e, Comm) and "updated" in e.label]
    live = sum(entry.delta_start.get("optimizer step", 0.0) for entry in gathers)
    assert live == pytest.approx(2 * weights, rel=1e-3)
    assert live == -sum(entry.delta_end.get("optimizer step", 0.0) for entry in gathers)
    alone = compile_small(llama(), Plan(zero=0), 2, stack=stack).program.classes[0]
    assert alone.flat_step_bytes == 0.0


def test_every_rank_holds_the_whole_table_of_learned_positions() -> None:
    spec = resolve_model(
        {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "max_positions": 32}
    )
    assert isinstance(spec, ModelSpec)

    def held(*, sequence_parallel: bool) -> float:
        plan = Plan(tp=2, zero=0, sequence_parallel=sequence_parallel)
        return compile_small(spec, plan, 2).program.classes[0].persistent["weights"]

    assert held(sequence_parallel=True) == held(sequence_parallel=False)


def test_units_of_one_micro_batch_are_no_pipeline() -> None:
    """FSDP writes an entry for every unit: one micro-batch is alive all the same."""
    program = compile_small(llama(), Plan(preset="fsdp", zero=3), 4).program
    stack = replace(STACK, fragmentation=0.0, pipeline_slack=0.5, gather_slack=0.0)
    peak = Peak(parts={"activations": GIB}, moment="", timeline=())
    found = device_memory(program, 0, peak, stack, device_of(80.0))
    assert "fragmentation" not in found.parts


def test_buffers_of_collectives_wait_where_a_forward_follows_a_backward() -> None:
    stack = replace(STACK, gather_holes=1.0, pipeline_holes=0.5)
    peak = Peak(parts={"activations": GIB}, moment="", timeline=())
    stack = replace(stack, fragmentation=0.0, pipeline_slack=0.0)

    def holes(pp: int, accumulation: int) -> float:
        plan = Plan(tp=2, pp=pp, zero=0, sequence_parallel=True)
        program = compile_small(
            llama(), plan, 2 * pp, accumulation=accumulation, stack=stack
        ).program
        memory = device_memory(program, 0, peak, stack, device_of(80.0))
        return memory.parts.get("fragmentation", 0.0)

    assert holes(1, 1) == 0.0  # the first forward of a step finds every buffer free
    assert holes(1, 2) == holes(1, 4) > 0.0
    assert holes(2, 2) == 0.0  # both forwards come before the first backward


# -- offload -------------------------------------------------------------------------------------


def test_the_update_runs_on_the_host_and_weights_come_up() -> None:
    plan = Plan(preset="deepspeed", zero=1, offload="optimizer")
    program = compile_small(llama(), plan, 4).program
    comms = [e for e in program.classes[0].entries if isinstance(e, Comm)]
    order = [e.stream for e in comms if e.stream in ("device-to-host", "cpu", "host-to-device")]
    assert order == ["device-to-host", "cpu", "host-to-device"]
    assert program.classes[0].persistent["optimizer"] == 0.0
    kept = program.classes[0].host_bytes
    n = compile_small(llama(), plan, 4).graph.num_parameters
    assert kept["optimizer"] == pytest.approx(12 * n / 4)


def test_gradients_of_earlier_micro_batches_come_up_to_be_added_to() -> None:
    plan = Plan(preset="deepspeed", zero=2, offload="optimizer")
    entries = compile_small(llama(), plan, 4).program.classes[0].entries
    copies = [e for e in entries if isinstance(e, Comm) and e.label.endswith(" gradients")]
    down = sum(e.stream == "device-to-host" for e in copies)
    up = sum(e.stream == "host-to-device" for e in copies)
    assert up == 3 * down / 4 > 0  # of four micro-batches the first has none before it


def test_two_cards_train_slower_over_pcie_than_over_a_bridge() -> None:
    def step(kind: str, **plan: object) -> float:
        run = load_run(
            {
                "model": "gpt2-medium",
                "training": {
                    "sequence": 1024,
                    "precision": "bf16",
                    "global_batch": 8,
                    "microbatch": 1,
                },
                "plan": plan,
                "cluster": f"1x2 rtx-3090-ti{kind}",
            }
        )
        return predict(run).step_time_s.value

    for plan in ({"preset": "megatron", "tp": 2}, {"preset": "deepspeed", "zero": 2}):
        assert step(" [nvlink pairs]", **plan) < step("", **plan)


def test_shards_come_up_before_every_gather() -> None:
    plan = Plan(preset="deepspeed", zero=3, offload="parameters")
    entries = compile_small(llama(), plan, 4).program.classes[0].entries
    gathers = [e for e in entries if isinstance(e, Comm) and e.label.endswith("all-gather")]
    copies = [e for e in entries if isinstance(e, Comm) and e.label.endswith(" shard")]
    assert gathers
    assert len(copies) == len(gathers)
    assert all(isinstance(entries[e.after[0]], Comm) for e in gathers)


def test_a_copy_is_no_faster_than_the_slot() -> None:
    run = run_of(preset="deepspeed", zero=3)
    event = CommEvent(collective="device_to_host", bytes=1e9, dtype="fp32", ranks=(0,))
    seconds = build_cost_model(run.cluster, run.stack).price([event]).value_s[0]
    assert 1e9 / run.cluster.device.pcie_bandwidth < seconds < 0.1


def test_parameters_need_shards() -> None:
    with pytest.raises(InputError, match="zero 3"):
        run_of(preset="deepspeed", zero=1, offload="parameters")
    with pytest.raises(InputError, match="optimizer, parameters"):
        run_of(preset="deepspeed", zero=1, offload="disk")


# -- how far -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", ["sequence", "microbatch", "layers"])
def test_a_limit_fits_and_the_next_step_does_not(quantity: str) -> None:
    run = run_of(preset="megatron", tp=2, pp=2)
    small = replace(run.cluster.device, memory_bytes=3.0 * GIB)
    limit = find_limit(replace(run, cluster=replace(run.cluster, device=small)), quantity)
    assert limit.value > 0
    assert limit.result is not None and limit.result.fits  # noqa: PT018
    assert limit.beyond is not None and not limit.beyond.fits  # noqa: PT018
    memory = limit.beyond.memory
    missing = memory.device_used_bytes - memory.usable_bytes
    more = f"{limit.value + limit.step:,}"
    assert f"  {more} does not fit by {gib(missing)}: " in render_limit(limit, run)


def test_a_search_without_an_end_says_that_memory_is_no_limit(monkeypatch) -> None:
    monkeypatch.setattr("foretrain.analysis.limits.MOST_STEPS", 4)
    run = run_of(preset="megatron", tp=2)
    huge = replace(run.cluster.device, memory_bytes=1000 * GIB)
    run = replace(run, cluster=replace(run.cluster, device=huge))
    limit = find_limit(run, "microbatch")
    assert limit.open_end
    assert limit.value >= 4
    text = render_limit(limit, run)
    assert text.startswith(f"At least {limit.value} samples")
    batch = limit.value * run.training.global_batch // run.training.microbatch
    assert f"global batch grows with it to {batch:,}" in text
    assert "memory is not what limits" in text
    assert "does not fit" not in text


def test_no_limit_where_not_even_one_step_fits() -> None:
    run = run_of(preset="megatron", tp=2)
    tiny = replace(run.cluster.device, memory_bytes=0.1 * GIB)
    limit = find_limit(replace(run, cluster=replace(run.cluster, device=tiny)), "microbatch")
    assert limit.value == 0
    assert limit.result is None


def test_an_unknown_quantity_is_refused() -> None:
    with pytest.raises(InputError, match="sequence, microbatch, layers"):
        find_limit(run_of(), "heads")


def test_used_is_reserved_and_what_lies_outside() -> None:
    memory = predict(run_of(preset="megatron", tp=2, pp=2)).memory
    assert memory.peak_allocated_bytes < memory.peak_reserved_bytes < memory.device_used_bytes
    assert sum(memory.parts_bytes.values()) == pytest.approx(memory.device_used_bytes, abs=1.0)


def test_an_update_on_the_host_bounds_the_step_and_is_no_matrix_product() -> None:
    result = predict(run_of(preset="deepspeed", zero=2, offload="optimizer"))
    shares = bottleneck_shares(result)
    assert sum(shares.values()) == pytest.approx(1.0)
    update = next(c for c in result.events if "host-update" in c.label)
    step = result.step_time_s.value
    assert shares["optimizer on the CPU"] == pytest.approx(update.value_s / step, rel=1e-6)
    work = result.time_parts.compute + result.time_parts.recompute + result.time_parts.optimizer
    kernels = shares["matrix products"] + shares["memory-bound kernels"]
    assert kernels * step == pytest.approx(work - update.value_s)


@pytest.mark.parametrize(("device", "gib"), [("a100-sxm-80gb", 1.3), ("h100-sxm", 0.5)])
def test_no_stack_on_a_new_device_loads_all_kernels_at_start(device: str, gib: float) -> None:
    run = load_run(
        {
            "model": "gpt2-124m",
            "training": {"sequence": 1024, "global_batch": 8, "microbatch": 8},
            "plan": {"preset": "megatron"},
            "cluster": f"1x1 {device}",
            "stack": "megatron",
        }
    )
    assert predict(run).memory.parts_bytes["context"] == pytest.approx(gib * GIB)
