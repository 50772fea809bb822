"""Rows of image models: which network, stack and precision a source means."""

from __future__ import annotations

import pytest

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
