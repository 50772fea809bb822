"""Hugging Face config.json files: what is read, what is refused, all problems at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain.errors import FileFormatError
from foretrain.frontends.hf_config import load_hf_config
from foretrain.frontends.transformer import build_graph

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "some_future_key": {"a": [1]},
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "n_inner": None,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}


def load(tmp_path: Path, config: object) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return load_hf_config(path)


def count(spec: Any) -> int:
    return build_graph(spec, batch=1, sequence=1).num_parameters


def test_llama(tmp_path: Path) -> None:
    spec = load(tmp_path, LLAMA)
    assert count(spec) == 8_030_261_248
    assert (spec.family, spec.activation, spec.gated, spec.tied) == (
        "llama",
        "swiglu",
        True,
        False,
    )
    assert spec.max_positions == 8192
    assert spec.name == tmp_path.name
    build_graph(spec, batch=1, sequence=16384)  # a limit of the config, not of the graph


def test_tied_llama_with_its_own_head_dim(tmp_path: Path) -> None:
    spec = load(tmp_path, {**LLAMA, "tie_word_embeddings": True, "head_dim": 64})
    assert spec.head_dim == 64
    lost = 128256 * 4096 + 32 * 4096 * 64 * (2 * 32 + 2 * 8)
    assert count(spec) == 8_030_261_248 - lost


def test_biases_of_llama(tmp_path: Path) -> None:
    spec = load(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    more = 32 * ((4096 + 2 * 1024) + 4096 + (2 * 14336 + 4096))
    assert count(spec) == 8_030_261_248 + more


def test_gpt2(tmp_path: Path) -> None:
    spec = load(tmp_path, GPT2)
    assert count(spec) == 124_439_808
    assert (spec.ffn, spec.gated, spec.activation, spec.dropout) == (3072, False, "gelu_new", 0.1)
    assert load(tmp_path, {**GPT2, "n_inner": 1000}).ffn == 1000
    del (without := dict(GPT2))["vocab_size"]
    spec = load(tmp_path, without)
    assert spec.vocab == 50257
    assert any("50257" in line for line in spec.assumed)


def test_qwen2_has_biases_of_q_k_v_only(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "use_sliding_window": False,
        "sliding_window": 131072,
    }
    spec = load(tmp_path, config)
    assert count(spec) == 7_615_616_512
    assert spec.window is None
    all_layers = {**config, "use_sliding_window": True, "max_window_layers": 0}
    assert load(tmp_path, all_layers).window == 131072
    none = {**config, "use_sliding_window": True, "max_window_layers": 28}
    assert load(tmp_path, none).window is None
    with pytest.raises(FileFormatError, match="some layers only"):
        load(tmp_path, {**config, "use_sliding_window": True, "max_window_layers": 20})


def test_mistral_window_and_default_of_kv_heads(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
    spec = load(tmp_path, config)
    assert (spec.window, count(spec)) == (4096, 7_241_732_096)
    assert load(tmp_path, {**config, "sliding_window": None}).window is None
    del config["num_key_value_heads"]
    assert load(tmp_path, config).kv_heads == 8


def test_llama_without_kv_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    spec = load(tmp_path, {**LLAMA, "num_key_value_heads": None})
    assert spec.kv_heads == 32
    assert any("kv_heads 32" in line for line in spec.assumed)


@pytest.mark.parametrize("kind", ["mixtral", "bart", "Llama", "", None, 3, ["llama"]])
def test_other_model_types_are_refused_with_the_list(tmp_path: Path, kind: object) -> None:
    with pytest.raises(FileFormatError, match=r"bert, bloom, .*falcon, .*gpt2, .*vit"):
        load(tmp_path, {**LLAMA, "model_type": kind})


def test_all_problems_come_together(tmp_path: Path) -> None:
    config = {
        **LLAMA,
        "hidden_size": 4100,
        "num_key_value_heads": 5,
        "vocab_size": float("nan"),
        "num_hidden_layers": -3,
        "hidden_act": "mish",
        "tie_word_embeddings": 1,
    }
    del config["intermediate_size"]
    with pytest.raises(FileFormatError) as caught:
        load(tmp_path, config)
    text = str(caught.value)
    for part in (
        "hidden_size: hidden 4100 is not divisible by heads 32",
        "num_key_value_heads: kv_heads 5 does not divide heads 32",
        "vocab_size: bad value (got nan)",
        "num_hidden_layers: bad value (got -3)",
        "hidden_act: unknown activation (got 'mish')",
        "tie_word_embeddings: bad value",
        "intermediate_size: missing",
    ):
        assert part in text
    assert len(caught.value.problems) == 7
    assert str(tmp_path / "config.json") in text


@pytest.mark.parametrize("value", ["4096", 0, -1, 2.5, float("inf"), True, [4096], {}])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"]
)
def test_bad_numbers_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(FileFormatError, match=f"{key}: bad value"):
        load(tmp_path, {**LLAMA, key: value})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b"\xff\xfe\x00{", "not readable"),
        (b"[" * 200_000, "not readable"),
        (b'{"a": 1' + b"0" * 6000 + b"}", "not readable"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        load_hf_config(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        load_hf_config(tmp_path / "nothing.json")
    with pytest.raises(FileFormatError, match="is a folder"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(FileFormatError, match=r"is a folder; give .*config.json"):
        load_hf_config(str(tmp_path))


def test_a_name_in_the_config_wins_over_the_file_name(tmp_path: Path) -> None:
    assert load(tmp_path, {**LLAMA, "_name_or_path": "meta-llama/My-Model"}).name == "My-Model"
    assert load(tmp_path, {**LLAMA, "_name_or_path": ""}).name == tmp_path.name
    bom = tmp_path / "mine.json"
    bom.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load_hf_config(bom).name == "mine"
