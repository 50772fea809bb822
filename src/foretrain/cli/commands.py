"""What the commands do. Heavy modules are imported here, when a command runs."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrain.cli.output import Finished, check_target, complain, emit, json_text, write_atomically
from foretrain.errors import InputError, Problem

if TYPE_CHECKING:
    from foretrain.run.spec import RunSpec
    from foretrain.simulator.result import Result


def run_predict(
    run_file: str | None,
    flags: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    json_file: str | None,
    trace_file: str | None,
    flat: bool,
    plain: bool,
    strict: bool,
    with_baselines: bool = False,
    tokens: str | None = None,
    calibration: Sequence[str] = (),
) -> None:
    """Predicts one run, prints the report, writes the files; exit code 2 when it does not fit."""
    check_target(json_file, "--json")
    check_target(trace_file, "--trace")
    from foretrain.run.load import load_run

    run = load_run(run_file, overrides=overrides, flags=flags)
    from foretrain.analysis.cost_of_run import cost_of_run, token_budget
    from foretrain.analysis.levers import find_levers
    from foretrain.predict import predict
    from foretrain.report.json_form import to_json
    from foretrain.report.text import render
    from foretrain.report.tokens import token_json, token_lines

    budget = None if tokens is None else token_budget(tokens, run)
    with _calibrated(calibration, [run]):
        result = predict(
            run, flat=flat, plain=plain, strict=strict, timeline=trace_file is not None
        )
        levers = () if json_file == "-" else find_levers(run, result)
        simpler = _simpler(run, result) if with_baselines else None
    cost = None if budget is None else cost_of_run(result, run, budget)
    lines = [] if cost is None else list(token_lines(cost, run))
    more = {} if cost is None else {"token_budget": token_json(cost)}
    if simpler is not None:
        words, more["baselines"] = simpler
        lines += ["", *words] if lines else words
    text = "" if json_file == "-" else render(result, run, levers, lines)
    if json_file is not None:
        form = json_text({**to_json(result, run), **more})
        if json_file == "-":
            emit(form)
        else:
            write_atomically(Path(json_file), form)
    if trace_file is not None:
        from foretrain.report.trace import write_trace

        write_trace(result, Path(trace_file))
    if text:
        emit(text)
    if not result.fits:
        raise Finished(2)


def _simpler(run: RunSpec, result: Result) -> tuple[list[str], dict[str, Any]]:
    """Lines and JSON of what simpler models say."""
    from foretrain.analysis.baselines import baselines
    from foretrain.report.baselines import baseline_json, baseline_lines

    found = baselines(run)
    return baseline_lines(found, result), baseline_json(found)


@contextmanager
def _calibrated(calibration: Sequence[str], runs: Sequence[RunSpec]) -> Generator[None]:
    """Within the block, what calibration files have measured goes before shipped constants."""
    if not calibration:
        yield
        return
    from fnmatch import fnmatchcase

    from foretrain.cost.user_files import calibrated_by, read_files

    files = read_files(calibration)
    used = sorted({run.cluster.device.name for run in runs})
    for path, made_for in files.made_for.items():
        for name in used:
            if made_for and not any(fnmatchcase(name, pattern) for pattern in made_for):
                devices = ", ".join(sorted(made_for))
                complain(f"foretrain: {path} is for {devices}: it changes nothing on {name}")
    with calibrated_by(files):
        yield


def run_explain(
    run_file: str,
    what: str | None,
    stage: str,
    overrides: Sequence[str],
    calibration: Sequence[str] = (),
) -> None:
    """Prints the object of one stage."""
    stages = ("graph", "plan", "program", "cost", "memory")
    if stage not in stages:
        problem = Problem(
            what="unknown stage", where="--stage", value=stage, allowed=", ".join(stages)
        )
        raise InputError(problem)
    from foretrain.report.explain import explain
    from foretrain.run.load import load_run

    run = load_run(run_file, overrides=overrides)
    with _calibrated(calibration, [run]):
        emit(explain(run, stage, what))


def run_compare(
    run_files: Sequence[str], overrides: Sequence[str], calibration: Sequence[str] = ()
) -> None:
    """Prints several predictions side by side; exit code 2 when one does not fit."""
    if len(run_files) < 2:
        raise InputError(Problem(what="give two or more run files", where="compare"))
    from foretrain.run.load import load_run

    runs: list[tuple[str, RunSpec]] = []
    problems: list[Problem] = []
    for run_file in run_files:  # the problems of all files are reported together
        try:
            runs.append((run_file, load_run(run_file, overrides=overrides)))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    from foretrain.predict import predict
    from foretrain.report.compare import render_comparison

    names = short_names([name for name, _ in runs])
    with _calibrated(calibration, [run for _, run in runs]):
        items = [(name, run, predict(run)) for name, (_, run) in zip(names, runs, strict=True)]
    emit(render_comparison(items))
    if not all(result.fits for _, _, result in items):
        raise Finished(2)


def short_names(run_files: Sequence[str]) -> list[str]:
    """Returns the stems of the files, or what was given where stems would be equal."""
    stems = [Path(name).stem for name in run_files]
    return stems if len(set(stems)) == len(stems) else list(run_files)


def run_catalog(kind: str | None, name: str | None) -> None:
    """Prints what the catalog holds of a kind, or one entry with its sources."""
    from foretrain.cli.catalog import catalog_text

    emit(catalog_text(kind, name))
