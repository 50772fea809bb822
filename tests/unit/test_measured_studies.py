"""The curated figures: one schema, a citation per row, enough of them, and readable as runs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from foretrain.validation.rows import read_rows

FOLDER = Path(__file__).resolve().parents[2] / "studies" / "measured"
FILES = sorted(FOLDER.glob("*.csv"))
NUMBERS = (
    *("n_layers", "hidden", "heads", "seq_len", "n_gpus", "gpus_per_node", "params_b"),
    *("tp", "pp", "dp", "mbs", "gbs", "iter_time_s", "tokens_per_s", "samples_per_s"),
    *("peak_mem_gib", "year", "mfu_pct"),
)
NEEDED = (
    *("id", "family", "citation", "licence", "quality", "model", "model_class", "n_layers"),
    *("hidden", "heads", "seq_len", "gpu_norm", "n_gpus", "framework", "task", "config_group"),
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


ROWS = [row for path in FILES for row in rows_of(path)]


def test_there_are_enough_points_and_no_id_stands_twice():
    assert [path.name for path in FILES] == ["blind.csv", "llm_dense.csv", "memory.csv"]
    assert len(ROWS) >= 150
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_all_columns_are_described():
    described = (FOLDER / "README.md").read_text()
    for path in FILES:
        assert rows_of(path)[0].keys() == ROWS[0].keys()
    assert [name for name in ROWS[0] if f"`{name}`" not in described] == []


def test_the_readme_states_how_many_rows_there_are():
    described = (FOLDER / "README.md").read_text()
    for path in FILES:
        assert f"`{path.name}` | {len(rows_of(path))} |" in described


@pytest.mark.parametrize("name", NEEDED)
def test_what_every_row_needs_is_there(name: str):
    assert [row["id"] for row in ROWS if not row[name].strip()] == []


def test_every_citation_names_a_document_and_a_place():
    """A source, and after a comma the file, table, row or line in it."""
    assert [row["citation"] for row in ROWS if len(row["citation"].split(", ")) < 2] == []


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_positive_numbers(name: str):
    assert [row["id"] for row in ROWS if row[name] and not float(row[name]) > 0.0] == []


def test_every_row_states_a_figure_or_a_failure():
    for row in ROWS:
        times = [row[name] for name in ("iter_time_s", "tokens_per_s", "samples_per_s")]
        failed = "FAILED(oom" in row["task"]
        assert sum(bool(time) for time in times) == (0 if failed else 1), row["id"]
        assert bool(row["samples_per_s"]) == bool(row["samples_unit"])


def test_scale_and_hardware_are_spread():
    """No source has more than a sixth of the rows; from one GPU to thousands, on ten devices."""
    timed = rows_of(FOLDER / "llm_dense.csv")
    families = [row["family"] for row in timed]
    assert max(families.count(name) for name in set(families)) <= len(timed) / 6
    sizes = {int(row["n_gpus"]) for row in timed}
    assert min(sizes) == 1
    assert max(sizes) > 1000
    assert len({row["gpu_norm"] for row in timed}) >= 10


def test_memory_rows_hold_peaks_and_failures():
    rows = rows_of(FOLDER / "memory.csv")
    assert sum(bool(row["peak_mem_gib"]) for row in rows) >= 25
    assert sum("FAILED" in row["task"] for row in rows) >= 10


def test_the_blind_rows_are_of_other_sources_than_the_collection():
    """Which constants are fitted to: nothing of blind.csv may be among it."""
    fitted = {row["family"] for path in FILES[1:] for row in rows_of(path)}
    blind = rows_of(FOLDER / "blind.csv")
    assert len(blind) >= 50
    assert {row["family"] for row in blind} & fitted == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_validate_runs_reads_every_cell(path: Path):
    runs = read_rows(path)
    assert len(runs) == len(rows_of(path))
    assert [run.row.id for run in runs if run.row.unreadable] == []
