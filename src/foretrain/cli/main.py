"""The command line: `foretrain predict|explain|compare|fit|calibrate|catalog`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from foretrain.cli import options as opt
from foretrain.cli.calibrate_command import calibrate
from foretrain.cli.fit_command import fit
from foretrain.cli.output import Finished, complain
from foretrain.cli.validate_command import validate
from foretrain.errors import ForetrainError

app = typer.Typer(
    name="foretrain",
    help="Predict step time, memory and time breakdown of distributed training, without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich would double its time
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        from foretrain import __version__

        print(f"foretrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Predict step time, memory and time breakdown of distributed training, without a GPU."""


@app.command()
def predict(
    context: typer.Context,
    run: opt.RunFile = None,
    set_: opt.Set = None,
    json: opt.Json = None,
    trace: opt.Trace = None,
    flat: opt.Flat = False,
    plain: opt.Plain = False,
    baselines: opt.Baselines = False,
    strict: opt.Strict = False,
    tokens: opt.Tokens = None,
    calibration: opt.Calibration = None,
    model: opt.Model = None,
    cluster: opt.Cluster = None,
    stack: opt.Stack = None,
    sequence: opt.Sequence = None,
    target_sequence: opt.TargetSequence = None,
    image: opt.Image = None,
    global_batch: opt.GlobalBatch = None,
    microbatch: opt.Microbatch = None,
    accumulation: opt.Accumulation = None,
    precision: opt.Precision = None,
    optimizer: opt.Optimizer = None,
    table_optimizer: opt.TableOptimizer = None,
    lookups: opt.Lookups = None,
    plan: opt.PlanText = None,
    preset: opt.Preset = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    dp: opt.Dp = None,
    cp: opt.Cp = None,
    ep: opt.Ep = None,
    etp: opt.Etp = None,
    shard: opt.Shard = None,
    zero: opt.Zero = None,
    sequence_parallel: opt.SequenceParallel = None,
    interleave: opt.Interleave = None,
    schedule: opt.Schedule = None,
    in_flight: opt.InFlight = None,
    stages: opt.Stages = None,
    recompute: opt.Recompute = None,
    reshard: opt.Reshard = None,
    no_sync: opt.NoSync = None,
    offload: opt.Offload = None,
    optimizer_offload_fraction: opt.OptimizerOffloadFraction = None,
    cpu_offloading_num_layers: opt.CpuOffloadingNumLayers = None,
    expandable_segments: opt.ExpandableSegments = None,
    bucket_mib: opt.BucketMib = None,
    prefetch: opt.Prefetch = None,
    overlap: opt.Overlap = None,
    order: opt.Order = None,
    tables: opt.Tables = None,
    assignment: opt.Assignment = None,
) -> None:
    """Predict a run: does it fit, how long is a step, where does the time go.

    The run comes from a file, from flags, or from a file with flags laid over it.
    """
    from foretrain.cli.commands import run_predict

    run_predict(
        run,
        opt.given_flags(context.params),
        set_ or (),
        json_file=json,
        trace_file=trace,
        flat=flat,
        plain=plain,
        with_baselines=baselines,
        strict=strict,
        tokens=tokens,
        calibration=calibration or (),
    )


@app.command()
def explain(
    run: opt.RequiredRun,
    what: Annotated[
        str | None, typer.Argument(help="A rank class or a pattern, e.g. 'layers.*.mlp'.")
    ] = None,
    stage: Annotated[
        str, typer.Option("--stage", help="graph, plan, program, cost or memory.")
    ] = "cost",
    set_: opt.Set = None,
    calibration: opt.Calibration = None,
) -> None:
    """Print the object of one stage: why a number is what it is."""
    from foretrain.cli.commands import run_explain

    run_explain(run, what, stage, set_ or (), calibration or ())


@app.command()
def compare(runs: opt.Runs, set_: opt.Set = None, calibration: opt.Calibration = None) -> None:
    """Predict several runs and print them side by side."""
    from foretrain.cli.commands import run_compare

    run_compare(runs, set_ or (), calibration or ())


@app.command()
def catalog(
    kind: Annotated[
        str | None, typer.Argument(help="devices, models, clusters, stacks or fabrics.")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="One entry, with its sources.")] = None,
) -> None:
    """List what is known, with sources."""
    from foretrain.cli.commands import run_catalog

    run_catalog(kind, name)


app.command()(validate)
app.command()(fit)
app.command()(calibrate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 fine, 1 bad input, 2 does not fit, 3 our own fault."""
    debug = os.environ.get("FORETRAIN_DEBUG") == "1"
    try:
        app(args=None if arguments is None else list(arguments))
    except Finished as finished:
        return finished.code
    except ForetrainError as error:
        for problem in error.problems:
            complain(f"foretrain: {problem}")
        if error.exit_code == 3:
            _hint(debug)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # typer's own: a usage error is bad input, not "does not fit"
        return 1 if stop.code else 0
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback for users
        complain(f"foretrain: internal error: {type(error).__name__}: {error}")
        _hint(debug)
        return 3
    return 0


def _hint(debug: bool) -> None:
    """Says how to report a fault of ours; the traceback only when asked for."""
    if debug:
        import traceback

        traceback.print_exc(file=sys.stderr)
    else:
        complain(
            "foretrain: this is a fault of foretrain, not of the input; please report it with the "
            "run file (FORETRAIN_DEBUG=1 shows where it happened)"
        )
