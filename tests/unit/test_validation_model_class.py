"""Rows without `model_class`, as docs/reference/measured-runs.md allows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrain.validation.mapping import map_row
from foretrain.validation.mapping.words import Unsupported
from foretrain.validation.model_class import class_of
from foretrain.validation.rows import Row, read_rows

HEAD = "id,model,gpu,n_gpus,seq_len,precision,tp,pp,mbs,gbs,framework,model_class\n"


def rows(tmp_path: Path, *lines: str) -> list[Row]:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return [run.row for run in read_rows(path)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llm_dense"),
        ("bert-large", "bert"),
        ("t5-large", "t5"),
        ("resnet50", "vision_cnn"),
        ("vit-base-16", "vision_vit"),
        ("dlrm-criteo-large", "recsys"),
        ("nobody knows", ""),
    ],
)
def test_the_class_follows_from_a_name_of_the_catalog(model: str, expected: str) -> None:
    assert class_of(model, has_shape=False) == expected


def test_a_shape_under_another_name_is_a_dense_decoder_unless_the_name_denies_it() -> None:
    assert class_of("our own 7B", has_shape=True) == "llm_dense"
    assert class_of("mixtral-8x7b", has_shape=True) == ""
    assert class_of("our bert", has_shape=True) == ""


def test_models_of_the_catalog_need_neither_class_nor_shape(tmp_path: Path) -> None:
    found = rows(
        tmp_path,
        "a,llama-3-8b,H100,16,8192,bf16,1,1,1,64,torchtitan,",
        "b,bert-large,MI100,4,512,fp16,1,1,8,256,PyTorch,",
        "c,t5-large,A100,8,512,bf16,1,1,8,64,PyTorch,",
        "d,vgg-16,V100,8,,fp16,,,32,256,PyTorch,",
        "e,vit-base-16,V100,8,,fp16,,,32,256,PyTorch,",
        "f,dlrm-criteo-large,A100-80GB,8,,fp16,,,8192,65536,PyTorch,",
    )
    models = [map_row(row).run["model"] for row in found]
    assert models[0] == "llama-3-8b"
    assert models[1]["family"] == "bert"
    t5 = models[2]
    assert (t5["layers"], t5["decoder_layers"], t5["hidden"], t5["ffn"]) == (24, 24, 1024, 4096)
    assert models[3] == "vgg-16"
    assert (models[4]["family"], models[4]["patch"]) == ("vit", 16)
    assert models[5] == "dlrm-criteo-large"


def test_an_unknown_class_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    stated, absent = rows(
        tmp_path,
        "a,llama-3-8b,H100,16,8192,bf16,1,1,1,64,torchtitan,decoder",
        "b,own model,H100,16,8192,bf16,1,1,1,64,torchtitan,",
    )
    with pytest.raises(Unsupported, match="'decoder' is not modelled; modelled are llm_dense"):
        map_row(stated)
    with pytest.raises(Unsupported, match="the catalog has no model of this name"):
        map_row(absent)
