"""`foretrain fit RUN --measured T`: what measured times imply about the constants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrain.cli import options as opt
from foretrain.cli.output import check_target, emit, json_text, write_atomically
from foretrain.errors import InputError, Problem

if TYPE_CHECKING:  # the heavy parts are read only when they are needed
    from foretrain.analysis.fit_search import Measured as MeasuredRun

Measured = Annotated[
    list[str] | None,
    typer.Option(
        "--measured",
        metavar="T",
        help="Measured step or rate of a run, in the order of the runs: 13.75s, 2900 tok/s/GPU.",
        show_default=False,
    ),
]


Noise = Annotated[
    str | None,
    typer.Option(
        "--noise",
        metavar="SHARE",
        help="Scatter of a step around a right prediction: 5% or 0.05; 2% when absent.",
        show_default=False,
    ),
]
Suggest = Annotated[
    bool,
    typer.Option("--suggest", help="Print the three plans of RUN that tell constants apart best."),
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
    noise: Noise = None,
    suggest: Suggest = False,
    most: Most = None,
    set_: opt.Set = None,
    json: opt.Json = None,
) -> None:
    """Say which constant would explain measured times, or how far a run can go (--max).

    With one run every constant that alone could explain the gap is listed and none is named.
    """
    check_target(json, "--json")
    if most is not None:
        from foretrain.cli.limit_command import run_limit

        if suggest or noise is not None:
            option = "--suggest" if suggest else "--noise"
            raise InputError(
                Problem(what="--max measures nothing", where=option, way_out=f"leave {option} out")
            )
        run_limit(runs, most, measured or (), set_ or (), json_file=json)
    elif suggest:
        run_suggest(runs, measured or (), set_ or (), noise=noise, json_file=json)
    else:
        run_fit(runs, measured or (), set_ or (), noise=noise, json_file=json)


def run_fit(
    run_files: Sequence[str],
    measured: Sequence[str],
    overrides: Sequence[str],
    *,
    noise: str | None,
    json_file: str | None,
) -> None:
    """Reads the runs with their measured values, fits, and prints what they imply."""
    _check_pairs(run_files, measured)
    from foretrain.analysis.fit import fit as fit_runs
    from foretrain.analysis.fit_measured import noise_share
    from foretrain.analysis.fit_posterior import NOTHING
    from foretrain.analysis.fit_separate import separate
    from foretrain.report.fit_json import fit_json
    from foretrain.report.fit_text import SPOKEN, render_fit

    share = noise_share(noise)
    outcome = fit_runs(_read(run_files, measured, overrides), noise=share)
    options = [e for e in outcome.explanations if not outcome.tied or e.constant in outcome.tied]
    separation = None
    if outcome.verdict in ("one run", "tied"):
        nothing = outcome.probability.get(NOTHING, 0.0) >= SPOKEN
        separation = separate(outcome.runs, options, noise=share, nothing=nothing)
    _show(render_fit(outcome, separation), fit_json(outcome, separation), json_file)


def run_suggest(
    run_files: Sequence[str],
    measured: Sequence[str],
    overrides: Sequence[str],
    *,
    noise: str | None,
    json_file: str | None,
) -> None:
    """Reads one run and prints the plans of it that are worth measuring."""
    from foretrain.analysis.fit_measured import noise_share
    from foretrain.analysis.fit_suggest import suggest
    from foretrain.cli.commands import short_names
    from foretrain.report.fit_json import suggestion_json
    from foretrain.report.suggest_text import render_suggestion
    from foretrain.run.load import load_run

    if len(run_files) != 1 or measured:
        raise InputError(
            Problem(
                what="plans are suggested for one run, before anything is measured",
                where="--suggest",
                value=f"{len(run_files)} run file(s), {len(measured)} measured value(s)",
                way_out="foretrain fit run.yaml --suggest",
            )
        )
    name = short_names(run_files)[0]
    run = load_run(run_files[0], overrides=overrides)
    found = suggest(run, noise=noise_share(noise), progress=_progress())
    _show(render_suggestion(found, name), suggestion_json(found, name), json_file)


def _progress() -> Callable[[int], None] | None:
    """A line on standard error that counts plans when a person watches, else nothing."""
    if not sys.stderr.isatty():
        return None

    def show(done: int) -> None:
        sys.stderr.write(f"\rsimulating plans: {done}" if done else "\r\033[K")
        sys.stderr.flush()

    return show


def _read(
    run_files: Sequence[str], measured: Sequence[str], overrides: Sequence[str]
) -> list[MeasuredRun]:
    """Returns the runs with their measured steps; the problems of all are reported together."""
    from foretrain.analysis.fit_measured import measured_step_s
    from foretrain.analysis.fit_quick import quick_model
    from foretrain.analysis.fit_search import Measured as MeasuredStep
    from foretrain.cli.commands import short_names
    from foretrain.run.load import load_run

    found: list[MeasuredRun] = []
    problems: list[Problem] = []
    names = dict(zip(run_files, short_names(run_files), strict=True))
    for name, text in zip(run_files, measured, strict=True):
        try:
            run = load_run(name, overrides=overrides)
            step_s = measured_step_s(text, run, f"--measured of {name}")
        except InputError as error:
            problems += error.problems
            continue
        found.append(MeasuredStep(name=names[name], model=quick_model(run), step_s=step_s))
    if problems:
        raise InputError(problems)
    return found


def _show(text: str, form: dict[str, Any], json_file: str | None) -> None:
    if json_file == "-":
        emit(json_text(form))
        return
    if json_file is not None:
        write_atomically(Path(json_file), json_text(form))
    emit(text)


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
