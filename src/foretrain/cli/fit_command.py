"""`foretrain fit RUN --measured T`: what measured times imply about the constants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli import options as opt
from foretrain.cli.output import check_target, emit, json_text, write_atomically
from foretrain.errors import InputError, Problem

Measured = Annotated[
    list[str] | None,
    typer.Option(
        "--measured",
        metavar="T",
        help="Measured step or rate of a run, in the order of the runs: 13.75s, 2900 tok/s/GPU.",
        show_default=False,
    ),
]


Most = Annotated[
    str | None,
    typer.Option(
        "--max",
        metavar="WHAT",
        help="How far the run can go: sequence, microbatch or layers.",
        show_default=False,
    ),
]


def fit(
    runs: opt.Runs,
    measured: Measured = None,
    most: Most = None,
    set_: opt.Set = None,
    json: opt.Json = None,
) -> None:
    """Say which constant would explain measured times, or how far a run can go (--max).

    With one run every constant that alone could explain the gap is listed and none is named.
    """
    if most is not None:
        from foretrain.cli.limit_command import run_limit

        run_limit(runs, most, measured or (), set_ or (), json_file=json)
        return
    run_fit(runs, measured or (), set_ or (), json_file=json)


def run_fit(
    run_files: Sequence[str],
    measured: Sequence[str],
    overrides: Sequence[str],
    *,
    json_file: str | None,
) -> None:
    """Reads the runs with their measured values, fits, and prints what they imply."""
    check_target(json_file, "--json")
    _check_pairs(run_files, measured)
    from foretrain.analysis.fit import fit as fit_runs
    from foretrain.analysis.fit_measured import measured_step_s
    from foretrain.analysis.fit_response import StepModel
    from foretrain.analysis.fit_search import Measured as MeasuredRun
    from foretrain.analysis.fit_separate import separate
    from foretrain.cli.commands import short_names
    from foretrain.report.fit_text import fit_json, render_fit
    from foretrain.run.load import load_run

    found: list[MeasuredRun] = []
    problems: list[Problem] = []
    names = dict(zip(run_files, short_names(run_files), strict=True))
    for name, text in zip(run_files, measured, strict=True):
        try:
            run = load_run(name, overrides=overrides)
            step_s = measured_step_s(text, run, f"--measured of {name}")
        except InputError as error:  # the problems of all runs are reported together
            problems += error.problems
            continue
        found.append(MeasuredRun(name=names[name], model=StepModel(run), step_s=step_s))
    if problems:
        raise InputError(problems)
    outcome = fit_runs(found)
    options = [e for e in outcome.explanations if not outcome.tied or e.constant in outcome.tied]
    wanted = outcome.verdict in ("one run", "tied")
    separation = separate(found, options) if wanted else None
    if json_file is not None:
        form = json_text(fit_json(outcome, separation))
        if json_file == "-":
            emit(form)
            return
        write_atomically(Path(json_file), form)
    emit(render_fit(outcome, separation))


def _check_pairs(run_files: Sequence[str], measured: Sequence[str]) -> None:
    if len(run_files) == len(measured):
        return
    raise InputError(
        Problem(
            what=f"{len(run_files)} run file(s) but {len(measured)} measured value(s)",
            where="fit",
            way_out="give each run its own: foretrain fit a.yaml --measured 13.75s b.yaml "
            "--measured 412ms",
        )
    )
