"""The options of the command line: one flag for every field of a run file, and the switches.

All fields arrive as text and are read like values of a run file, so that the same checks and the
same messages hold for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

RunFile = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Run file (YAML or JSON).", show_default=False)
]
RequiredRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Run file (YAML or JSON).", show_default=False)
]
Runs = Annotated[
    list[str], typer.Argument(metavar="RUN RUN...", help="Run files.", show_default=False)
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field, e.g. plan.tp=4; repeatable."
    ),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout."),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (.json or .json.gz)."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Add days, GPU-hours and money for N (1T) tokens."),
]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="What `foretrain calibrate` measured; repeatable, a later file wins.",
    ),
]
Flat = Annotated[bool, typer.Option("--flat", help="Play every rank and every operator.")]
Plain = Annotated[bool, typer.Option("--plain", help="Without overlap slowdown and link sharing.")]
Baselines = Annotated[
    bool, typer.Option("--baselines", help="Add what simpler models say of the same run.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse what is not modelled.")]


def _field(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, show_default=False)


Model = Annotated[str | None, _field("--model", "NAME", "Catalog name, config.json or mapping.")]
Cluster = Annotated[str | None, _field("--cluster", "TEXT", "E.g. '8x8 h100-sxm, 8x400G ib'.")]
Stack = Annotated[str | None, _field("--stack", "NAME", "Software stack, e.g. megatron-te.")]
Sequence = Annotated[str | None, _field("--sequence", "N", "Tokens per sample.")]
TargetSequence = Annotated[
    str | None, _field("--target-sequence", "N", "Tokens of a target, beside an encoder.")
]
Image = Annotated[str | None, _field("--image", "N", "Height and width of images in pixels.")]
GlobalBatch = Annotated[
    str | None, _field("--global-batch", "N", "Samples per optimizer step over all ranks.")
]
Microbatch = Annotated[
    str | None, _field("--microbatch", "N", "Samples per data-parallel rank and micro-step.")
]
Accumulation = Annotated[
    str | None, _field("--accumulation", "N", "Micro-steps per optimizer step.")
]
Precision = Annotated[str | None, _field("--precision", "DTYPE", "bf16, fp16, fp32, tf32, ...")]
Optimizer = Annotated[
    str | None, _field("--optimizer", "NAME", "adamw, adam, lamb, sgd, sgd-momentum, adagrad, ...")
]
TableOptimizer = Annotated[
    str | None,
    _field("--table-optimizer", "NAME", "Of embedding tables: sgd, rowwise-adagrad, ..."),
]
Lookups = Annotated[
    str | None,
    _field("--lookups", "HOW", "Rows of embedding tables: uniform, {zipf: 1.05}, {file: F}."),
]
PlanText = Annotated[
    str | None, _field("--plan", "SHORT", "Short form: 2M4P1D is tp 2, pp 4, dp 1.")
]
Preset = Annotated[
    str | None, _field("--preset", "NAME", "megatron, fsdp, deepspeed, ddp, dlrm or plain.")
]
Tp = Annotated[str | None, _field("--tp", "N", "Tensor-parallel degree.")]
Pp = Annotated[str | None, _field("--pp", "N", "Pipeline stages.")]
Dp = Annotated[str | None, _field("--dp", "N", "Data-parallel degree (derived when absent).")]
Cp = Annotated[str | None, _field("--cp", "N", "Context-parallel degree.")]
Ep = Annotated[str | None, _field("--ep", "N", "Expert-parallel degree.")]
Etp = Annotated[str | None, _field("--etp", "N", "Tensor-parallel degree inside experts.")]
Shard = Annotated[str | None, _field("--shard", "N", "Ranks that shard (smaller than dp: HSDP).")]
Zero = Annotated[str | None, _field("--zero", "STAGE", "ZeRO stage, 0 to 3.")]
SequenceParallel = Annotated[
    bool | None,
    _field("--sequence-parallel/--no-sequence-parallel", "", "Split norms over the tp ranks."),
]
Interleave = Annotated[str | None, _field("--interleave", "N", "Chunks per pipeline rank.")]
Schedule = Annotated[str | None, _field("--schedule", "NAME", "gpipe, 1f1b or interleaved.")]
InFlight = Annotated[
    str | None, _field("--in-flight", "N", "Most micro-batches alive on a stage; N or N,N,...")
]
Stages = Annotated[str | None, _field("--stages", "N,N,...", "Layers of each stage.")]
Recompute = Annotated[str | None, _field("--recompute", "MODE", "none, selective or full.")]
Reshard = Annotated[
    bool | None, _field("--reshard/--no-reshard", "", "Drop gathered weights after forward.")
]
NoSync = Annotated[
    bool | None,
    _field("--no-sync/--sync", "", "Reduce sharded gradients once per step, not per micro-step."),
]
Offload = Annotated[
    str | None, _field("--offload", "WHAT", "What the host holds: none, optimizer, parameters.")
]
OptimizerOffloadFraction = Annotated[
    str | None,
    _field("--optimizer-offload-fraction", "SHARE", "Parameters that --offload optimizer moves."),
]
CpuOffloadingNumLayers = Annotated[
    str | None,
    _field("--cpu-offloading-num-layers", "N", "Layers whose activations wait on the host."),
]
ExpandableSegments = Annotated[
    bool | None,
    _field("--expandable-segments/--no-expandable-segments", "", "The allocator maps pages."),
]
BucketMib = Annotated[str | None, _field("--bucket-mib", "MIB", "Size of a gradient bucket.")]
Prefetch = Annotated[
    str | None, _field("--prefetch", "N", "Units whose weights are gathered ahead.")
]
Overlap = Annotated[
    str | None, _field("--overlap", "BOOL", "Hide communication: true, false or {grad: true}.")
]
Order = Annotated[str | None, _field("--order", "AXES", "Mesh axes, outermost first: pp,dp,tp.")]
Tables = Annotated[
    str | None, _field("--tables", "WAY", "Embedding tables: table-wise, row-wise, auto, ...")
]
Assignment = Annotated[
    str | None, _field("--assignment", "HOW", "Tables to ranks: greedy-size, greedy-lookups, ...")
]

#: Parameter of `predict` -> field of the run file.
FIELD_OF_FLAG: Mapping[str, str] = {
    "model": "model",
    "cluster": "cluster",
    "stack": "stack",
    "plan": "plan",
    **{
        key: f"training.{key}"
        for key in (
            "sequence",
            "target_sequence",
            "image",
            "global_batch",
            "microbatch",
            "accumulation",
            "precision",
            "optimizer",
            "table_optimizer",
            "lookups",
        )
    },
    **{
        key: f"plan.{key}"
        for key in (
            "preset",
            "tp",
            "pp",
            "dp",
            "cp",
            "ep",
            "etp",
            "shard",
            "zero",
            "sequence_parallel",
            "interleave",
            "schedule",
            "in_flight",
            "stages",
            "recompute",
            "reshard",
            "no_sync",
            "offload",
            "optimizer_offload_fraction",
            "cpu_offloading_num_layers",
            "expandable_segments",
            "bucket_mib",
            "prefetch",
            "overlap",
            "order",
            "tables",
            "assignment",
        )
    },
}


def given_flags(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns field path -> value of the flags that were given on the command line."""
    return {
        field: params[flag] for flag, field in FIELD_OF_FLAG.items() if params.get(flag) is not None
    }
