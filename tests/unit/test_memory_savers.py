"""Words that save memory: optimizer states, narrow weights, activations on the host, modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foretrain.compiler.activation_offload import window_ends
from foretrain.compiler.optimizer import state_bytes, update_bytes
from foretrain.errors import InputError
from foretrain.graph.precision import Precision
from foretrain.hardware import find_device
from foretrain.predict import compile_run, predict
from foretrain.program import Comm, CommEvent, Program, Run
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.device_memory import device_memory
from foretrain.simulator.memory import Peak
from foretrain.simulator.result import Result
from foretrain.strategy.plan import Plan, Recompute
from foretrain.units import GIB
from support import STACK, compile_small, llama

NARROW = Precision(compute="fp8", weight="fp8")
LINEAR = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64  # a layer of the small model


def run_of(*, precision: object = "bf16", stack: str = "nemo", **plan: Any) -> RunSpec:
    return load_run(
        {
            "model": {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "vocab": 2048},
            "training": {
                "sequence": 512, "microbatch": 2, "global_batch": 32, "precision": precision,
            },
            "plan": {"preset": "megatron", **plan},
            "cluster": "1x8 h100-sxm",
            "stack": stack,
        }
    )  # fmt: skip


def result_of(**plan: Any) -> Result:
    return predict(run_of(**plan))


# -- the optimizer's states ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "moments", "second", "expected"),
    [
        ("fp32", "fp32", None, 12.0),
        ("remainder", "fp32", None, 10.0),
        ("fp16", "fp32", None, 10.0),
        ("remainder", "bf16", None, 6.0),
        ("fp32", "fp8", "bf16", 7.0),
        (None, "bf16", None, 4.0),
        ("bf16", "bf16", "bf16", 6.0),
    ],
)
def test_bytes_of_adam_per_parameter(
    master: str | None, moments: str, second: str | None, expected: float
) -> None:
    precision = Precision(master=master, moments=moments, second_moment=second)
    assert state_bytes("adamw", precision) == expected
    assert state_bytes("sgd-momentum", replace(precision, second_moment="fp32")) == expected - (
        precision.bytes("second_moment")
    )


def test_an_update_of_halves_moves_no_more_than_one_of_wholes() -> None:
    whole, halves = Precision(), Precision(master="remainder")
    assert halves.dtype("master") == "fp32"  # what it computes in
    assert update_bytes("adamw", halves) < update_bytes("adamw", whole)


def test_words_of_the_run_file_reach_every_role() -> None:
    words = {"compute": "bf16", "master": "remainder", "moments": "fp16", "second_moment": "fp8"}
    roles = run_of(precision=words).training.roles
    assert (roles.master, roles.moments, roles.second_moment) == ("remainder", "fp16", "fp8")
    assert run_of(precision={"compute": "bf16", "moments": "bf16"}).training.roles.bytes(
        "second_moment"
    ) == 2.0  # fmt: skip


def test_half_of_the_parameters_on_the_host() -> None:
    def program(share: float) -> Program:
        plan = Plan(preset="megatron", offload="optimizer", optimizer_offload_fraction=share)
        return compile_small(llama(), plan, 4).program

    whole, half = program(1.0).classes[0], program(0.5).classes[0]
    for part, value in whole.host_bytes.items():
        assert half.host_bytes[part] == pytest.approx(0.5 * value)
    here = compile_small(llama(), Plan(preset="megatron"), 4).program.classes[0]
    assert whole.persistent["optimizer"] == 0.0
    assert half.persistent["optimizer"] == pytest.approx(0.5 * here.persistent["optimizer"])
    updates = [e for e in half.entries if isinstance(e, Run) and e.slot == "step"]
    assert updates  # the device updates its half
    assert not [e for e in whole.entries if isinstance(e, Run) and e.slot == "step"]


def test_a_share_without_an_offload_is_refused() -> None:
    with pytest.raises(InputError, match="offload: optimizer"):
        run_of(optimizer_offload_fraction=0.5)
    with pytest.raises(InputError, match="up to 1"):
        run_of(offload="optimizer", optimizer_offload_fraction=1.5)


# -- narrow weights ------------------------------------------------------------------------------


def stored(precision: Precision, layouts: int = 1, **plan: object) -> dict[str, float]:
    stack = replace(STACK, quantized_weights=True)
    given = Plan(preset="megatron", **plan)  # type: ignore[arg-type]
    small = compile_small(llama(), given, 4, precision=precision, stack=stack, fp8_layouts=layouts)
    return dict(small.program.classes[0].persistent)


def test_fp8_parameters_take_a_byte_and_embeddings_two() -> None:
    narrow, wide = stored(NARROW), stored(Precision())
    assert wide["weights"] - narrow["weights"] == pytest.approx(4 * LINEAR)
    assert "quantized weights" not in narrow
    assert stored(NARROW, layouts=2)["quantized weights"] == 4 * LINEAR


@pytest.mark.parametrize(
    ("compute", "weight", "layouts", "per_parameter"),
    [
        ("fp8", "bf16", 2, 2.0),  # Hopper: the copy and its transpose
        ("fp8", "bf16", 1, 1.0),
        ("mxfp8", "bf16", 1, 2 * 33 / 32),  # a block format is quantised along either dim
        ("mxfp8", "mxfp8", 1, 33 / 32),
        ("nvfp4", "bf16", 1, 2 * 9 / 16),
    ],
)
def test_copies_that_live_all_step(
    compute: str, weight: str, layouts: int, per_parameter: float
) -> None:
    found = stored(Precision(compute=compute, weight=weight), layouts)
    assert found["quantized weights"] == pytest.approx(per_parameter * 4 * LINEAR)


def test_gathered_weights_keep_no_copies_and_travel_narrow() -> None:
    assert "quantized weights" not in stored(NARROW, layouts=2, zero=3)
    small = compile_small(llama(), Plan(preset="megatron", zero=3), 4, precision=NARROW)
    events = [
        (e.label, small.program.events[e.event])
        for e in small.program.classes[0].entries
        if isinstance(e, Comm) and "weights all-gather" in e.label
    ]
    dtypes = {
        label.split(".")[0]: event.dtype for label, event in events if isinstance(event, CommEvent)
    }
    assert dtypes["layers"] == "fp8"
    assert set(dtypes.values()) == {"fp8", "bf16"}


def test_which_devices_transpose() -> None:
    assert find_device("h100-sxm").fp8_layouts == 2
    assert find_device("gb200").fp8_layouts == 1
    assert find_device("rtx-5090").fp8_layouts == 2


# -- activations on the host ---------------------------------------------------------------------


def test_windows_share_the_layers_out() -> None:
    assert window_ends(8, 3) == (2, 5, 7)
    assert window_ends(80, 40) == tuple(range(1, 80, 2))
    ends = window_ends(126, 92)
    assert ends[-1] == 125
    assert all(end > i for i, end in enumerate(ends))  # a layer has run before its copy starts


def test_every_copy_that_goes_down_comes_up() -> None:
    plan = Plan(preset="megatron", cpu_offloading_num_layers=2)
    program = compile_small(llama(), plan, 1).program
    entries = program.classes[0].entries
    copies = [e for e in entries if isinstance(e, Comm) and e.label.endswith(" activations")]
    down = [e for e in copies if e.stream == "device-to-host"]
    up = [e for e in copies if e.stream == "host-to-device"]
    accumulation = 4
    assert len(down) == len(up) == 2 * accumulation
    assert sum(sum(e.delta_end.values()) for e in down) == -sum(
        sum(e.delta_start.values()) for e in up
    )
    kept = program.classes[0].host_bytes["activations"]
    assert accumulation * kept == pytest.approx(-sum(sum(e.delta_end.values()) for e in down))


def test_more_layers_on_the_host_take_less_of_the_device_and_no_less_time() -> None:
    found = [result_of(cpu_offloading_num_layers=n) for n in (0, 2, 4, 7)]
    used = [r.memory.device_used_bytes for r in found]
    assert used == sorted(used, reverse=True)
    assert used[-1] < used[0]
    assert min(r.step_time_s.value for r in found) == found[0].step_time_s.value
    host = [r.memory.host_used_bytes for r in found]
    assert host[0] == 0.0
    assert host[1:] == pytest.approx([2 * host[1] / 2, 2 * host[1], 7 * host[1] / 2], rel=1e-6)


def test_what_does_not_go_with_activations_on_the_host() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pp": 2}, "pipeline stages"),
        ({"recompute": "full"}, "recompute"),
        ({}, "0 to 7"),
    )
    for plan, message in cases:
        with pytest.raises(InputError, match=message):
            run_of(cpu_offloading_num_layers=2 if plan else 8, **plan)


def test_a_superchip_copies_faster_than_a_slot() -> None:
    for name in ("gb200", "gh200"):
        device = find_device(name)
        assert device.host_bandwidth > device.pcie_bandwidth
    slot = find_device("h100-sxm")
    assert slot.host_bandwidth == slot.pcie_bandwidth


# -- holes ---------------------------------------------------------------------------------------


def test_expandable_segments_leave_only_the_rest_of_pages() -> None:
    program = compile_small(llama(), Plan(preset="megatron", pp=2), 2).program
    device = replace(find_device("a100-sxm-80gb"), memory_bytes=100 * GIB)
    stack = replace(STACK, fragmentation=0.05, pipeline_slack=0.15)
    peak = Peak(parts={"activations": 40 * GIB}, moment="", in_step=False, timeline=())

    def holes(**changes: bool) -> float:
        memory = device_memory(program, 0, peak, replace(stack, **changes), device)
        return memory.parts["fragmentation"]

    assert holes(expandable_segments=True) == pytest.approx(
        0.01 * (40 + stack.workspace_gib) * GIB, rel=1e-6
    )
    assert holes(expandable_segments=True) < holes()
    assert run_of(expandable_segments=True).stack.expandable_segments
    assert not run_of().stack.expandable_segments


# -- modules -------------------------------------------------------------------------------------


def saved(*modules: str) -> set[str]:
    recompute = Recompute(mode="selective" if modules else "none", modules=modules)
    plan = Plan(preset="megatron", recompute=recompute)
    program = compile_small(llama(), plan, 1).program
    forward = next(s for s in program.segments if s.name.startswith("layers.0 forward"))
    return {item.label for item in forward.items if item.delta.get("activations", 0.0) > 0}


def test_each_module_drops_what_it_makes() -> None:
    everything = saved()
    assert {"attention.norm", "mlp.norm", "mlp.act"} <= everything
    assert everything - saved("layernorm") == {"attention.norm", "mlp.norm"}
    assert "mlp.norm" in saved("mlp")  # what the function reads
    assert not {"mlp.act"} & saved("mlp")
    assert "mlp.norm" not in saved("layernorm", "mlp")


def test_modules_save_memory_for_time() -> None:
    words: tuple[list[str], ...] = ([], ["layernorm"], ["layernorm", "mlp"])
    found = [result_of(recompute={"modules": w} if w else "none") for w in words]
    used = [r.memory.device_used_bytes for r in found]
    time = [r.time_parts.recompute for r in found]
    assert used == sorted(used, reverse=True)
    assert len(set(used)) == 3
    assert time == sorted(time)
    assert len(set(time)) == 3


def test_megatron_s_words_for_modules_in_any_order() -> None:
    plans: tuple[dict[str, Any], ...] = (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_modules": ["mlp"], "recompute_granularity": "selective"},
        {"recompute": {"mode": "selective", "modules": "mlp"}},
    )
    assert {run_of(**plan).plan.recompute for plan in plans} == {
        Recompute(mode="selective", modules=("mlp",))
    }
    compile_run(run_of(**plans[0]))
    with pytest.raises(InputError, match="core_attn, layernorm, mlp"):
        run_of(recompute_modules=["moe_act"])
    with pytest.raises(InputError, match="mode: selective"):
        run_of(recompute={"mode": "full", "modules": ["mlp"]})


# -- the loss ------------------------------------------------------------------------------------


def test_a_loss_in_chunks_holds_one_of_them() -> None:
    def logits(chunks: int) -> float:
        stack = replace(STACK, loss_chunks=chunks)
        program = compile_small(llama(), Plan(preset="megatron"), 1, stack=stack).program
        backward = next(s for s in program.segments if s.name == "head backward")
        return -backward.delta()["logits"]

    assert logits(1) == pytest.approx(4 * logits(4))
