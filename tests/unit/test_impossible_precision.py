"""Precisions that no software keeps, and models of classes that are not modelled, are refused."""

from __future__ import annotations

import pytest

from foretrain.errors import CatalogError, InputError
from foretrain.frontends.catalog import aliases, find_model
from foretrain.run.load import load_run


def run(precision, preset="megatron", stack="megatron-te"):
    return load_run(
        {
            "model": "llama-3-8b",
            "training": {"sequence": 4096, "global_batch": 8, "precision": precision},
            "plan": {"preset": preset},
            "cluster": "1x8 h100-sxm",
            "stack": stack,
        }
    )


@pytest.mark.parametrize(
    "precision",
    [
        {"compute": "fp32", "master": "remainder"},
        {"compute": "fp16", "master": "remainder"},
        {"compute": "bf16", "weight": "fp32", "master": "remainder"},
        {"compute": "bf16", "weight": "fp8"},
    ],
)
def test_a_precision_that_nothing_keeps_is_refused(precision):
    with pytest.raises(InputError, match=r"bf16 weights|beside computation"):
        run(precision)


def test_a_preset_with_fp32_weights_has_no_remainders():
    with pytest.raises(InputError, match="needs bf16 weights"):
        run({"compute": "bf16", "master": "remainder"}, preset="ddp", stack="pytorch-eager")
    assert run({"compute": "bf16", "master": "remainder"}).training.roles.master == "remainder"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral-8x7b", "mixture-of-experts"),
        ("mistral-8x22b", "mixture-of-experts"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mixture-of-experts"),
        ("qwen2-57b-a14b", "mixture-of-experts"),
        ("olmoe-1b-7b", "mixture-of-experts"),
        ("zamba2-7b", "state-space"),
        ("deepseek-ai/DeepSeek-V3", "mixture-of-experts"),
        ("mamba-2.8b", "state-space"),
        ("stable-diffusion-xl", "diffusion"),
    ],
)
def test_a_model_of_another_class_is_called_that_and_not_mistaken(name, kind):
    with pytest.raises(CatalogError, match=kind) as error:
        find_model(name)
    assert "did you mean" not in str(error.value)


def test_what_a_stack_decides_at_great_cost_is_listed_as_assumed():
    separate = run("bf16", preset="deepspeed", stack="deepspeed").assumptions
    assert any("attention in separate kernels" in line for line in separate)
    assert not any("attention in separate kernels" in line for line in run("bf16").assumptions)
    fp8 = run("fp8", stack="nemo")
    kept = any(line.startswith("weights kept in fp8") for line in fp8.assumptions)
    assert kept == (fp8.training.roles.weight == "fp8")


@pytest.mark.parametrize(("name", "meant"), [("lama-3-8b", "llama-3-8b"), ("foobarnet", None)])
def test_only_a_name_of_the_same_family_is_proposed(name, meant):
    with pytest.raises(CatalogError) as error:
        find_model(name)
    assert ("did you mean" in str(error.value)) == (meant is not None)
    assert meant is None or meant in str(error.value)


def test_no_model_of_the_catalog_looks_like_one_that_is_not_modelled():
    for name in aliases():
        assert find_model(name)
