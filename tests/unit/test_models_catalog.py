"""Models of the catalog and inline models: names, exact parameter counts, defaults, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretrain.errors import CatalogError, FileFormatError, InputError
from foretrain.frontends.build import build_graph
from foretrain.frontends.catalog import aliases, find_model, list_models, resolve_model
from foretrain.frontends.families import model_from_mapping

#: Shapes are published, exact element counts were not at hand.
UNCONFIRMED = (
    "bloom-3b",
    "falcon-40b",
    "falcon-180b",
    "gpt2-proteus",
    "mpt-30b",
    "opt-13b",
    "opt-30b",
    "opt-66b",
    "opt-175b",
    "qwen3-1.7b",
    "roberta-encoder-large",
)

NAMES = [spec.name for spec in list_models()]

# Table 1 of arXiv 2104.04473 and table 3 of 2205.05198: billions as printed.
PRINTED = {
    "gpt-1.7b": "1.7",
    "gpt-3.6b": "3.6",
    "gpt-7.5b": "7.5",
    "gpt-18b": "18.4",
    "gpt-39b": "39.1",
    "gpt-76b": "76.1",
    "gpt-145b": "145.6",
    "gpt-310b": "310.1",
    "gpt-530b": "529.6",
    "gpt-1t": "1008.0",
    "gpt-22b": "22",
    "gpt3-175b": "175",
    "gpt3-125m": "0.125",
    "gpt3-350m": "0.36",
    "gpt3-760m": "0.760",
    "gpt3-1.3b": "1.3",
    "gpt3-2.7b": "2.7",
    "gpt3-6.7b": "6.7",
    "gpt3-13b": "13",
}

# Element counts of released weights, as their model pages state them.
RELEASED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-encoder-base": 109_482_240,
    "bert-encoder-large": 335_141_888,
    "bert-base-uncased": 110_106_428,
    "bert-large-uncased": 336_226_108,
    "roberta-encoder-base": 124_645_632,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "opt-125m": 125_239_296,
    "opt-6.7b": 6_658_473_984,
    "bloom-560m": 559_214_592,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-6.9b": 6_857_302_016,
    "mpt-7b": 6_649_286_656,
    "falcon-7b": 6_921_720_704,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "qwen3-8b": 8_190_735_360,
    "vit-small-16": 22_050_664,
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
}


@pytest.mark.parametrize(("name", "count"), RELEASED.items())
def test_released_counts_are_exact(name: str, count: int) -> None:
    spec = find_model(name)
    assert spec.num_parameters == count
    assert (
        build_graph(
            spec, batch=1, sequence=getattr(spec, "image_sequence", None) or 1
        ).num_parameters
        == count
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_has_a_source_and_builds(name: str) -> None:
    spec = find_model(name)
    assert spec.source
    assert spec.assumed == ()
    graph = build_graph(spec, batch=1, sequence=getattr(spec, "image_sequence", None) or 1)
    assert spec.num_parameters in (None, graph.num_parameters)
    assert spec.num_parameters is not None or spec.family == "gpt" or name in UNCONFIRMED


@pytest.mark.parametrize(("name", "printed"), PRINTED.items())
def test_gpt_counts_round_to_the_printed_ones(name: str, printed: str) -> None:
    spec = find_model(name)
    digits = len(printed.partition(".")[2])
    count = build_graph(
        spec, batch=1, sequence=getattr(spec, "image_sequence", None) or 1
    ).num_parameters
    assert f"{count / 1e9:.{digits}f}" == printed
    # P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)) leaves out the last LayerNorm's 2 h
    n, h, v, s = spec.layers, spec.hidden, spec.vocab, spec.max_positions
    assert s is not None
    assert count - 2 * h == 12 * n * h * h + 13 * n * h + (v + s) * h


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Llama-3-70B", "llama-3-70b"),
        ("llama3_70b", "llama-3-70b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("gpt2-xl", "gpt2-1.5b"),
        ("GPT-2 medium", "gpt2-355m"),
        ("GPT-3 175B", "gpt3-175b"),
        ("gpt-175b", "gpt3-175b"),
        ("MT-NLG 530B", "gpt-530b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("Mistral-7B", "mistral-7b-v0.1"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("  gpt2 ", "gpt2-124m"),
    ],
)
def test_names_people_type(typed: str, name: str) -> None:
    assert find_model(typed).name == name
    assert resolve_model(typed).name == name


def test_names_do_not_collide() -> None:
    for key, name in [*aliases().items(), *((name, name) for name in NAMES)]:
        assert find_model(key).name == name


def test_ambiguous_names_are_refused_with_the_candidates() -> None:
    with pytest.raises(CatalogError, match="ambiguous") as caught:
        find_model("llama-70b")
    for name in ("llama-2-70b", "llama-3-70b", "llama-3.1-70b"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("qwen-7b", "qwen2.5-7b"), ("lama-3-70b", "llama-3-70b"), ("llama-27b", "llama-2-7b")],
)
def test_unknown_names_get_a_hint_but_never_another_model(typed: str, hint: str) -> None:
    with pytest.raises(CatalogError, match=f"did you mean '{hint}'"):
        find_model(typed)


def test_inline_defaults_are_listed() -> None:
    spec = model_from_mapping({"family": "llama", "layers": 2, "hidden": 4096, "heads": 32})
    assert (spec.ffn, spec.vocab, spec.kv_heads, spec.head_dim) == (11008, 32000, 32, 128)
    assert spec.gated
    assert not spec.tied
    assert any("ffn 11008" in line for line in spec.assumed)
    assert any("vocab 32000" in line for line in spec.assumed)
    gpt = model_from_mapping({"family": "GPT", "layers": 2, "hidden": 64, "heads": 4, "ffn": 100})
    assert (gpt.ffn, gpt.vocab, gpt.dropout, gpt.positions) == (100, 51200, 0.1, "learned")
    assert not any("ffn" in line for line in gpt.assumed)


def test_spellings_of_other_tools_mean_the_same() -> None:
    ours = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}
    theirs = {
        "family": "gpt",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
    }
    assert model_from_mapping(ours) == model_from_mapping(theirs)


def test_gated_follows_the_activation_and_back() -> None:
    base = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4}
    assert model_from_mapping({**base, "activation": "swiglu"}).gated
    assert model_from_mapping({**base, "gated": True}).activation == "swiglu"
    plain = model_from_mapping({**base, "family": "llama", "gated": False})
    assert (plain.activation, plain.ffn) == ("gelu", 256)
    with pytest.raises(InputError, match="contradicts"):
        model_from_mapping({**base, "activation": "gelu", "gated": True})


def test_all_problems_of_an_inline_model_come_together() -> None:
    with pytest.raises(InputError) as caught:
        model_from_mapping(
            {
                "family": "gtp",
                "layers": float("nan"),
                "heads": 10,
                "hidden": 64,
                "kv_heads": 3,
                "hidden_sise": 3,
                "dropout": 2,
                "tied": "yes",
                "vocab": True,
            }
        )
    text = str(caught.value)
    for part in (
        "did you mean 'gpt'",
        "model.layers: bad value",
        "hidden 64 is not divisible by heads 10",
        "kv_heads 3 does not divide heads 10",
        "did you mean 'hidden_size'",
        "model.dropout",
        "model.tied",
        "model.vocab",
    ):
        assert part in text
    assert len(caught.value.problems) == 8


@pytest.mark.parametrize("value", [0, -1, 1.5, float("inf"), 10**400, "12", [1], True])
def test_sizes_are_whole_and_positive(value: object) -> None:
    with pytest.raises(InputError, match="whole number"):
        model_from_mapping({"family": "gpt", "layers": value, "hidden": 64, "heads": 4})


def test_missing_sizes_are_named() -> None:
    with pytest.raises(InputError) as caught:
        model_from_mapping({"family": "gpt"})
    assert [p.where for p in caught.value.problems] == [
        "model.layers",
        "model.hidden",
        "model.heads",
    ]


def test_two_spellings_that_differ_are_refused() -> None:
    with pytest.raises(InputError, match="given twice"):
        model_from_mapping(
            {"family": "gpt", "layers": 2, "num_layers": 3, "hidden": 64, "heads": 4}
        )


def test_resolve_reads_files_relative_to_the_run_file(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    (tmp_path / "small.json").write_text(json.dumps(config))
    assert resolve_model("small.json", folder=tmp_path).name == "small"
    assert resolve_model(Path("small.json"), folder=tmp_path).layers == 2
    assert resolve_model(config).hidden == 64
    (tmp_path / "gpt2").mkdir()
    assert resolve_model("gpt2", folder=tmp_path).name == "gpt2-124m"


@pytest.mark.parametrize("value", [None, 3, [], "", "  "])
def test_resolve_refuses_what_is_no_model(value: object) -> None:
    with pytest.raises(InputError, match="not a model"):
        resolve_model(value)


def test_resolve_refuses_missing_files_and_odd_names(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        resolve_model("nothing.json", folder=tmp_path)
    with pytest.raises(FileFormatError, match="no such file"):
        resolve_model("./nothing", folder=tmp_path)
    with pytest.raises(FileFormatError, match="is a folder"):
        resolve_model(tmp_path)
    for name in ("x" * 5000, "a\0b", "~nobody-at-all"):
        with pytest.raises(InputError):
            resolve_model(name)
