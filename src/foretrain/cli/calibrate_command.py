"""`foretrain calibrate network LOG...`: measured curves from logs, as a calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.output import check_target, emit, write_atomically
from foretrain.errors import InputError, Problem

KINDS = ("network",)


def calibrate(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="network.", show_default=False)],
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Logs of nccl-tests.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the calibration file (TOML)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="TEXT", help="The machine, e.g. '10x8 h100-sxm, 8x400G ib'."
        ),
    ] = None,
    fabric: Annotated[
        str | None, typer.Option("--fabric", metavar="NAME", help="What joins the nodes, e.g. ib.")
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option("--collective", metavar="NAME", help="Of logs that do not name it."),
    ] = None,
) -> None:
    """Fit constants to measurements, print the residuals, write a file for --calibration."""
    if kind not in KINDS:
        problem = Problem(what="unknown kind", value=kind, allowed=", ".join(KINDS))
        raise InputError(problem)
    check_target(output, "--output")
    _network(files, output, cluster, fabric, collective)


def _network(
    files: list[str],
    output: str | None,
    cluster: str | None,
    fabric: str | None,
    collective: str | None,
) -> None:
    from foretrain.analysis.calibrate_network import calibrate_network
    from foretrain.analysis.nccl_log import COLLECTIVES
    from foretrain.cost.user_calibration import calibration_text
    from foretrain.hardware.catalog import resolve_cluster
    from foretrain.hardware.fabrics import fabric_name
    from foretrain.report.calibration_text import render_curves

    if collective is not None and collective not in COLLECTIVES.values():
        names = ", ".join(dict.fromkeys(COLLECTIVES.values()))
        raise InputError(
            Problem(what="unknown word", where="--collective", value=collective, allowed=names)
        )
    fitted = calibrate_network(
        [Path(name) for name in files],
        cluster=None if cluster is None else resolve_cluster(cluster),
        fabric="" if fabric is None else fabric_name(fabric),
        collective=collective or "",
    )
    if output is not None:
        write_atomically(Path(output), calibration_text([item.curve for item in fitted]))
    emit(render_curves(fitted, output))
