"""`foretrain fit RUN --max WHAT`: how far a run can go before its memory is full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrain.cli.output import check_target, emit, json_text, write_atomically
from foretrain.errors import InputError, Problem


def run_limit(
    run_files: Sequence[str],
    quantity: str,
    measured: Sequence[str],
    overrides: Sequence[str],
    *,
    json_file: str | None,
) -> None:
    """Reads one run, looks for its limit, and prints it."""
    check_target(json_file, "--json")
    if len(run_files) != 1 or measured:
        what = "--max takes one run, and no measured values"
        raise InputError(Problem(what=what, where="fit", value=f"{len(run_files)} run file(s)"))
    from foretrain.analysis.limits import find_limit
    from foretrain.report.limit_text import limit_json, render_limit
    from foretrain.run.load import load_run

    run = load_run(run_files[0], overrides=overrides)
    limit = find_limit(run, quantity)
    if json_file is not None:
        form = json_text(limit_json(limit))
        if json_file == "-":
            emit(form)
            return
        write_atomically(Path(json_file), form)
    emit(render_limit(limit, run))
