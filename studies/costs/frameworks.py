"""Prints how much more memory-bound work frameworks do than the counts of their stand-in.

    python studies/costs/frameworks.py RUNS

RUNS is the table of measured runs. For every BERT row on one GPU the measured time less the
predicted time of GEMMs, loss and optimizer is divided by the predicted time of all other operators,
priced with the counts of pytorch-eager (pytorch-compile for XLA) and without `half_share`. From the
medians over batch sizes come `eager_bytes` (fp32, TF32) and `half_share` (fp16 over fp32) of the
stacks of 2020: rows of oneflow_dlperf on one GPU are in sample there, also its PyTorch rows
(pytorch-apex-2020), and those of nvidia_deeplearningexamples for TensorFlow; runs on several GPUs
and NVIDIA's PyTorch and Paddle rows are not.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from foretrain.predict import predict
from foretrain.program import ComputeEvent
from foretrain.run.load import load_run
from foretrain.run.stacks import load_stack
from foretrain.validation.compare import measured_step
from foretrain.validation.mapping.row import map_row
from foretrain.validation.mapping.words import Unsupported
from foretrain.validation.rows import read_rows

FAMILIES = ("oneflow_dlperf", "nvidia_deeplearningexamples")


def is_fixed(event: ComputeEvent) -> bool:
    """Returns whether an event is priced as it is: GEMMs, loss, optimizer, casts of weights."""
    loss = event.op.startswith("ce_") or event.op == "cross_entropy"
    return event.op in ("gemm", "cast") or loss or event.direction == "optimizer"


def main() -> None:
    """Prints one line per family, stack and precision."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for run in read_rows(Path(sys.argv[1])):
        row = run.row
        if row.family not in FAMILIES or row.model_class != "bert" or row.n_gpus != 1:
            continue
        try:
            mapped = map_row(row)
        except Unsupported:
            continue
        name = str(mapped.run["stack"])
        model = load_stack("pytorch-compile" if "xla" in name else "pytorch-eager")
        spec = load_run(mapped.run)
        stack = replace(
            spec.stack, kernels=model.kernels, eager_bytes=model.eager_bytes, half_share=1.0,
            optimizer="foreach", attention="unfused",
        )  # fmt: skip
        result = predict(replace(spec, stack=stack))
        parts = {True: 0.0, False: 0.0}
        for cost in result.events:
            if isinstance(cost.event, ComputeEvent):
                parts[is_fixed(cost.event)] += cost.count * cost.value_s
        measured = measured_step(row, run.measured)
        if measured:
            ratio = (measured - parts[True]) / parts[False]
            found[row.family, name, str(mapped.run["training"]["precision"])].append(ratio)
    for (family, name, precision), ratios in sorted(found.items()):
        sys.stdout.write(
            f"{family:28s} {name:16s} {precision:5s} {median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rows)\n"
        )


if __name__ == "__main__":
    main()
