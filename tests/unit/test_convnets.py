"""Convolutional networks: exact counts, published FLOP, gradients, splits and run words."""

from __future__ import annotations

import pytest

from foretrain.cli.main import main
from foretrain.compiler.optimizer import OPTIMIZERS
from foretrain.cost.model import build_cost_model
from foretrain.errors import InputError, PlanError
from foretrain.frontends.build import build_graph
from foretrain.frontends.catalog import find_model, resolve_model
from foretrain.frontends.spec import ConvSpec
from foretrain.graph.backward import derive_backward
from foretrain.predict import compile_run, predict
from foretrain.program import Comm, CommEvent, ComputeEvent, Run
from foretrain.report.run_form import run_form
from foretrain.run.load import load_run

COUNTS = {  # parameters of torchvision's models, and published GMAC of one image
    "resnet-18": (11_689_512, 1.81),
    "resnet-34": (21_797_672, 3.66),
    "resnet-50": (25_557_032, 4.09),
    "resnet-101": (44_549_160, 7.80),
    "resnet-152": (60_192_808, 11.51),
    "resnext-101-32x8d": (88_791_336, 16.41),
    "vgg-16": (138_357_544, 15.47),
    "vgg-19": (143_667_240, 19.63),
    "inception-v3": (27_161_264, 5.71),
    "densenet-121": (7_978_856, 2.83),
    "mobilenet-v2": (3_504_872, 0.30),
    "efficientnet-b0": (5_288_548, 0.39),
    "efficientnet-b4": (19_341_616, 4.39),
    "alexnet": (61_100_840, 0.71),
}
SMALL = {"family": "resnet", "depths": [1, 1, 1, 1]}


def run_of(model, cluster="1x1 v100-sxm-16gb", *, plan=None, **training):
    return load_run(
        {
            "model": model,
            "training": {"precision": "fp32", "microbatch": 4, **training},
            "plan": {"preset": "ddp", **(plan or {})},
            "cluster": cluster,
        }
    )


@pytest.mark.parametrize(("name", "count", "gmac"), [(k, *v) for k, v in COUNTS.items()])
def test_counts_are_exact_and_flops_as_published(name: str, count: int, gmac: float) -> None:
    graph = build_graph(find_model(name), batch=1)
    assert graph.num_parameters == count
    flops = sum(op.total_flops * b.repeat for b, op in graph.ops() if op.kind == "contraction")
    assert flops / 2e9 == pytest.approx(gmac, rel=0.015)


def test_inception_without_its_auxiliary_classifier() -> None:
    spec = resolve_model({"family": "inception-v3"})
    assert build_graph(spec, batch=1).num_parameters == 23_834_568
    assert isinstance(spec, ConvSpec)
    assert spec.image == 299


def test_backward_flops_are_twice_forward_but_for_the_images() -> None:
    graph = build_graph(find_model("mobilenet-v2"), batch=2)
    for block in graph.blocks:
        forward = sum(op.total_flops for op in block.ops if op.cost == "conv2d")
        ops = [op for op in derive_backward(block).ops if op.cost == "conv2d"]
        weight = sum(op.total_flops for op in ops if op.phase == "backward_weight")
        data = sum(op.total_flops for op in ops if op.phase == "backward_input")
        assert weight == forward
        first = block.ops[0].total_flops if block.name == "stem" else 0.0
        assert data == forward - first


def test_every_weight_has_a_gradient() -> None:
    for name in COUNTS:
        for block in build_graph(find_model(name), batch=1).blocks:
            assert set(derive_backward(block).weight_grads) == {w.name for w in block.weights}


def test_depthwise_events_name_their_groups() -> None:
    program = compile_run(run_of("mobilenet-v2")).program
    shapes = [dict(e.shape) for e in program.events if getattr(e, "op", "") == "conv2d"]
    assert any(s["groups"] == s["c"] == s["k"] > 1 for s in shapes)
    assert all(s["groups"] in (1.0, s["c"]) for s in shapes)


def _volumes(run):
    """Collectives of one step on one rank: (kind, elements) of forward, backward and gradients."""
    program = compile_run(run).program
    (rank,) = program.classes
    found = {"F": [], "B": [], "gradients": []}
    for entry in rank.entries:
        if isinstance(entry, Run) and entry.slot in ("F", "B"):
            for segment in entry.segments:
                for item in program.segments[segment].items:
                    event = program.events[item.event]
                    if isinstance(event, CommEvent):
                        found[entry.slot].append((event.collective, event.bytes / 4))
        elif isinstance(entry, Comm):
            event = program.events[entry.event]
            found["gradients"].append((event.collective, event.bytes * event.count / 4))
    return found


VGG_SPLIT = {
    "head.fc1": {"computation": {"out": "dp"}},
    "head.fc2": {"computation": {"in": "dp"}},
}


def test_split_classifier_of_vgg19() -> None:
    n, b = 8, 4
    run = run_of("vgg-19", "1x8 v100-sxm-16gb", plan={"overrides": VGG_SPLIT}, microbatch=b)
    volumes = _volumes(run)
    wide, narrow = n * b * 25088, n * b * 4096
    assert volumes["F"] == [("all_gather", wide), ("reduce_scatter", narrow)]
    mirrored = [("all_gather", narrow), ("reduce_scatter", wide)]
    again = ("all_gather", wide)  # the input of the first layer is kept as it arrived, in parts
    assert sorted(volumes["B"]) == sorted([*mirrored, again])
    assert sum(size for _, size in volumes["gradients"]) == pytest.approx(24_125_480, abs=16)
    assert {kind for kind, _ in volumes["gradients"]} == {"all_reduce"}


def test_replicated_vgg19_reduces_all_of_its_gradients() -> None:
    volumes = _volumes(run_of("vgg-19", "1x8 v100-sxm-16gb"))
    assert volumes["F"] == volumes["B"] == []
    assert sum(size for _, size in volumes["gradients"]) == pytest.approx(143_667_240, abs=16)


@pytest.mark.parametrize(
    ("split", "forward", "backward", "gradients"),
    [
        ({"batch": "tp"}, [], ["all_gather"], ["all_reduce"]),
        ({"out": "tp"}, ["all_gather"], ["all_reduce"], []),
        ({"in": "tp"}, ["all_reduce"], ["all_gather"], []),
    ],
)
def test_splits_of_a_linear_layer(split, forward, backward, gradients) -> None:
    """The last layer on two ranks: what its split costs, forward, backward and for its weights."""
    plan = {"tp": 2, "overrides": {"head.fc3": {"computation": split}}}
    volumes = _volumes(run_of("alexnet", "1x2 v100-sxm-16gb", plan=plan))
    assert [kind for kind, _ in volumes["F"]] == forward
    assert [kind for kind, _ in volumes["B"]] == backward
    assert sorted({kind for kind, _ in volumes["gradients"]}) == gradients


@pytest.mark.parametrize("dim", ["height", "width"])
def test_spatial_splits_are_refused(dim: str) -> None:
    plan = {"tp": 2, "overrides": {"stage1_first": {"computation": {dim: "tp"}}}}
    with pytest.raises(PlanError, match="halos"):
        compile_run(run_of(SMALL, "1x2 v100-sxm-16gb", plan=plan))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": {"pp": 2}}, "pipeline stages"),
        ({"plan": {"tp": 2}}, "no operator"),
        ({"plan": {"recompute": "selective"}}, "no attention core"),
        ({"sequence": 128}, "trained on images"),
        ({"image": 8}, "at least 32"),
        ({"model": {"family": "resnet"}}, "depths"),
        ({"model": {"family": "vgg", "depths": [1, 2]}}, "5 whole numbers"),
        ({"model": {**SMALL, "heads": 4}}, "unknown key"),
        ({"model": {**SMALL, "groups": 0}}, "above 0"),
        ({"model": {**SMALL, "dropout": 2.0}}, "0.99"),
        ({"model": {**SMALL, "squeeze": 1}}, "true or false"),
    ],
)
def test_what_is_refused(change, words: str) -> None:
    given = {"model": SMALL, "cluster": "1x2 v100-sxm-16gb", **change}
    with pytest.raises(InputError, match=words):
        predict(run_of(given.pop("model"), given.pop("cluster"), **given))


def test_images_are_refused_for_transformers() -> None:
    with pytest.raises(InputError, match="trained on tokens"):
        run_of("gpt2", image=224, sequence=128)


def test_run_words_and_result() -> None:
    run = run_of("resnet-18", "1x2 v100-sxm-16gb")
    assert run.training.image == 224
    assert run.training.sequence is None
    assert run.training.optimizer == "sgd-momentum"
    assert run.stack.name == "pytorch-vision"
    result = predict(run)
    assert result.tokens_per_s is None
    assert result.samples_per_s == pytest.approx(8 / result.step_time_s.value)
    assert result.model_flops_per_step == pytest.approx(8 * 6 * 1.814e9, rel=0.001)
    assert 0 < result.mfu < 1


def test_smaller_images_take_less_time() -> None:
    large, small = (predict(run_of(SMALL, image=size)).step_time_s.value for size in (224, 64))
    assert small < large


@pytest.mark.parametrize("name", ["densenet-121", "efficientnet-b0", "inception-v3", "alexnet"])
def test_every_operator_has_a_cost_model(name: str) -> None:
    assert predict(run_of(name), strict=True).step_time_s.value > 0


def test_full_recompute_saves_activations_and_costs_time() -> None:
    kept = predict(run_of("resnet-50", microbatch=32))
    again = predict(run_of("resnet-50", microbatch=32, plan={"recompute": "full"}))
    assert again.step_time_s.value > kept.step_time_s.value
    assert again.memory.peak_allocated_bytes < kept.memory.peak_allocated_bytes


def _seconds(run, shape, direction="forward", dtype="fp16"):
    event = ComputeEvent(op="conv2d", direction=direction, dtype=dtype, flops=1.0, bytes=1.0,
                         shape=tuple((k, float(v)) for k, v in shape.items()))  # fmt: skip
    return build_cost_model(run.cluster, run.stack).price([event]).value_s[0]


def test_channels_first_transposes_around_tensor_cores() -> None:
    shape = {"n": 64, "c": 256, "h": 56, "w": 56, "k": 64, "r": 1, "s": 1}
    first = run_of(SMALL, "1x1 rtx-3090")
    last = load_run({**first.source, "stack": "pytorch-vision-nhwc"})
    assert _seconds(first, shape) > 1.3 * _seconds(last, shape)
    assert _seconds(first, shape, dtype="fp32") == _seconds(last, shape, dtype="fp32")


def test_backward_is_the_sum_of_its_parts() -> None:
    run = run_of(SMALL)
    shape = {"n": 32, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "padding": 1}
    parts = [_seconds(run, shape, f"backward_{part}", "fp32") for part in ("input", "weight")]
    assert _seconds(run, shape, "backward", "fp32") == pytest.approx(sum(parts))


def test_sgd_with_momentum_keeps_one_moment() -> None:
    assert OPTIMIZERS["sgd-momentum"].moments == 1
    plain, momentum = (
        predict(run_of("vgg-16", optimizer=word)) for word in ("sgd", "sgd-momentum")
    )
    held = [r.memory.parts_bytes.get("optimizer", 0.0) for r in (plain, momentum)]
    more = held[1] - held[0]
    assert more == pytest.approx(4 * 138_357_544)


def test_the_split_classifier_keeps_its_gathered_input_when_asked_to() -> None:
    plan = {"overrides": {**VGG_SPLIT, "head": {"keep_gathered": True}}}
    once = run_of("vgg-19", "1x8 v100-sxm-16gb", plan={"overrides": VGG_SPLIT})
    kept = run_of("vgg-19", "1x8 v100-sxm-16gb", plan=plan)
    again = ("all_gather", 8 * 4 * 25088)
    assert again in _volumes(once)["B"]
    assert _volumes(kept)["F"] == _volumes(once)["F"]
    assert sorted([*_volumes(kept)["B"], again]) == sorted(_volumes(once)["B"])


def test_reports_count_images(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "vgg-16", "--cluster", "1x1 v100-sxm-16gb", "--precision", "fp32"]
    assert main(["predict", *flags, "--microbatch", "32"]) == 0
    text = capsys.readouterr().out
    assert "images/s/GPU" in text
    assert "tokens/s" not in text
    assert "Winograd kernels need fewer" in text


def test_the_resolved_run_reads_back() -> None:
    run = run_of({**SMALL, "bottleneck": False}, "1x2 v100-sxm-16gb", image=160)
    again = load_run(run_form(run))
    assert again.model == run.model
    assert again.training == run.training


@pytest.mark.parametrize("preset", ["plain", "fsdp", "deepspeed", "megatron"])
def test_other_presets_run_too(preset: str) -> None:
    cluster = "1x1 v100-sxm-16gb" if preset == "plain" else "1x4 v100-sxm-16gb"
    result = predict(run_of("resnet-18", cluster, plan={"preset": preset}))
    assert result.step_time_s.value > 0


def test_flat_equals_folded() -> None:
    run = run_of("resnet-18", "1x4 v100-sxm-16gb")
    folded, flat = predict(run), predict(run, flat=True)
    assert flat.step_time_s.value == pytest.approx(folded.step_time_s.value, rel=1e-9)
