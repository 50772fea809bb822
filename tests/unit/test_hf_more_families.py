"""Configs of more families: the count of the published checkpoint, or why the family waits."""

from typing import Any

import pytest

from foretrain.errors import FileFormatError
from foretrain.frontends.hf_config import KEYS, model_from_hf_mapping
from foretrain.frontends.hf_more_families import LATER, SPECIAL
from foretrain.frontends.transformer import build_graph

#: Family, keys of the checkpoint's config.json, its parameters in billions (tied weights once).
PUBLISHED: list[tuple[str, dict[str, Any], float]] = [
    ("starcoder2", {"hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
     "num_attention_heads": 24, "num_key_value_heads": 2, "vocab_size": 49152, "use_bias": True},
     3.030),
    ("gpt_bigcode", {"n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
     "n_positions": 8192, "vocab_size": 49152, "multi_query": True}, 15.52),
    ("gptj", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
     "vocab_size": 50400, "rotary_dim": 64, "tie_word_embeddings": False}, 6.051),
    ("granite", {"hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49155,
     "tie_word_embeddings": True}, 8.171),
    ("olmo", {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
     "num_attention_heads": 32, "vocab_size": 50304}, 6.888),
    ("olmo2", {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
     "num_attention_heads": 32, "vocab_size": 100352}, 7.299),
    ("smollm3", {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
     "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}, 3.075),
    ("stablelm", {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
     "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 50304,
     "use_qkv_bias": False}, 2.795),
    ("cohere", {"hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
     "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000}, 34.98),
    ("glm", {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
     "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552,
     "attention_bias": True}, 9.400),
    ("chatglm", {"hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
     "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2,
     "kv_channels": 128, "padded_vocab_size": 65024, "add_qkv_bias": True,
     "add_bias_linear": False}, 6.244),
    ("internlm2", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 92544, "bias": False},
     7.738),
    ("distilbert", {"dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12,
     "vocab_size": 30522, "max_position_embeddings": 512}, 0.06699),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "billions"), PUBLISHED, ids=lambda v: str(v)[:12])
def test_the_count_is_the_published_one(family, keys, billions):
    spec = model_from_hf_mapping({"model_type": family, **keys}, name="m", where="config.json")
    count = build_graph(spec, batch=1, sequence=128).num_parameters
    assert count == pytest.approx(billions * 1e9, rel=0.002)


def test_every_family_of_the_table_is_tried():
    assert {family for family, _, _ in PUBLISHED} == set(SPECIAL)
    assert not set(KEYS) & set(LATER)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
        ("gptj", {"rotary_dim": 4096}, "rotary_dim"),
        ("distilbert", {"architectures": ["DistilBertForTokenClassification"]}, "architectures"),
    ],
)
def test_what_would_be_another_shape_is_refused(family, keys, message):
    shape = next(k for name, k, _ in PUBLISHED if name == family)
    with pytest.raises(FileFormatError, match=message):
        model_from_hf_mapping({"model_type": family, **shape, **keys}, name="m", where="c.json")


@pytest.mark.parametrize("family", ["mixtral", "mamba", "gemma3", "gemma3_text", "whisper", "bart"])
def test_a_family_that_waits_says_for_what(family):
    with pytest.raises(FileFormatError, match=r"it needs .*, not modelled yet"):
        model_from_hf_mapping({"model_type": family}, name="m", where="config.json")


def test_small_liberties_are_assumptions():
    shape = next(k for name, k, _ in PUBLISHED if name == "olmo2")
    spec = model_from_hf_mapping({"model_type": "olmo2", **shape}, name="m", where="config.json")
    assert any(line.startswith("norms of olmo2") for line in spec.assumed)
