"""From a run file, flags and overrides to a RunSpec: words, defaults, assumptions, problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import CatalogError, FileFormatError, InputError, PlanError
from foretrain.run.load import load_run
from foretrain.strategy.plan import Overlap, Recompute

RUN: dict[str, Any] = {
    "model": "llama-3-8b",
    "training": {"sequence": 4096, "global_batch": 64},
    "plan": {"preset": "megatron"},
    "cluster": "1x8 h100-sxm",
}


def run_with(**sections: Any) -> dict[str, Any]:
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in RUN.items()}
    for key, value in sections.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


def refusal(source: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_run(source, **kwargs)
    return str(caught.value)


def test_file_mapping_and_flags_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama-3-8b\ntraining: {sequence: 4096, global_batch: 64}\n"
        "plan: {preset: megatron, tp: 2}\ncluster: 1x8 h100-sxm\n"
    )
    flags = {
        "model": "llama-3-8b",
        "cluster": "1x8 h100-sxm",
        "sequence": "4096",
        "global_batch": "64",
        "preset": "megatron",
        "tp": "2",
    }
    runs = [load_run(path), load_run(run_with(plan={"tp": 2})), load_run(flags=flags)]
    for run in runs[1:]:
        assert run.model == runs[0].model
        assert run.training == runs[0].training
        assert run.plan == runs[0].plan
        assert run.assumptions == runs[0].assumptions


def test_flags_win_over_the_file_and_set_wins_over_flags() -> None:
    run = load_run(RUN, flags={"tp": 2, "pp": 2}, overrides=["plan.tp=4"])
    assert (run.plan.tp, run.plan.pp, run.plan.dp) == (4, 2, 1)


def test_overrides_reach_nested_fields() -> None:
    run = load_run(
        RUN,
        overrides={
            "plan.recompute.mode": "full",
            "plan.recompute.layers": 4,
            "plan.overlap.grad": True,
            "plan.overrides.layers.*.mlp.recompute": "full",
            "training.precision.moments": "bf16",
            "model.layers": 16,
        },
    )
    assert run.plan.recompute == Recompute(mode="full", layers=4)
    assert run.plan.overlap == Overlap(grad=True)
    assert run.plan.overrides == {"layers.*.mlp": {"recompute": "full"}}
    assert run.training.roles.moments == "bf16"
    assert run.training.roles.compute == "bf16"
    assert run.model.layers == 16


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"tensor_model_parallel_size": 2}, {"tp": 2}),
        ({"pipeline-model-parallel-size": 2}, {"pp": 2}),
        ({"virtual_pipeline_model_parallel_size": 2, "pp": 2}, {"interleave": 2, "pp": 2}),
        ({"data_parallel_shard_degree": -1, "zero": 1}, {"zero": 1}),
        ({"gradient_checkpointing": True}, {"recompute": "full"}),
        ({"recompute": False}, {"recompute": "none"}),
        ({"recompute": "SELECTIVE"}, {"recompute": {"mode": "selective"}}),
        ({"overlap_grad_reduce": "on"}, {"overlap": {"grad": True}}),
        (
            {"overlap": False},
            {"overlap": dict.fromkeys(("grad", "param", "tp", "p2p", "tables"), "no")},
        ),
        ({"sequence_parallel": "yes", "tp": 2}, {"sequence_parallel": True, "tp": 2}),
        ({"stages": "8,8,8,8", "pp": 4}, {"stages": [8, 8, 8, 8], "pp": 4}),
        ({"order": "pp,dp,tp"}, {"order": ["pp", "dp", "tp"]}),
        ({"schedule": "Interleaved1F1B", "pp": 2, "interleave": 2}, {"pp": 2, "interleave": 2}),
        ({"cp": 1, "ep": 1, "offload": "none"}, {}),
    ],
)
def test_other_spellings(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert load_run(run_with(plan=given)).plan == load_run(run_with(plan=ours)).plan


def test_other_spellings_of_training() -> None:
    training = {
        "seq_len": 4096,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "dtype": "bfloat16",
    }
    run = load_run({**RUN, "training": training})
    assert run.training.sequence == 4096
    assert run.training.microbatch == 2
    assert run.training.global_batch == 2 * 8 * 4
    assert run.training.precision == "bf16"


def test_short_form() -> None:
    run = load_run({**RUN, "plan": "2M4P1D"})
    assert (run.plan.tp, run.plan.pp, run.plan.dp) == (2, 4, 1)
    run = load_run(RUN, flags={"plan": "fsdp 1m1p8d"})
    assert (run.plan.preset, run.plan.tp, run.plan.pp, run.plan.dp) == ("fsdp", 1, 1, 8)
    assert "tp is given twice" in refusal({**RUN, "plan": "2M4M"})
    assert "did you mean 'megatron'?" in refusal({**RUN, "plan": "megatrn"})


@pytest.mark.parametrize(
    ("batch", "pp", "expected", "lines"),
    [
        (
            {},
            1,
            (8, 1),
            ["microbatch = 1 (not given)", "global_batch = 8 (microbatch x dp = 1 x 8)"],
        ),
        ({"global_batch": 64}, 1, (64, 8), ["microbatch = 8 (global_batch / dp)"]),
        ({"global_batch": 64}, 2, (64, 1), ["microbatch = 1 (not given, with pipeline stages)"]),
        ({"microbatch": 2}, 1, (16, 2), ["global_batch = 16 (microbatch x dp = 2 x 8)"]),
        ({"global_batch": 64, "accumulation": 4}, 1, (64, 2), ["microbatch = 2"]),
        ({"global_batch": 64, "microbatch": 2}, 1, (64, 2), ["accumulation = 4"]),
        ({"microbatch": 2, "accumulation": 3}, 1, (48, 2), ["global_batch = 48"]),
        ({"global_batch": 48, "microbatch": 2, "accumulation": 3}, 1, (48, 2), []),
    ],
)
def test_batch_words(
    batch: dict[str, int], pp: int, expected: tuple[int, int], lines: list[str]
) -> None:
    run = load_run({**RUN, "training": {"sequence": 4096, **batch}, "plan": {"pp": pp}})
    assert (run.training.global_batch, run.training.microbatch) == expected
    for line in lines:
        assert any(text.startswith(line) for text in run.assumptions), run.assumptions


def test_batch_words_that_contradict() -> None:
    training = {"sequence": 4096, "global_batch": 64, "microbatch": 2, "accumulation": 3}
    assert "2 x dp 8 x accumulation 3 = 48, but global_batch is 64" in refusal(
        {**RUN, "training": training}
    )


def test_every_default_is_an_assumption() -> None:
    run = load_run(
        {"model": "llama-3-8b", "cluster": "1x8 h100-sxm", "training": {"sequence": 4096}},
        flags={"tp": 2, "pp": 2},
    )
    text = "\n".join(run.assumptions)
    for word in (
        "preset = megatron",
        "stack = megatron-te",
        "precision = bf16",
        "optimizer = adamw",
        "microbatch = 1",
        "global_batch = 2",
        "zero = 0",
        "sequence_parallel = false",
        "schedule = 1f1b",
        "recompute = none",
    ):
        assert word in text
    assert any("sequence_parallel is off" in warning for warning in run.warnings)


@pytest.mark.parametrize(
    ("preset", "stack", "zero"),
    [
        ("megatron", "megatron-te", 0),
        ("fsdp", "fsdp", 3),
        ("deepspeed", "deepspeed", 1),
        ("ddp", "pytorch-eager", 0),
    ],
)
def test_defaults_of_presets(preset: str, stack: str, zero: int) -> None:
    run = load_run(run_with(plan={"preset": preset}))
    assert run.stack.name == stack
    assert run.plan.zero == zero


def test_the_stack_decides_the_preset_when_none_is_given() -> None:
    run = load_run({**RUN, "plan": {}, "stack": "fsdp"})
    assert run.plan.preset == "fsdp"
    assert "preset = fsdp (usual with stack fsdp)" in run.assumptions


def test_volta_has_no_bf16() -> None:
    run = load_run({**RUN, "cluster": "1x8 v100-sxm-32gb"})
    assert run.training.precision == "fp16"
    assert run.stack.name == "megatron"
    text = refusal({**RUN, "cluster": "1x8 v100-sxm-32gb"}, flags={"precision": "bf16"})
    assert "v100-sxm-32gb does not compute in this precision (got 'bf16')" in text
    assert "allowed: fp32, fp16" in text


def test_vocabulary_is_padded_as_megatron_does() -> None:
    padded = load_run(
        {**RUN, "model": "gpt2-124m", "training": {"sequence": 1024}}, flags={"tp": 4}
    )
    assert padded.model.vocab == 50688
    assert any("vocabulary padded from 50257 to 50688" in line for line in padded.assumptions)
    plain = load_run(
        {**RUN, "model": "gpt2-124m", "training": {"sequence": 1024}, "plan": {"preset": "ddp"}}
    )
    assert plain.model.vocab == 50257


def test_lengths_and_limits() -> None:
    assert "training.sequence: missing" in refusal({**RUN, "training": {}})
    learned = {**RUN, "model": "gpt2-124m", "training": {"sequence": 2048}}
    assert "longer than the 1024 learned positions" in refusal(learned)
    rotary = load_run(run_with(training={"sequence": 32768}))
    assert any("beyond the 8192 positions" in warning for warning in rotary.warnings)


@pytest.mark.parametrize(
    ("plan", "warning"),
    [
        ({"interleave": 2}, "plan.interleave has no effect: pp is 1"),
        ({"in_flight": 2}, "plan.in_flight has no effect: pp is 1"),
        ({"schedule": "gpipe"}, "plan.schedule has no effect: pp is 1"),
        ({"sequence_parallel": True}, "plan.sequence_parallel has no effect: tp is 1"),
        ({"shard": 4}, "plan.shard has no effect: zero is 0"),
        ({"reshard": False}, "plan.reshard has no effect"),
        ({"recompute": {"mode": "none", "layers": 2}}, "plan.recompute.layers has no effect"),
    ],
)
def test_options_without_effect_are_warned_about(plan: dict[str, Any], warning: str) -> None:
    assert any(text.startswith(warning) for text in load_run(run_with(plan=plan)).warnings)


@pytest.mark.parametrize("model", ["dlrm-516m", "resnet-50"])
@pytest.mark.parametrize(
    ("key", "value", "idle"),
    [("sequence_parallel", True, False), ("interleave", 2, 1), ("in_flight", 2, None),
     ("stages", [8], None)],
)  # fmt: skip
def test_what_only_layers_of_tokens_have_is_refused_elsewhere(
    model: str, key: str, value: object, idle: object
) -> None:
    run = {"model": model, "training": {"microbatch": 4}, "cluster": "1x8 h100-sxm"}
    (line,) = refusal({**run, "plan": {key: value}}).splitlines()
    assert f"plan.{key}: {model} has no sequence and no stages" in line
    load_run({**run, "plan": {key: idle}})


def test_changes_of_a_named_model_have_the_limits_of_inline_ones() -> None:
    assert "at most 10,000" in refusal(RUN, overrides={"model.layers": 1_000_000})
    assert load_run(RUN, overrides={"model.layers": 16}).model.layers == 16


def test_a_context_degree_that_does_not_divide_is_named() -> None:
    message = refusal(run_with(plan={"cp": 3}, training={"sequence": 4098}))
    assert "plan.cp: tp 1 x pp 1 x cp 3" in message
    assert "allowed: 1, 2, 4, 8" in message


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"cp": 3}, "does not divide the 8 devices"),
        ({"ep": 8}, "plan.ep: expert parallelism is not modelled yet"),
        ({"offload": "disk"}, "allowed: none, optimizer, parameters"),
        ({"schedule": "DualPipeV"}, "plan.schedule: not modelled yet (got 'DualPipeV')"),
        ({"schedule": "zero_bubble"}, "allowed: gpipe, 1f1b, interleaved"),
        ({"sequence_parallel": 8}, "plan.sequence_parallel: must be true or false (got 8)"),
        ({"tp": True}, "plan.tp: must be a whole number (got True)"),
        ({"tp": 2.5}, "plan.tp: must be a whole number (got 2.5)"),
        ({"tp": float("nan")}, "plan.tp: must be a whole number (got nan)"),
        ({"tp": 10**400}, "does not divide the 8 devices"),
        ({"bucket_mib": float("inf")}, "plan.bucket_mib: must be a number (got inf)"),
        ({"zero": 4}, "plan.zero: out of range (got 4); allowed: 0 to 3"),
        ({"recompute": {"mod": "full"}}, "plan.recompute.mod: unknown key"),
        ({"overlap": {"all": True}}, "plan.overlap.all: unknown key"),
        ({"order": ["tp", "xx"]}, "plan.order: must be a list of mesh axes"),
        ({"stages": [8, "x"]}, "plan.stages: must be a list of whole numbers"),
        ({"overrides": {"layers.*": {"recomp": "full"}}}, "unknown setting of a strategy node"),
        ({"overrides": {"layers.*": 3}}, "must be a mapping of node settings"),
        ({"preset": "megatrno"}, "did you mean 'megatron'?"),
        ({"tp_sice": 2}, "unknown key 'tp_sice'"),
        ({"model_parallel_size": 2}, "say tp (tensor parallel) or pp (pipeline parallel)"),
        ({"reduce_bucket_size": 5}, "that counts elements; say bucket_mib"),
        ({"sequence": 4}, "it belongs to training: write it as training.sequence"),
        ({"tp": 2, "tensor_parallel_size": 4}, "tp is given twice"),
    ],
)
def test_wrong_plans_are_refused(plan: dict[str, Any], message: str) -> None:
    assert message in refusal(run_with(plan=plan))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "model is missing"),
        ({"modle": "x"}, "unknown key 'modle'"),
        ({"modle": "x"}, "did you mean 'model'?"),
        ({**RUN, "tp": 4}, "write it as plan.tp"),
        ({**RUN, "gpus": 8}, "write cluster, e.g."),
        ({**RUN, "model": 7}, "model: not understood (got 7)"),
        ({**RUN, "cluster": []}, "cluster: not understood"),
        ({**RUN, "stack": "megatron-xe"}, "did you mean 'megatron-te'?"),
        ({**RUN, "stack": 4}, "stack: must be a stack's name or file"),
        ({**RUN, "training": "4096"}, "training: must be a mapping of fields"),
        ({**RUN, "plan": 4}, "plan: must be a mapping of fields"),
        (run_with(training={"precision": "bf61"}), "did you mean 'bf16'?"),
        (run_with(training={"precision": {"compte": "bf16"}}), "did you mean 'compute'?"),
        (run_with(training={"optimizer": "lion"}), "allowed: none, sgd, sgd-momentum, adam, adamw"),
        (run_with(training={"batch_size": 4}), "say global_batch"),
    ],
)
def test_wrong_files_are_refused(source: dict[str, Any], message: str) -> None:
    assert message in refusal(source)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.tpp=4", "--set plan.tpp: unknown key 'tpp'"),
        ("plann.tp=4", "did you mean 'plan.tp'?"),
        ("tp=4", "did you mean 'plan.tp'?"),
        ("plan.tp", "an override is written FIELD=VALUE"),
        ("plan={tp: 4}", "set one field of plan"),
        ("plan.tp=[", "not valid YAML"),
        ("cluster.nodes=4", "cluster has no fields here"),
        ("model.hidden=4096", "cannot be changed on a model given by name"),
        ("training.sequence=0", "--set training.sequence: out of range (got 0)"),
    ],
)
def test_wrong_overrides_are_refused(override: str, message: str) -> None:
    assert message in refusal(RUN, overrides=[override])


def test_all_problems_come_together_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama-9-8b\n"
        "training: {sequence: -1}\n"
        "plan:\n  tpp: 4\n  zero: 7\n"
        "cluster: 1x8 h100-sxm\n"
    )
    with pytest.raises(InputError) as caught:
        load_run(path)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    for place in ("run.yaml:2: training.sequence", "run.yaml:4: plan.tpp", "run.yaml:5: plan.zero"):
        assert place in text


def test_the_kind_of_error_is_kept() -> None:
    with pytest.raises(CatalogError):
        load_run({**RUN, "model": "no-such-model"})
    with pytest.raises(PlanError):
        load_run(run_with(plan={"tp": 7}))
    with pytest.raises(FileFormatError):
        load_run("no/such/file.yaml")


def test_paths_in_a_run_file_are_relative_to_it(tmp_path: Path) -> None:
    stack = tmp_path / "mine.toml"
    stack.write_text('name = "mine"\npreset = "megatron"\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: llama-3-8b\ntraining: {sequence: 4096}\ncluster: 1x8 h100-sxm\nstack: mine.toml\n"
    )
    assert load_run(path).stack.name == "mine"


def test_the_resolved_run_reads_back_to_itself() -> None:
    from foretrain.report.run_form import run_form

    run = load_run(run_with(plan={"tp": 2, "pp": 2, "recompute": {"mode": "full", "layers": 2}}))
    again = load_run(run_form(run))
    assert again.plan == run.plan
    assert again.training == run.training


def test_a_tree_brings_its_degrees_and_must_agree() -> None:
    from foretrain.strategy.presets import build_tree
    from foretrain.strategy.text import tree_mapping

    run = load_run(run_with(plan={"tp": 2, "pp": 2}))
    tree = tree_mapping(
        build_tree(run.plan, run.model, world_size=8, accumulation=32, stack=run.stack)
    )
    again = load_run({**RUN, "plan": {"preset": "megatron", "tree": tree}})
    assert (again.plan.tp, again.plan.pp, again.plan.dp) == (2, 2, 2)
    assert again.model == run.model
    assert "plan.tree says tp 2 (got 4)" in refusal({**RUN, "plan": {"tp": 4, "tree": tree}})
    assert "the mesh has 8 ranks, the cluster 16 devices" in refusal(
        {**RUN, "plan": {"tree": tree}, "cluster": "2x8 h100-sxm, 8x400G ib"}
    )
    assert "made for 32 micro-batches per step, the batch gives 16" in refusal(
        {**RUN, "plan": {"tree": tree}, "training": {"sequence": 4096, "global_batch": 32}}
    )
    assert "plan.tree: missing key" in refusal({**RUN, "plan": {"tree": {"mesh": {}}}})


def test_examples_load(examples: Path) -> None:
    files = sorted(examples.glob("*.yaml"))
    assert files
    for path in files:
        assert load_run(path).plan.dp is not None
