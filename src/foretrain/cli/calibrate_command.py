"""`foretrain calibrate ops TABLE --device D`: constants from measured operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.output import check_target, emit, write_atomically
from foretrain.errors import InputError, Problem

KINDS = ("ops",)


def calibrate(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="ops.", show_default=False)],
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Tables of measured operators.", show_default=False),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the calibration file (TOML)."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="ops: the device that was measured."),
    ] = None,
) -> None:
    """Fit constants to measurements, print the residuals, write a file for --calibration."""
    if kind not in KINDS:
        problem = Problem(what="unknown kind", value=kind, allowed=", ".join(KINDS))
        raise InputError(problem)
    check_target(output, "--output")
    _ops(files, output, device)


def _ops(files: list[str], output: str | None, device: str | None) -> None:
    if device is None:
        way_out = "e.g. --device h100-sxm; `foretrain catalog devices` lists the names"
        raise InputError(Problem(what="name the device", where="--device", way_out=way_out))
    from foretrain.cost.operator_constants import operators_text
    from foretrain.validation.ops.calibrate import calibrate_ops
    from foretrain.validation.ops.calibrate_text import render_calibrated
    from foretrain.validation.ops.table import read_ops

    items = [item for name in files for item in read_ops(Path(name))]
    source = ", ".join(Path(name).name for name in files)
    result = calibrate_ops(items, device, source)
    if output is not None:
        kinds = dict.fromkeys(refit.kind for refit in result.refits)
        entries = {k: [r.entry for r in result.refits if r.kind == k] for k in kinds}
        write_atomically(Path(output), operators_text(entries))
    emit(render_calibrated(result, output))
