"""Encoders, parallel blocks and optimizers: collectives, configs and bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest

from foretrain.compiler.optimizer import (
    OPTIMIZERS,
    factored_share,
    moment_bytes,
    state_bytes,
    update_bytes,
)
from foretrain.errors import FileFormatError, InputError
from foretrain.frontends.attention import attention_density
from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.hf_config import model_from_hf_mapping
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.transformer import build_graph
from foretrain.graph.precision import Precision
from foretrain.predict import predict
from foretrain.program import Comm, CommEvent, Program, Run
from foretrain.run.aliases import OPTIMIZERS as WORDS
from foretrain.run.load import load_run
from foretrain.strategy.plan import Plan
from support import compile_small

SEQUENCE, MICRO, HIDDEN, LAYERS = 32, 2, 64, 4
#: Bytes of one activation of the residual stream (bf16).
STREAM = MICRO * SEQUENCE * HIDDEN * 2


def small(family: str, **more: Any) -> ModelSpec:
    usual = {"layers": LAYERS, "hidden": HIDDEN, "heads": 8, "ffn": 96, "vocab": 160}
    model = resolve_model({"family": family, **usual, **more})
    assert isinstance(model, ModelSpec)
    return model


def layer_collectives(spec: ModelSpec, plan: Plan) -> list[tuple[str, float, str]]:
    """(collective, bytes, category) of one micro-step in the segments of one layer."""
    program: Program = compile_small(
        spec, plan, plan.tp, accumulation=1, microbatch=MICRO, sequence=SEQUENCE
    ).program
    names = {s.name: s for s in program.segments if s.name.startswith("layers")}
    assert names
    found: list[tuple[str, float, str]] = []
    for segment in names.values():
        for item in segment.items:
            event = program.events[item.event]
            if isinstance(event, CommEvent):
                found.append((event.collective, event.bytes, segment.name))
    return found


@pytest.mark.parametrize("family", ["bert", "roberta", "opt", "bloom", "mpt", "gemma", "qwen3"])
def test_a_sequential_layer_reduces_twice_forward_and_twice_backward(family: str) -> None:
    found = layer_collectives(small(family), Plan(tp=4, zero=0, sequence_parallel=False))
    assert [(kind, size) for kind, size, _ in found] == [("all_reduce", STREAM)] * 4


@pytest.mark.parametrize("family", ["bert", "bloom", "qwen3"])
def test_sequence_parallelism_gathers_and_scatters_instead(family: str) -> None:
    found = layer_collectives(small(family), Plan(tp=4, zero=0, sequence_parallel=True))
    assert {size for _, size, _ in found} == {STREAM}
    kinds = [kind for kind, _, _ in found]
    assert kinds.count("reduce_scatter") == 4
    assert kinds.count("all_gather") == 6  # two forward, two again for weight gradients, two of dy


@pytest.mark.parametrize(("family", "backward"), [("falcon", 1), ("phi", 1), ("gpt_neox", 2)])
def test_a_parallel_block_reduces_once_forward(family: str, backward: int) -> None:
    """With one norm the gradients of attention and MLP are summed before their reduction."""
    found = layer_collectives(small(family), Plan(tp=4, zero=0, sequence_parallel=False))
    assert [(kind, size) for kind, size, _ in found] == [("all_reduce", STREAM)] * (1 + backward)


def test_a_gradient_of_a_replicated_head_norm_is_summed_over_tp() -> None:
    program = compile_small(
        small("qwen3"), Plan(tp=4, zero=0), 4, accumulation=1, microbatch=MICRO, sequence=SEQUENCE
    ).program
    sizes = [
        event.bytes
        for rank_class in program.classes
        for entry in rank_class.entries
        if isinstance(entry, Comm) and isinstance(event := program.events[entry.event], CommEvent)
    ]
    assert LAYERS * 2 * (HIDDEN // 8) * 4 in sizes  # q and k, fp32
    assert any(isinstance(entry, Run) for entry in program.classes[0].entries)


def test_masked_positions_shrink_the_head_only() -> None:
    whole, some = small("bert"), small("bert", masked=5)
    few = build_graph(some, batch=3, sequence=SEQUENCE)
    full = build_graph(whole, batch=3, sequence=SEQUENCE)
    assert few.num_parameters == full.num_parameters
    lost = 3 * (SEQUENCE - 5) * 2 * HIDDEN * (160 + HIDDEN)
    assert full.forward_flops() - few.forward_flops() == lost


def test_an_encoder_sees_the_whole_square() -> None:
    assert attention_density(128, None, causal=False) == 1.0
    assert attention_density(128, 16, causal=True) < 0.5


def test_the_length_of_images_follows_from_their_patches() -> None:
    run = load_run({"model": "vit-b-16", "cluster": "1x1 a100-sxm-80gb",
                    "training": {"global_batch": 8}})  # fmt: skip
    assert run.training.sequence == 197
    result = predict(run)
    assert result.step_time_s.value > 0
    assert not any("no cost model" in line for line in result.warnings)
    # 17.6 GFLOP (multiply-adds) per image is the published cost of ViT-B/16
    assert result.model_flops_per_step / (3 * 8 * 2) == pytest.approx(17.6e9, rel=0.01)
    with pytest.raises(InputError, match="197 positions"):
        predict(load_run({"model": "vit-b-16", "cluster": "1x1 a100-sxm-80gb",
                          "training": {"global_batch": 8, "sequence": 128}}))  # fmt: skip
    with pytest.raises(InputError, match="do not divide"):
        small("vit", vocab=None, image=100)


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "bert": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
         "type_vocab_size": 2, "hidden_act": "gelu", "architectures": ["BertForMaskedLM"]},
        109_514_298,
    ),
    "roberta": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "vocab_size": 50265, "max_position_embeddings": 514,
         "type_vocab_size": 1, "hidden_act": "gelu", "architectures": ["RobertaModel"]},
        124_645_632,
    ),
    "opt": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
         "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
         "do_layer_norm_before": True, "activation_function": "relu"},
        125_239_296,
    ),
    "bloom": ({"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
              559_214_592),
    "mpt": (
        {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432, "no_bias": True,
         "expansion_ratio": 4, "attn_config": {"alibi": True}},
        6_649_286_656,
    ),
    "falcon": (
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "bias": False,
         "multi_query": True, "parallel_attn": True, "vocab_size": 65024, "alibi": False,
         "new_decoder_architecture": False},
        6_921_720_704,
    ),
    "phi": (
        {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "partial_rotary_factor": 0.4},
        2_779_683_840,
    ),
    "phi3": (
        {"hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064,
         "hidden_act": "silu", "max_position_embeddings": 4096, "sliding_window": 2047},
        3_821_079_552,
    ),
    "gemma": (
        {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576,
         "vocab_size": 256000, "hidden_act": "gelu"},
        8_537_680_896,
    ),
    "gemma2": (
        {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
         "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
         "layer_types": ["sliding_attention", "full_attention"] * 13},
        2_614_341_888,
    ),
    "t5": (
        {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
         "feed_forward_proj": "relu", "vocab_size": 32128, "dropout_rate": 0.1},
        60_506_624,
    ),
    "mt5": (
        {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8,
         "num_heads": 6, "feed_forward_proj": "gated-gelu", "vocab_size": 250112,
         "tie_word_embeddings": False},
        300_176_768,
    ),
    "gpt_neox": (
        {"hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
         "intermediate_size": 24576, "vocab_size": 50432, "rotary_pct": 0.25,
         "use_parallel_residual": True, "hidden_act": "gelu_fast", "tie_word_embeddings": False},
        20_554_567_680,
    ),
    "qwen3": (
        {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
         "vocab_size": 151936, "tie_word_embeddings": False, "hidden_act": "silu"},
        8_190_735_360,
    ),
    "vit": (
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3,
         "architectures": ["ViTForImageClassification"], "hidden_act": "gelu"},
        86_567_656,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_configs_of_hugging_face(family: str) -> None:
    config, count = CONFIGS[family]
    spec = model_from_hf_mapping({"model_type": family, **config}, name=family, where="config")
    graph = build_graph(spec, batch=1, sequence=spec.image_sequence or 8)
    assert graph.num_parameters == count
    own_width = ("qwen3", "gemma2", "mt5")
    assert spec.head_dim * spec.heads >= spec.hidden or family in own_width


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 26}, "layer_types"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "architectures"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_a_family_cannot_have_is_refused(
    family: str, change: dict[str, Any], word: str
) -> None:
    config = {"model_type": family, **CONFIGS[family][0], **change}
    with pytest.raises(FileFormatError, match=word):
        model_from_hf_mapping(config, name=family, where="config")


def test_every_word_of_an_optimizer_has_a_rule() -> None:
    assert set(WORDS) == set(OPTIMIZERS)


def test_bytes_of_optimizers() -> None:
    mixed = Precision(grad_accumulate="fp32")  # fp32 master and moments
    assert {name: state_bytes(name, mixed) for name in ("sgd", "sgd-momentum", "adam", "lamb")} == {
        "sgd": 4.0, "sgd-momentum": 8.0, "adam": 12.0, "lamb": 12.0,
    }  # fmt: skip
    assert update_bytes("adamw", mixed) == 28.0
    assert update_bytes("lamb", mixed) == 48.0
    assert moment_bytes("adam-8bit", mixed) == 2 * (1 + 4 / 256)
    assert moment_bytes("adafactor", mixed, 0.01) == pytest.approx(0.04)


def test_factored_moments_keep_a_row_and_a_column_of_each_matrix() -> None:
    graph = build_graph(small("llama"), batch=1, sequence=8)
    weights = [w for block in graph.blocks for w in block.weights]
    down = next(w for w in weights if w.name == "mlp.down.weight")
    assert factored_share([down]) == (64 + 96) / (64 * 96)
    assert 0 < factored_share(weights) < 0.1
    assert factored_share([]) == 0.0


@pytest.mark.parametrize("word", ["lamb", "adafactor", "adam-8bit", "sgdm", "adamw8bit"])
def test_optimizers_run(word: str) -> None:
    run = {"model": "bert-base", "cluster": "1x1 a100-sxm-80gb",
           "training": {"global_batch": 8, "sequence": 128, "optimizer": word}}  # fmt: skip
    result = predict(load_run(run))
    assert result.step_time_s.value > 0
    assert not any("no cost model" in line for line in result.warnings)
