"""Rows of recommendation models become runs, or say why not."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.run.load import load_run
from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.rows import Row

MLPERF: dict[str, Any] = {
    "id": "mlperf_training-1", "family": "mlperf_training", "model": "dlrm",
    "model_class": "recsys", "gpu": "NVIDIA A100-SXM4-80GB (400W)", "gpu_norm": "A100-SXM",
    "gpu_mem_gb": 80.0, "n_gpus": 64, "gpus_per_node": 8, "gbs": 71680,
    "framework": "Merlin HugeCTR",
    "interconnect": "accel: NVLINK 3.0; net: Storage: 2x ConnectX-6 IB HDR 200Gb/sec, Management: "
    "1x ConnectX-6 Ethernet 100Gb/Sec, Compute: 8x ConnectX-6 IB HDR 200Gb/Sec",
}  # fmt: skip
NVIDIA: dict[str, Any] = {
    "id": "nvidia_deeplearningexamples-1", "family": "nvidia_deeplearningexamples",
    "model": "DLRM large", "model_class": "recsys", "precision": "mixed precision (AMP fp16)",
    "gpu": "V100", "gpu_norm": "V100", "gpu_mem_gb": 32.0, "n_gpus": 16, "interconnect": "DGX-2",
    "tp": 1, "pp": 1, "mbs": 4096, "gbs": 65536, "framework": "PyTorch",
}  # fmt: skip


def _row(given: dict[str, Any], **changes: Any) -> Row:
    return Row(**{**given, **changes})


def test_mlperf_rows_are_hugectr_on_the_network_for_computing():
    mapped = map_row(_row(MLPERF))
    assert mapped.run["model"] == "dlrm-mlperf"
    assert mapped.run["stack"] == "hugectr"
    assert mapped.run["cluster"] == "8x8 a100-sxm-80gb, 8x200G ib"
    training: Any = mapped.run["training"]
    assert (training["precision"], training["optimizer"]) == ("fp16", "sgd")
    assert any("fp16" in line for line in mapped.assumed)
    load_run(mapped.run)


def test_dcnv2_trains_with_adagrad():
    training: Any = map_row(_row(MLPERF, model="dlrm_dcnv2")).run["training"]
    assert training["table_optimizer"] == "adagrad"


def test_sixteen_gpus_of_a_dgx2_are_one_node():
    mapped = map_row(_row(NVIDIA))
    assert mapped.run["model"] == "dlrm-criteo-large"
    assert mapped.run["stack"] == "nvidia-dlrm"
    assert mapped.run["cluster"] == "1x16 v100-sxm-32gb [nvlink nvswitch]"
    load_run(mapped.run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "NCF"}, "only DLRM"),
        ({"model": "DLRM huge"}, "tables of this DLRM"),
        ({"mbs": None, "gbs": None}, "neither global batch"),
        ({"precision": ""}, "precision is not stated"),
    ],
)
def test_what_is_not_stated_is_said(changes: dict[str, Any], words: str):
    with pytest.raises(Unsupported, match=words):
        map_row(_row(NVIDIA, **changes))
