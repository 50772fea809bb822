"""Real config.json files and the model shapes of published runs, from ../shared."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from foretrain.errors import FileFormatError
from foretrain.frontends.catalog import find_model, resolve_model
from foretrain.frontends.hf_config import load_hf_config
from foretrain.frontends.transformer import build_graph


@pytest.fixture
def configs(measurements: Path) -> Path:
    """The folder of config.json files."""
    return measurements / "user_files" / "hf_config"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("llama2_7b.json", "llama-2-7b"),
        ("llama3.1_8b.json", "llama-3.1-8b"),
        ("llama3_70b.json", "llama-3-70b"),
        ("gpt2_124m.FACTS.json", "gpt2"),
    ],
)
def test_real_files_have_the_published_count(configs: Path, file: str, name: str) -> None:
    spec = load_hf_config(configs / file)
    graph = build_graph(spec, batch=1, sequence=128)
    assert graph.num_parameters == find_model(name).num_parameters


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("mixtral_8x7b.json", "mixtral"),
        ("deepseek_v2_lite.json", "deepseek_v2"),
    ],
)
def test_other_families_are_refused_by_name(configs: Path, file: str, kind: str) -> None:
    with pytest.raises(FileFormatError, match=f"got '{kind}'"):
        resolve_model(configs / file)


def test_megatron_rows_have_the_shape_of_the_catalog(measurements: Path) -> None:
    """Every row of the Megatron papers' main tables names a model of the catalog, shape for shape.

    Other tables of that family (2020, 2024) use other shapes under similar names.
    """
    models = {"1.7": "gpt-1.7b", "22.0": "gpt-22b", "39.1": "gpt-39b", "175.0": "gpt3-175b"}
    models |= {"529.6": "gpt-530b", "1008.0": "gpt-1t"}
    checked = 0
    with gzip.open(measurements / "runs" / "measured_runs.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            papers = ("2104.04473", "2205.05198")
            if row["family"] != "megatron_papers" or not any(p in row["source"] for p in papers):
                continue
            spec = find_model(models[row["params_b"]])
            shape = (spec.layers, spec.hidden, spec.heads, spec.ffn, spec.vocab)
            keys = ("n_layers", "hidden", "heads", "ffn", "vocab")
            assert shape == tuple(int(float(row[key])) for key in keys), row["id"]
            count = build_graph(spec, batch=1, sequence=1).num_parameters / 1e9
            assert count == pytest.approx(float(row["params_b"]), rel=0.03)
            checked += 1
    assert checked >= 10
