"""How much each part of the model is worth: simpler models on the rows that were measured.

The comparison that the papers print (docs/explain/baselines.md): the same rows, predicted by
foretrain, by foretrain without runtime behaviour, by a simulator of plain task graphs and by one
formula. A baseline is judged on the rows it can express, and foretrain on the same rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median

from foretrain.analysis.baselines import Baselines, baselines
from foretrain.validation.compare import Comparison
from foretrain.validation.mapping import Mapped, map_row
from foretrain.validation.predict_rows import MIN_FOR_POOL, run_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One model on the rows that it can express; `same_rows_mean` is foretrain on these rows."""

    name: str
    rows: int
    median: float | None
    mean: float | None
    max: float | None
    same_rows_mean: float | None


#: Name of a baseline -> its step time, None where it cannot express the run.
STEPS: dict[str, Callable[[Baselines], float | None]] = {
    "without overlap and sharing (--plain)": lambda b: b.plain_s,
    "task graph, nominal links": lambda b: b.task_graph_s,
    "analytical formula": lambda b: b.analytical_s,
}


def ablation(items: Sequence[Comparison], *, workers: int = 1) -> list[AblationRow]:
    """Returns the errors of foretrain and of each baseline over the rows with a measured step."""
    timed = [item for item in items if item.counted and item.time_ratio is not None]
    answers = _baselines(timed, workers)
    ours = [abs((item.time_ratio or 0.0) - 1.0) for item in timed]
    rows = [_row("foretrain", ours, ours)]
    for name, step in STEPS.items():
        pairs = [
            (abs(seconds / item.measured_s - 1.0), own)
            for item, answer, own in zip(timed, answers, ours, strict=True)
            if (seconds := step(answer)) is not None and item.measured_s
        ]
        rows.append(_row(name, [error for error, _ in pairs], [own for _, own in pairs]))
    return rows


def _row(name: str, errors: Sequence[float], ours: Sequence[float]) -> AblationRow:
    return AblationRow(
        name=name,
        rows=len(errors),
        median=median(errors) if errors else None,
        mean=fmean(errors) if errors else None,
        max=max(errors, default=None),
        same_rows_mean=fmean(ours) if ours else None,
    )


def _baselines(items: Sequence[Comparison], workers: int) -> list[Baselines]:
    mapped = [map_row(item.row) for item in items]
    distinct = {item.key: item for item in mapped}
    if workers > 1 and len(distinct) >= MIN_FOR_POOL:
        with ProcessPoolExecutor(max_workers=workers) as pool:
            found = list(pool.map(_one, distinct.values(), chunksize=8))
    else:
        found = [_one(item) for item in distinct.values()]
    by_key = dict(zip(distinct, found, strict=True))
    return [by_key[item.key] for item in mapped]


def _one(item: Mapped) -> Baselines:
    return baselines(run_of(item))


def render_ablation(rows: Sequence[AblationRow]) -> str:
    """Returns the ablation as a table."""
    width = max(len(row.name) for row in rows)
    head = ("rows", "median", "mean", "max", "foretrain, same rows")
    lines = [
        "Simpler models on the same measured rows (error of the step time)",
        f"  {'':{width}s}" + "".join(f"{word:>{max(len(word) + 2, 9)}s}" for word in head),
    ]
    for row in rows:
        cells = [f"{row.rows:,}"] + [
            "-" if value is None else f"{value:.1%}"
            for value in (row.median, row.mean, row.max, row.same_rows_mean)
        ]
        lines.append(
            f"  {row.name:{width}s}"
            + "".join(
                f"{cell:>{max(len(word) + 2, 9)}s}" for cell, word in zip(cells, head, strict=True)
            )
        )
    return "\n".join(lines)
