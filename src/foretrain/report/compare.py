"""Several predictions side by side, and what differs between their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from foretrain.frontends.spec import num_layers
from foretrain.report.run_form import run_form
from foretrain.report.tables import table
from foretrain.report.words import (
    fit_word,
    gib,
    number,
    percent,
    place,
    throughput,
)
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.units import format_seconds

Compared = tuple[str, RunSpec, Result]


def render_comparison(items: Sequence[Compared]) -> str:
    """Returns the runs as columns of one plain-text table; the first column is the reference.

    Rows: step time with its 90 % band, throughput (and as a ratio to the first run), MFU, memory
    of the fullest GPU, exposed communication, bubble; then every field of the resolved runs that
    is not equal in all of them.
    """
    if not items:
        return ""
    head = ["", *(name for name, _, _ in items)]
    rows = [[name, *(cell(item, items[0]) for item in items)] for name, cell in ROWS]
    differences = run_differences([run for _, run, _ in items])
    lines = [_verdict(items), "", *table([head, *rows])]
    if differences:
        lines += ["", "What differs", *table([head, *differences])]
    elif len(items) > 1:
        lines += ["", "The runs are equal."]
    return "\n".join(lines) + "\n"


def run_differences(runs: Sequence[RunSpec]) -> list[list[str]]:
    """Returns one row per field that differs: its dotted path and its value in every run.

    Of models with different names only the names: their shapes differ in nearly everything.
    """
    flat = [_flatten(run_form(run), "") for run in runs]
    keys = list(dict.fromkeys(key for fields in flat for key in fields))
    if len({run.model.name for run in runs}) > 1:
        keys = [key for key in keys if key == "model.name" or not key.startswith("model.")]
    rows: list[list[str]] = []
    for key in keys:
        values = [_word(fields.get(key)) for fields in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def _verdict(items: Sequence[Compared]) -> str:
    fitting = [item for item in items if item[2].fits]
    if not fitting:
        return "None of the runs fits."
    if not _same_work(items):
        unfit = [f"{name} {fit_word(result)}" for name, _, result in items if not result.fits]
        fit = ", ".join(unfit) or "All runs fit"
        return f"{fit}. They train different models or lengths: their throughput does not compare."
    best = max(fitting, key=_rate)
    unit = throughput(best[2], best[1].cluster.world_size)[1]
    text = f"Fastest that fits, per GPU: {best[0]} with {number(_rate(best))} {unit}"
    others = [item for item in fitting if item is not best]
    if others:
        second = max(others, key=_rate)
        text += f", {percent(_rate(best) / _rate(second) - 1)} more than {second[0]}"
        if _overlap(best[2], second[2]):
            text += " (their 90 % bands overlap)"
    return text + "."


def _rate(item: Compared) -> float:
    return throughput(item[2], item[1].cluster.world_size)[0]


def _same_work(items: Sequence[Compared]) -> bool:
    """Returns whether all runs do the same for a sample: one model at one length."""
    works = {
        (
            run.model.name,
            num_layers(run.model),
            run.training.sequence,
            run.training.target_sequence,
            run.training.image,
        )
        for _, run, _ in items
    }
    return len(works) == 1


def _overlap(fast: Result, slow: Result) -> bool:
    """Returns whether the bands of the throughput per GPU overlap, taken as relative widths."""
    ratio = fast.step_time_s.value / fast.step_time_s.high
    other = slow.step_time_s.value / slow.step_time_s.low
    fast_rate = fast.tokens_per_s_per_device or fast.samples_per_s
    slow_rate = slow.tokens_per_s_per_device or slow.samples_per_s
    return fast_rate * ratio < slow_rate * other


def _step(item: Compared, _: Compared) -> str:
    return format_seconds(item[2].step_time_s.value)


def _band(item: Compared, _: Compared) -> str:
    step = item[2].step_time_s
    return f"{format_seconds(step.low)} - {format_seconds(step.high)}"


def _throughput(item: Compared, _: Compared) -> str:
    rate, unit = throughput(item[2], item[1].cluster.world_size)
    return f"{number(rate)} {unit}"


def _relative(item: Compared, first: Compared) -> str:
    return f"{_rate(item) / _rate(first):.3f}x" if _same_work((item, first)) else "-"


def _exposed(item: Compared, _: Compared) -> str:
    exposed = sum(item[2].time_parts.exposed_communication.values())
    return f"{format_seconds(exposed)} ({percent(exposed / item[2].step_time_s.value)})"


ROWS: tuple[tuple[str, Callable[[Compared, Compared], str]], ...] = (
    ("fits", lambda item, _: fit_word(item[2])),
    ("step time", _step),
    ("90 % band", _band),
    ("throughput", _throughput),
    ("relative to the first", _relative),
    ("MFU", lambda item, _: percent(item[2].mfu)),
    ("HFU", lambda item, _: percent(item[2].hfu)),
    ("device memory used", lambda item, _: gib(item[2].memory.device_used_bytes)),
    ("usable", lambda item, _: gib(item[2].memory.usable_bytes)),
    ("fullest", lambda item, _: place(item[2], item[2].memory.worst_rank)),
    ("exposed communication", _exposed),
    ("bubble", lambda item, _: percent(item[2].bubble_fraction)),
    ("global batch", lambda item, _: f"{item[1].training.global_batch}"),
    ("GPUs", lambda item, _: f"{item[1].cluster.world_size}"),
)


def _flatten(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in cast("Mapping[str, Any]", value).items():
        flat.update(_flatten(item, f"{path}.{key}" if path else str(key)))
    return flat


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(str(item) for item in cast("list[Any]", value))
    return "-" if value is None else str(value)
