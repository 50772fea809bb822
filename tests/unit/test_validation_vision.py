"""Rows of image models: which network, stack and precision a source means."""

from __future__ import annotations

import pytest

from foretrain.frontends.build import build_graph
from foretrain.run.load import load_run
from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.rows import Row


def row(**changes) -> Row:
    usual = {
        "id": "x", "model": "resnet50", "model_class": "vision_cnn", "input_size": "224x224x3",
        "precision": "fp32", "gpu": "V100-SXM2", "gpu_norm": "V100", "gpu_mem_gb": 16.0,
        "n_gpus": 8, "gpus_per_node": 8, "mbs": 128, "gbs": 1024, "framework": "pytorch",
    }  # fmt: skip
    return Row(**{**usual, **changes})


def test_a_row_becomes_a_run_that_loads() -> None:
    mapped = map_row(row())
    run = load_run(mapped.run)
    assert (run.model.name, run.plan.preset, run.plan.dp) == ("resnet-50", "ddp", 8)
    assert (run.training.image, run.training.global_batch) == (224, 1024)
    assert (run.training.precision, run.training.optimizer) == ("fp32", "sgd-momentum")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("ResNet-50 v1.5", "resnet-50"),
        ("tv_resnet50", "resnet-50"),
        ("gluon_resnet50_v1b", "resnet-50"),
        ("resnet152", "resnet-152"),
        ("ResNeXt101-32x4d", "resnext-101-32x4d"),
        ("vgg16_bn", "vgg-16-bn"),
        ("mobilenetv2_100", "mobilenet-v2"),
        ("EfficientNet efficientnet-b4", "efficientnet-b4"),
    ],
)
def test_names_of_sources(name: str, model: str) -> None:
    assert map_row(row(model=name)).run["model"] == model


@pytest.mark.parametrize(
    ("changes", "precision", "stack"),
    [
        ({}, "fp32", "pytorch-vision"),
        ({"precision": "fp16 AMP"}, "fp16", "pytorch-vision"),
        ({"precision": "amp fp16 channels_last", "framework": "timm benchmark.py"}, "fp16",
         "pytorch-vision-nhwc"),
        ({"gpu": "A100-SXM", "gpu_norm": "A100-SXM", "gpu_mem_gb": 40.0}, "tf32",
         "pytorch-vision"),
        ({"precision": "fp32 (TF32 on Ampere+)"}, "fp32", "pytorch-vision"),
        ({"framework": "MindSpore/resnet50v1.5"}, "fp32", "pytorch-vision"),
        ({"framework": "TensorFlow", "precision": "AMP"}, "fp16", "pytorch-vision-nhwc"),
    ],
)  # fmt: skip
def test_precision_and_layout(changes, precision: str, stack: str) -> None:
    run = map_row(row(**changes)).run
    assert (run["training"]["precision"], run["stack"]) == (precision, stack)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "resnet50d"}, "not in the catalog"),
        ({"framework": "MxNet"}, "no stack is near"),
        ({"framework": ""}, "framework is not stated"),
        ({"precision": ""}, "precision is not stated"),
        ({"mbs": None, "gbs": None}, "neither global batch"),
        ({"tp": 2}, "model-parallel"),
    ],
)
def test_what_is_not_predicted(changes, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        map_row(row(**changes))


VIT = {
    "model": "vit_base_patch16_224", "model_class": "vision_cnn_or_vit", "n_gpus": 1,
    "precision": "amp fp16 contiguous", "gpu": "RTX3090", "gpu_norm": "RTX3090", "gpu_mem_gb": 24.0,
    "framework": "timm benchmark.py", "mbs": 192, "gbs": 192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("vit_base_patch16_224", 86.57),
        ("deit_small_patch16_224", 22.05),
        ("vit_base_patch16_384", 86.86),
        ("vit_large_patch32_384", 306.63),
        ("vit_tiny_patch16_384", 5.79),
        ("vit_giant_patch14_224", 1012.61),
    ],
)
def test_vision_transformers_of_timm_have_their_parameters(name: str, millions: float) -> None:
    mapped = map_row(row(**{**VIT, "model": name, "input_size": ""}))
    run = load_run(mapped.run)
    graph = build_graph(run.model, batch=1, sequence=run.training.sequence)
    assert round(graph.num_parameters / 1e6, 2) == millions
    assert (run.training.optimizer, run.plan.preset) == ("sgd-momentum", "plain")
    assert (mapped.stack["attention"], run.stack.name) == ("unfused", "pytorch-eager")


def test_vision_transformers_of_t5x_are_replicas_under_xla() -> None:
    changes = {"model": "vit ViT/B-16", "model_class": "vision_vit", "framework": "T5X ViT",
               "precision": "bf16", "n_gpus": 8, "gbs": 512, "mbs": 64, "gpu": "A100-SXM",
               "gpu_norm": "A100-SXM", "gpu_mem_gb": 80.0}  # fmt: skip
    run = load_run(map_row(row(**changes)).run)
    assert (run.stack.name, run.plan.zero, run.plan.dp) == ("jax-xla", 0, 8)
    assert run.training.optimizer == "adamw"
    assert run.training.sequence == 577  # fine-tuning takes 384 pixels
    pretraining = load_run(map_row(row(**{**changes, "gbs": 4096, "mbs": 512})).run)
    assert pretraining.training.sequence == 197


def test_flagperf_s_vision_transformer_runs_in_mixed_precision() -> None:
    changes = {**VIT, "model": "vit", "family": "flagperf", "framework": "pytorch",
               "precision": "fp32", "gpu": "A100-SXM", "gpu_norm": "A100-SXM",
               "gpu_mem_gb": 40.0}  # fmt: skip
    mapped = map_row(row(**changes))
    assert mapped.run["training"]["precision"] == "fp16"
    assert any("sets amp" in line for line in mapped.assumed)


@pytest.mark.parametrize(
    "name", ["vit_relpos_base_patch16_224", "deit_tiny_distilled_patch16_224",
             "beit_base_patch16_224", "deit3_base_patch16_384", "vit_base_r50_s16_384"],
)  # fmt: skip
def test_relatives_of_vision_transformers_are_not_predicted(name: str) -> None:
    with pytest.raises(Unsupported, match="not in the catalog"):
        map_row(row(**{**VIT, "model": name}))
