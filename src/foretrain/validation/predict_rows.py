"""Predicting many rows: equal runs once, in several processes where it pays."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from foretrain.errors import InputError
from foretrain.frontends.spec import ModelSpec
from foretrain.predict import data_parallel, predict
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.validation.mapping import Mapped, Unsupported, map_row
from foretrain.validation.outcomes import Failure, Outcome, Prediction
from foretrain.validation.rows import Row

#: Fewer distinct runs than this are predicted in one process: starting others takes longer.
MIN_FOR_POOL = 40
#: Runs handed to a process at a time.
BATCH = 8

Progress = Callable[[int, int], None]


def predict_rows(
    rows: Sequence[Row], *, workers: int = 1, progress: Progress | None = None
) -> list[Outcome]:
    """Returns one outcome per row, in order; nothing is dropped.

    Args:
        rows: what was run, without what was measured.
        workers: processes; 1 stays in this one.
        progress: is told how many distinct runs are done, and of how many.
    """
    mapped: list[Mapped | Unsupported] = [_try_map(row) for row in rows]
    distinct = {item.key: item for item in mapped if isinstance(item, Mapped)}
    answers = _predict_all(distinct, workers, progress or (lambda done, total: None))
    return [
        _outcome(row, item, answers[item.key] if isinstance(item, Mapped) else None)
        for row, item in zip(rows, mapped, strict=True)
    ]


def predict_mapped(item: Mapped) -> Prediction | Failure:
    """Returns the prediction of one mapped row, or why there is none."""
    try:
        run = run_of(item)
        result = predict(run)
    except InputError as error:
        return Failure(status="unsupported", reason="; ".join(str(p) for p in error.problems))
    except Exception as error:  # noqa: BLE001 - the row is reported as our fault, the others go on
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rpartition('foretrain/')[2]}:{place.lineno}"
        return Failure(status="error", reason=f"{type(error).__name__} in {where}: {error}")
    memory = result.memory
    dp = data_parallel(run)
    return Prediction(
        step_s=result.step_time_s.value,
        low_s=result.step_time_s.low,
        high_s=result.step_time_s.high,
        allocated_bytes=memory.peak_allocated_bytes,
        reserved_bytes=memory.peak_reserved_bytes,
        device_used_bytes=memory.device_used_bytes,
        first_reserved_bytes=result.classes[0].peak_reserved_bytes,
        usable_bytes=memory.usable_bytes,
        fits=result.fits,
        microbatches=run.training.accumulation(dp),
    )


def run_of(item: Mapped) -> RunSpec:
    """Returns the run of a mapped row, with what its source states beside the run file."""
    run = load_run(item.run)
    if not item.padded and isinstance(run.model, ModelSpec):
        own = run.model.vocab_unpadded or run.model.vocab
        run = replace(run, model=replace(run.model, vocab=own // run.plan.tp * run.plan.tp))
    return replace(run, stack=replace(run.stack, **item.stack))


def _try_map(row: Row) -> Mapped | Unsupported:
    try:
        return map_row(row)
    except Unsupported as reason:
        return reason


def _outcome(row: Row, item: Mapped | Unsupported, answer: Prediction | Failure | None) -> Outcome:
    if isinstance(item, Unsupported):
        return Outcome(row=row, status="unsupported", reason=item.reason)
    if isinstance(answer, Prediction):
        return Outcome(row=row, status="ok", assumed=item.assumed, prediction=answer)
    failure = answer or Failure(status="error", reason="no answer")
    return Outcome(row=row, status=failure.status, reason=failure.reason, assumed=item.assumed)


def _predict_all(
    distinct: dict[str, Mapped], workers: int, progress: Progress
) -> dict[str, Prediction | Failure]:
    total = len(distinct)
    answers: dict[str, Prediction | Failure] = {}
    if workers <= 1 or total < MIN_FOR_POOL:
        for key, item in distinct.items():
            answers[key] = predict_mapped(item)
            progress(len(answers), total)
        return answers
    keys = sorted(distinct, key=lambda key: -_size(distinct[key]))  # long ones first
    batches = [keys[start :: _strides(total)] for start in range(_strides(total))]
    with ProcessPoolExecutor(max_workers=workers) as pool:
        futures = {
            pool.submit(_predict_batch, [distinct[key] for key in batch]): batch
            for batch in batches
        }
        for future in as_completed(futures):
            answers.update(zip(futures[future], future.result(), strict=True))
            progress(len(answers), total)
    return answers


def _strides(total: int) -> int:
    return max(total // BATCH, 1)


def _size(item: Mapped) -> int:
    """A rough measure of how long a prediction takes: stages and micro-batches."""
    plan, training = item.run["plan"], item.run["training"]
    return plan.get("pp", 1) * training.get("global_batch", 1)


def _predict_batch(items: Sequence[Mapped]) -> list[Prediction | Failure]:
    return [predict_mapped(item) for item in items]
