"""Reading measured runs: typed rows, measured columns apart, files that are no table."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from foretrain.errors import FileFormatError
from foretrain.validation.rows import MEASURED_NUMBERS, MEASURED_TEXTS, Row, read_rows

HEAD = "id,family,model,gpu,n_gpus,gpu_mem_gb,mbs,iter_time_s,peak_mem_gib,samples_unit,made_up\n"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["runs.csv", "runs.csv.gz"])
def test_numbers_are_read_as_the_file_writes_them(name: str, tmp_path: Path) -> None:
    text = HEAD + "a-1,fam,m,x,384.0,80 GB,2,0.5,,images,x\na-2,fam,m,x,,183359 MiB,,nan,-1,,\n"
    first, second = read_rows(write(tmp_path / name, text))
    assert (first.row.n_gpus, first.row.gpu_mem_gb, first.row.mbs) == (384, 80.0, 2)
    assert (first.measured.iter_time_s, first.measured.samples_unit) == (0.5, "images")
    assert second.row.n_gpus is None
    assert second.row.gpu_mem_gb == pytest.approx(179.06, abs=0.01)
    assert second.measured.iter_time_s is None
    assert second.measured.peak_mem_gib is None


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    (run,) = read_rows(write(tmp_path / "r.csv", HEAD + "a,f,m,x,eight,,2.5,1,,,\n"))
    assert run.row.unreadable == ("n_gpus 'eight'", "mbs '2.5'")


@pytest.mark.parametrize(
    ("count", "notes", "batches", "step"),
    [
        ("8", "bs csv value taken as per-GPU batch (config files)", (160, 1280), 0.5),
        ("1", "bs csv value taken as per-GPU batch (config files)", (1280, None), 4.0),
        ("3", "bs csv value taken as per-GPU batch (config files)", (None, 1280), 4.0 / 3),
        ("8", "batch per GPU", (1280, None), 4.0),
    ],
)
def test_the_batch_of_a_node_is_divided_over_its_devices(
    count: str, notes: str, batches: tuple[int | None, int | None], step: float, tmp_path: Path
) -> None:
    text = f"id,model,gpu,n_gpus,mbs,iter_time_s,notes\na,,,{count},1280,4.0,{notes}\n"
    (run,) = read_rows(write(tmp_path / "r.csv", text))
    assert (run.row.mbs, run.row.gbs) == batches
    assert run.measured.iter_time_s == pytest.approx(step)


@pytest.mark.parametrize(
    ("family", "accumulation", "batch", "step"),
    [
        ("ultrascale_playbook", 1, 128, 2.0),
        ("ultrascale_playbook", 2, 256, 4.0),
        ("ultrascale_playbook", "", 256, 4.0),
        ("other", 1, 256, 4.0),
    ],
)
def test_the_batch_is_what_its_factors_make(
    family: str, accumulation: object, batch: int, step: float, tmp_path: Path
) -> None:
    head = "id,family,model,gpu,mbs,ga_steps,dp,gbs,iter_time_s\n"
    text = f"{head}a,{family},m,x,8,{accumulation},16,256,4.0\n"
    (run,) = read_rows(write(tmp_path / "r.csv", text))
    assert run.row.gbs == batch
    assert run.measured.iter_time_s == pytest.approx(step)


def test_a_row_has_no_place_for_what_was_measured() -> None:
    assert not {*MEASURED_NUMBERS, *MEASURED_TEXTS} & set(Row.__slots__)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "without the columns id, model, gpu"),
        (b"name,gpu\nx,y\n", "without the columns id, model"),
        (b"id,price\nx,y\n", "without the columns model, gpu"),
        (b"id,model,gpu\na,m,x\na,m,y\n", "given twice"),
        (b"id,model,gpu\n,m,x\n", "'id' is empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"\x1f\x8bnothing", "cannot read"),
        (b"id,model,gpu\na," + b"x" * 200_000 + b"\n", "not a CSV file"),
    ],
)
def test_a_file_that_is_no_table_ends_in_one_error(
    content: bytes, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=what):
        read_rows(path)


def test_a_missing_file_ends_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot read"):
        read_rows(tmp_path / "none.csv")
