"""Rows of T5 and of decoders with a family of their own, and one name per model over sources."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.frontends.build import build_graph
from foretrain.frontends.catalog import find_model
from foretrain.run.load import load_run
from foretrain.validation.compare import compare
from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.models import model_of, on_one_device
from foretrain.validation.outcomes import Outcome
from foretrain.validation.report import build_report, render_by
from foretrain.validation.rows import Measured, Row

T5X: dict[str, Any] = {
    "id": "x-1", "family": "jax_toolbox", "model": "t5x T5-v1.1-large", "model_class": "t5",
    "n_layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 2816,
    "vocab": 32128, "seq_len": 512, "arch_note": "24 enc + 24 dec layers, gated-GELU",
    "precision": "bf16", "gpu": "A100-SXM", "gpu_norm": "A100-SXM", "gpu_mem_gb": 80.0,
    "n_gpus": 64, "gpus_per_node": 8, "tp": 1, "pp": 1, "sharding": "DP", "mbs": 32, "gbs": 2048,
    "framework": "T5X (rosetta)",
}  # fmt: skip


def mapped(**change: Any) -> Any:
    return map_row(Row(**{**T5X, **change}))


def test_t5x_trains_replicas_on_two_lengths_without_dropout() -> None:
    item = mapped()
    run = load_run(item.run)
    assert build_graph(run.model, batch=1, sequence=8).num_parameters == (
        find_model("t5-v1.1-large").num_parameters
    )
    assert (run.training.sequence, run.training.target_sequence) == (512, 128)
    assert (run.model.dropout, run.model.inner_dropout, run.plan.zero) == (0.0, 0.0, 0)
    assert any("target_sequence = 128" in line for line in item.assumed)


def test_megatron_builds_t5_of_its_own_parts() -> None:
    item = mapped(
        family="megatron_ci_golden", framework="Megatron-LM", arch_note="", vocab=None,
        notes='opts={"encoder-num-layers":12,"decoder-num-layers":6}', n_layers=12,
        attention_impl="unfused", zero_stage="0", recompute="none", sp="no",
    )  # fmt: skip
    run = load_run(item.run)
    assert (run.model.layers, run.model.decoder_layers) == (12, 6)
    assert (run.model.positions, run.model.norm, run.model.mlp_bias) == (
        "learned",
        "layernorm",
        True,
    )
    assert run.model.activation == "gelu"
    assert any("vocab" in line for line in item.assumed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_layers": None}, "shape is not stated"),
        ({"seq_len": None}, "sequence length is not stated"),
        ({"model_class": "seq2seq", "model": "BART"}, "BART is not modelled"),
        ({"model_class": "other", "model": "BERT-large (MLPerf, seq 512)"}, "packs samples"),
        ({"model_class": "other", "model": "Llama2 70B LoRA"}, "LoRA"),
        ({"model_class": "other", "model": "MoFlow"}, "this class of models"),
    ],
)
def test_what_is_not_predicted_of_encoders_with_decoders(change: Any, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        mapped(**change)


DECODER: dict[str, Any] = {
    **T5X, "family": "x", "model_class": "llm_dense", "n_layers": 24, "hidden": 2048, "heads": 16,
    "kv_heads": 16, "head_dim": 128, "ffn": 8192, "vocab": 50368, "seq_len": 2048, "arch_note": "",
    "framework": "llm-foundry/Composer FSDP", "sharding": "FSDP FULL_SHARD", "recompute": "none",
    "gbs": 2048,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "family", "positions", "biases"),
    [
        ("MPT-1b", "mpt", "alibi", False),
        ("BLOOM-like GPT 181B", "bloom", "alibi", True),
        ("opt_13", "opt", "learned", True),
        ("falcon-7b", "falcon", "rotary", False),
        ("gemma-2b", "gemma", "rotary", False),
        ("gemma-2-9b", "gemma2", "rotary", False),
        ("phi-2", "phi", "rotary", True),
        ("phi-3-mini", "phi3", "rotary", False),
    ],
)
def test_decoders_go_to_their_own_family(
    model: str, family: str, positions: str, biases: bool
) -> None:
    spec = load_run(map_row(Row(**{**DECODER, "model": model})).run).model
    assert (spec.family, spec.positions, spec.mlp_bias) == (family, positions, biases)


def test_the_mpt_of_benchmark_files_has_learned_positions_and_biases() -> None:
    """Its published count, 1.3285e9 at 8192 positions, is that with biases."""
    notes = "microbatch = per-device; learned pos emb/no alibi per yaml"
    run = load_run(map_row(Row(**{**DECODER, "model": "MPT-1b", "notes": notes,
                                  "seq_len": 8192})).run)  # fmt: skip
    assert (run.model.family, run.model.positions) == ("mpt", "learned")
    count = build_graph(run.model, batch=1, sequence=8).num_parameters
    assert count / 1e9 == pytest.approx(1.3285, abs=5e-5)


def test_one_name_per_model_over_sources() -> None:
    rows = [
        Row(**{**T5X, "id": str(i), "n_gpus": 1, **change})
        for i, change in enumerate(
            [
                {"model": "tv_resnet50", "model_class": "vision_cnn_or_vit"},
                {"model": "ResNet-50 v1.5", "model_class": "vision_cnn"},
                {"model": "BERT-large", "model_class": "bert"},
                {"model": "vit_base_patch16_384", "model_class": "vision_cnn_or_vit"},
                {"model": "swin", "model_class": "vision_vit"},
                {},
            ]
        )
    ]
    items = compare(
        [Outcome(row=row, status="unsupported", reason="x") for row in rows],
        [Measured() for _ in rows],
    )
    assert [model_of(item) for item in items] == [
        "resnet-50", "resnet-50", "bert-large", "vit-base-16 at 384 pixels", "swin",
        "t5x T5-v1.1-large",
    ]  # fmt: skip
    assert [on_one_device(item) for item in items] == [True] * 5 + [False]
    text = render_by(build_report(items), "model")
    assert "resnet-50" not in text  # nothing is predicted here
    assert "6 rows: 0 predicted" in text
