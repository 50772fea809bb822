"""Rows of BERT: head, predictions per sample, stack, attention and optimizer by their sources."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.run.stacks import load_stack
from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.rows import Row

ROW: dict[str, Any] = {
    "id": "x-1", "family": "nvidia_deeplearningexamples", "model": "BERT-large",
    "model_class": "bert", "n_layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096,
    "vocab": 30522, "seq_len": 512, "precision": "mixed precision (AMP fp16)", "gpu": "A100",
    "gpu_norm": "A100-SXM", "gpu_mem_gb": 80.0, "n_gpus": 1, "tp": 1, "pp": 1, "dp": 1,
    "mbs": 32, "gbs": 4096, "ga_steps": 128, "framework": "PyTorch", "task": "training",
}  # fmt: skip


def mapped(**change: Any) -> Any:
    return map_row(Row(**{**ROW, **change}))


@pytest.mark.parametrize(("length", "masked"), [(128, 20), (512, 80)])
def test_pretraining_predicts_as_many_words_as_the_original(length: int, masked: int) -> None:
    item = mapped(seq_len=length, framework="TensorFlow")
    assert item.run["model"]["masked"] == masked
    assert any(f"{masked} predictions" in line for line in item.assumed)
    assert item.stack["attention"] == "unfused"
    assert item.run["training"]["optimizer"] == "lamb"


def test_dlperf_trains_with_adam() -> None:
    item = mapped(family="oneflow_dlperf", framework="MxNet/BERT", seq_len=128)
    assert item.run["training"]["optimizer"] == "adamw"
    assert item.run["stack"] == "mxnet"


@pytest.mark.parametrize(
    ("family", "framework", "notes", "stack"),
    [
        ("oneflow_dlperf", "TensorFlow/bert", "batch size=64 & with xla", "tensorflow-xla"),
        ("oneflow_dlperf", "TensorFlow/bert", "& without xla", "tensorflow"),
        ("nvidia_deeplearningexamples", "TensorFlow2", "", "tensorflow-xla"),
        ("oneflow_dlperf", "MindSpore/bert", "& without Graph Kernel Fusion", "mindspore"),
        ("oneflow_dlperf", "MindSpore/bert", "& with Graph Kernel Fusion", "mindspore-fused"),
        ("oneflow_dlperf", "PaddlePaddle/bert", "", "paddle-2020"),
        ("oneflow_dlperf", "OneFlow/BERT", "", "oneflow"),
        ("oneflow_dlperf", "NVIDIADeepLearningExamples/PyTorch/BERT", "", "pytorch-apex-2020"),
        ("lambda_gpu_benchmark", "NGC PyTorch DeepLearningExamples", "", "pytorch-apex"),
        ("nvidia_deeplearningexamples", "PyTorch", "", "pytorch-eager"),
    ],
)
def test_every_framework_has_a_stack(family: str, framework: str, notes: str, stack: str) -> None:
    assert mapped(family=family, framework=framework, notes=notes).run["stack"] == stack


def test_kernels_of_16_bits_reach_the_bandwidth_since_pytorch_1_6() -> None:
    assert load_stack("pytorch-apex").half_share == 1.0
    assert load_stack("pytorch-apex-2020").half_share < 1.0


def test_a_stand_in_is_named() -> None:
    item = mapped(framework="PaddlePaddle", seq_len=128)
    assert any("PaddlePaddle of 2022 as pytorch-eager" in line for line in item.assumed)


@pytest.mark.parametrize("framework", ["PyTorch", "PaddlePaddle"])
def test_scripts_that_bin_their_samples_train_on_shorter_ones(framework: str) -> None:
    item = mapped(framework=framework)
    assert item.run["training"]["sequence"] == 288
    assert item.run["model"]["masked"] == 43
    assert any("288 tokens on average" in line for line in item.assumed)
    assert mapped(framework="TensorFlow").run["training"]["sequence"] == 512


def test_scripts_of_2020_predict_every_word() -> None:
    item = mapped(family="oneflow_dlperf", framework="NVIDIA/PyTorch/BERT", seq_len=128)
    assert "masked" not in item.run["model"]
    assert item.run["model"]["vocab"] == 30528


def test_hugging_face_predicts_words_everywhere() -> None:
    item = mapped(family="mli_3090ti", framework="HF Transformers Trainer")
    assert item.run["model"]["head"] == "mlm"
    assert "masked" not in item.run["model"]
    assert item.run["stack"] == "hf-trainer"
    assert "optimizer" not in item.stack
    fused = mapped(
        family="mli_3090ti", framework="HF Transformers Trainer", optimizer="apex fused AdamW"
    )
    assert fused.stack["optimizer"] == "fused"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "BioBERT"}, "relatives"),
        ({"seq_len": None}, "sequence length"),
        ({"hidden": None, "model": "BERT"}, "shape"),
        ({"framework": "Chainer"}, "no stack"),
        ({"family": "mlperf_training"}, "packs samples"),
    ],
)
def test_other_rows_are_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        mapped(**change)


@pytest.mark.parametrize(
    ("device", "memory", "word"), [("A100-SXM", 80.0, "tf32"), ("V100", 32.0, "fp32")]
)
def test_tensorflow_computes_fp32_in_tf32_where_there_is_one(
    device: str, memory: float, word: str
) -> None:
    changes = {"precision": "FP32", "gpu_norm": device, "gpu": device, "gpu_mem_gb": memory}
    item = mapped(framework="TensorFlow2", **changes)
    assert item.run["training"]["precision"] == word
