"""`foretrain validate runs|ops|network FILE`: predicted against measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from foretrain.cli.output import check_target, emit, json_text, refuse_foreign, write_atomically
from foretrain.errors import InputError, Problem

KINDS = ("runs", "ops", "network")
PARTS = ("all", "fitted", "left-out")


def validate(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="runs, ops or network.", show_default=False)
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Measured rows (.csv, .csv.gz; ops and network also .parquet)."
        ),
    ],
    json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE", help="Write the accuracy page (Markdown)."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="FILE", help="Earlier JSON: show what has moved."),
    ] = None,
    write_baseline: Annotated[
        str | None,
        typer.Option("--write-baseline", metavar="FILE", help="Write what --baseline reads."),
    ] = None,
    families: Annotated[
        str | None, typer.Option("--families", metavar="A,B", help="Only these families.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option("--ids", metavar="FILE", help="Only the ids listed in a file.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="WHAT", help="One line for each model, family, gpu, ..."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N rows.")
    ] = None,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Simpler models on the same rows, as papers do.")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Processes.")] = 2,
    part: Annotated[
        str,
        typer.Option("--part", metavar="PART", help="ops: all, fitted or left-out shapes."),
    ] = "all",
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="ops, network: what calibrate wrote; repeatable, a later file wins.",
        ),
    ] = None,
) -> None:
    """Compare predictions with measured training runs or operators: errors by group."""
    if kind not in KINDS:
        problem = Problem(what="unknown kind", value=kind, allowed=", ".join(KINDS))
        raise InputError(problem)
    targets = {"--json": json, "--report": report, "--write-baseline": write_baseline}
    runs_only = {
        "--report": report, "--baseline": baseline, "--write-baseline": write_baseline,
        "--families": families, "--ids": ids, "--by": by, "--ablation": ablation,
    }  # fmt: skip
    some = {"--part": part, "--calibration": calibration or None, "--limit": limit}
    _check_options(kind, targets, runs_only, some)
    if kind == "ops":
        _ops(Path(file), json, part, limit, calibration or ())
        return
    if kind == "network":
        _network(Path(file), json, calibration or ())
        return
    from foretrain.validation.accuracy_page import accuracy_page
    from foretrain.validation.change import describe_change, read_baseline, reduced
    from foretrain.validation.report import BY, render, render_by, to_json
    from foretrain.validation.run_validation import validate_runs

    if by is not None and by not in BY:
        problem = Problem(what="unknown word", where="--by", value=by, allowed=", ".join(BY))
        raise InputError(problem)
    before = None if baseline is None else read_baseline(Path(baseline))
    result = validate_runs(
        Path(file),
        families=tuple(name.strip() for name in (families or "").split(",") if name.strip()),
        ids=_listed(ids),
        limit=limit,
        workers=workers,
        progress=_progress(),
    )
    if json is not None:
        form = json_text(to_json(result))
        if json == "-":
            emit(form)
        else:
            write_atomically(Path(json), form)
    if report is not None:
        write_atomically(Path(report), accuracy_page(result))
    if write_baseline is not None:
        write_atomically(Path(write_baseline), json_text(reduced(result)))
    if json != "-":
        if before is not None:
            emit(describe_change(result, before))
        else:
            emit(render(result) if by is None else render_by(result, by))
    if ablation:
        from foretrain.validation.ablation import ablation as ablate
        from foretrain.validation.ablation import render_ablation

        emit("\n" + render_ablation(ablate(result.items, workers=workers)))


def _check_options(
    kind: str,
    targets: Mapping[str, str | None],
    runs_only: Mapping[str, object],
    some: Mapping[str, object],
) -> None:
    """Refuses targets that cannot be written and options that a kind does not read.

    `some` are read by two of the three kinds, or one.
    """
    for option, target in targets.items():
        check_target(target, option)
    unread = {"runs": ("--part", "--calibration"), "ops": (), "network": ("--part", "--limit")}
    foreign = {name: some[name] for name in unread[kind]}
    refuse_foreign(kind, foreign if kind == "runs" else {**runs_only, **foreign})


def _ops(
    file: Path, json: str | None, part: str, limit: int | None, calibration: Sequence[str]
) -> None:
    """Operators: every row of a table against its price."""
    if part not in PARTS:
        problem = Problem(what="unknown part", where="--part", value=part, allowed=", ".join(PARTS))
        raise InputError(problem)
    from foretrain.cost.user_files import calibrated_by, read_files
    from foretrain.validation.ops.report import render, to_json
    from foretrain.validation.ops.validate import validate_ops

    with calibrated_by(read_files(calibration)):
        results = validate_ops(file, part=cast("Any", part), limit=limit)
    if json == "-":
        emit(json_text(to_json(results)))
        return
    if json is not None:
        write_atomically(Path(json), json_text(to_json(results)))
    emit(render(results))


def _network(file: Path, json: str | None, calibration: Sequence[str]) -> None:
    """Collectives: every row of a table against its price."""
    from foretrain.cost.user_files import read_files
    from foretrain.validation.network.compare import validate_network
    from foretrain.validation.network.report import render, to_json

    items = validate_network(file, read_files(calibration).network.curves)
    if json == "-":
        emit(json_text(to_json(items)))
        return
    if json is not None:
        write_atomically(Path(json), json_text(to_json(items)))
    emit(render(items))


def _listed(path: str | None) -> tuple[str, ...]:
    """The ids of a file, one a line; '#' starts a comment."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(Problem(what=f"cannot read: {error}", where="--ids", value=path)) from None
    ids = tuple(text for line in lines if (text := line.partition("#")[0].strip()))
    if not ids:
        raise InputError(Problem(what="the file lists no ids", where="--ids", value=path))
    return ids


def _progress() -> Callable[[int, int], None] | None:
    """A bar on standard error when a person watches, else nothing."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        filled = 30 * done // max(total, 1)
        end = "\n" if done == total else ""
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\r{bar} {done:,} of {total:,} distinct runs{end}")
        sys.stderr.flush()

    return show
