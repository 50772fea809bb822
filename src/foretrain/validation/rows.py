"""Reading measured runs: what was run (Row) and what was measured (Measured), kept apart.

The mapping to a run sees a Row only, so that no measured figure can reach a prediction.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foretrain.errors import FileFormatError, Problem
from foretrain.validation.model_class import class_of

#: Columns without which a table holds no measured runs.
REQUIRED = ("id", "model", "gpu")
#: Columns of the measurement; everything else describes the run. `measured_how` belongs here too.
MEASURED_TEXTS = ("samples_unit", "measured_how")
MEASURED_NUMBERS = (
    "iter_time_s",
    "tokens_per_s_per_gpu",
    "tokens_per_s",
    "samples_per_s",
    "tflops_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "peak_mem_gib",
    "time_to_train_min",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was run, as the source states it. Empty texts and None: not stated.

    `unreadable` names the columns whose content is no number.
    """

    id: str
    family: str = ""
    model: str = ""
    model_class: str = ""
    n_layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    n_experts: int | None = None
    input_size: str = ""
    arch_note: str = ""
    params_b: float | None = None
    precision: str = ""
    gpu: str = ""
    gpu_norm: str = ""
    gpu_mem_gb: float | None = None
    n_gpus: int | None = None
    gpus_per_node: int | None = None
    interconnect: str = ""
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    sp: str = ""
    zero_stage: str = ""
    sharding: str = ""
    mbs: int | None = None
    gbs: int | None = None
    ga_steps: int | None = None
    recompute: str = ""
    attention_impl: str = ""
    offload: str = ""
    optimizer: str = ""
    framework: str = ""
    framework_version: str = ""
    task: str = ""
    quality: str = ""
    notes: str = ""
    config_group: str = ""
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured. None: not stated, or no finite number above zero."""

    iter_time_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    samples_unit: str = ""
    measured_how: str = ""
    peak_mem_gib: float | None = None
    mfu_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One line of the file."""

    row: Row
    measured: Measured


_INTEGERS = tuple(f.name for f in fields(Row) if f.type == "int | None")
_NUMBERS = tuple(f.name for f in fields(Row) if f.type == "float | None")
_TEXTS = tuple(f.name for f in fields(Row) if f.type == "str")


def read_rows(path: Path) -> list[MeasuredRun]:
    """Returns the lines of a .csv or .csv.gz file; unknown columns are ignored.

    Raises:
        FileFormatError: the file is not readable, is no CSV with the columns `REQUIRED`, or an
            id is missing or given twice.
    """
    problems: list[Problem] = []
    runs: list[MeasuredRun] = []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        name = (line.get("id") or "").strip()
        where = f"{path}, line {number}"
        if not name:
            problems.append(Problem(what="the column 'id' is empty", where=where))
        elif name in seen:
            what = f"the id is given twice (line {seen[name]})"
            problems.append(Problem(what=what, where=where, value=name))
        else:
            seen[name] = number
            run = MeasuredRun(row=_row(name, line), measured=_measured(line))
            runs.append(_stated_batch(_node_batch(run)))
    if problems:
        raise FileFormatError(problems)
    return runs


#: Words of rows whose batch was read as that of one device.
NODE_BATCH = "bs csv value taken as per-gpu batch"


def _node_batch(run: MeasuredRun) -> MeasuredRun:
    """The run with the batch of the whole node divided over its devices.

    lambdal/deeplearning-benchmark multiplies the batch of its configuration by the number of GPUs
    before it prints it (scripts/compile_results_pytorch_bs.py), so that the figure of n GPUs is n
    times that of one. The file takes it as the batch per GPU and derives the step from it.
    """
    row, count = run.row, run.row.n_gpus or 1
    if NODE_BATCH not in row.notes.lower() or count == 1 or not row.mbs:
        return run
    share, rest = divmod(row.mbs, count)
    step = run.measured.iter_time_s
    return MeasuredRun(
        row=replace(row, gbs=row.mbs, mbs=None if rest else share),
        measured=replace(run.measured, iter_time_s=None if step is None else step / count),
    )


def _stated_batch(run: MeasuredRun) -> MeasuredRun:
    """The run with the batch that its micro-batch, accumulation and data-parallel degree make.

    The Ultra-Scale Playbook prints these three beside tokens per second; the file takes the global
    batch for that of all its runs (1M tokens), which some are not, and derives the step from it.
    """
    row = run.row
    if row.family != "ultrascale_playbook" or not row.gbs:
        return run
    made = (row.mbs or 0) * (row.ga_steps or 0) * (row.dp or 0)
    if made in (0, row.gbs):
        return run
    step = run.measured.iter_time_s
    return MeasuredRun(
        row=replace(row, gbs=made),
        measured=replace(run.measured, iter_time_s=None if step is None else step * made / row.gbs),
    )


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, str | None]]]:
    """Yields line number and columns; FileFormatError when the file is no such table."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        names = reader.fieldnames
        missing = [name for name in REQUIRED if name not in (names or ())]
        if missing:
            way_out = "the first line names the columns; docs/reference/measured-runs.md lists them"
            what = f"no table of measured runs: without the columns {', '.join(missing)}"
            raise FileFormatError(Problem(what=what, where=str(path), way_out=way_out))
        for line in reader:
            yield reader.line_num, line
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise FileFormatError(Problem(what=f"not a CSV file: {error}", where=where)) from None


def read_text(path: Path) -> str:
    """Returns the text of a file, unpacked if it is gzip; FileFormatError when it is none."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(Problem(what="not a text file in UTF-8", where=str(path))) from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileFormatError(Problem(what=f"cannot read: {reason}", where=str(path))) from None


def _row(name: str, line: Mapping[str, str | None]) -> Row:
    values: dict[str, Any] = {key: (line.get(key) or "").strip() for key in _TEXTS}
    unreadable: list[str] = []
    for key in (*_INTEGERS, *_NUMBERS):
        text = (line.get(key) or "").strip()
        number = _memory(text) if key == "gpu_mem_gb" else _number(text)
        if key in _INTEGERS and number is not None:
            number = int(number) if number.is_integer() else None
        if text and number is None:
            unreadable.append(f"{key} {text!r}")
        values[key] = number
    values["id"] = name
    if not values["model_class"]:
        shape = ("n_layers", "hidden", "heads")
        has_shape = all(values[key] is not None for key in shape)
        values["model_class"] = class_of(values["model"], has_shape=has_shape)
    return Row(**values, unreadable=tuple(unreadable))


def _measured(line: Mapping[str, str | None]) -> Measured:
    values: dict[str, Any] = {}
    for field in fields(Measured):
        text = (line.get(field.name) or "").strip()
        value = text if field.name in MEASURED_TEXTS else _above_zero(text)
        # an MFU of 0.0 is a rounded one
        values[field.name] = 0.0 if field.name == "mfu_pct" and _number(text) == 0 else value
    return Measured(**values)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _memory(text: str) -> float | None:
    """A memory size: a number, or one with its unit ('80 GB', '183359 MiB')."""
    match = re.fullmatch(r"([\d.]+) ?(GB|GiB|G|MiB|MB)?", text)
    number = _number(match[1]) if match else None
    if match is None or number is None:
        return None
    return number / 1024 if match[2] in ("MiB", "MB") else number


def _above_zero(text: str) -> float | None:
    number = _number(text)
    return number if number is not None and number > 0 else None
