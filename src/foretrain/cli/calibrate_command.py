"""`foretrain calibrate network|ops FILE...`: constants from measurements, as a calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretrain.cli.output import check_target, complain, emit, refuse_foreign, write_atomically
from foretrain.errors import InputError, Problem

KINDS = ("network", "ops")


def calibrate(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="network or ops.", show_default=False)
    ],
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="network: logs of nccl-tests; ops: tables of measured operators.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the calibration file (TOML); - is stdout."
        ),
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
    of_network = {"--cluster": cluster, "--fabric": fabric, "--collective": collective}
    refuse_foreign(kind, of_network if kind == "ops" else {"--device": device})
    if kind == "ops":
        _ops(files, output, device)
    else:
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
    text = calibration_text([item.curve for item in fitted])
    _deliver(output, text, render_curves(fitted, output))


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
    kinds = dict.fromkeys(refit.kind for refit in result.refits)
    entries = {k: [r.entry for r in result.refits if r.kind == k] for k in kinds}
    _deliver(output, operators_text(entries), render_calibrated(result, output))


def _deliver(output: str | None, calibration: str, residuals: str) -> None:
    """Writes the calibration and prints the residuals; with `-` the file goes to stdout alone."""
    if output == "-":
        emit(calibration)
        complain(residuals)
        return
    if output is not None:
        write_atomically(Path(output), calibration)
    emit(residuals)
