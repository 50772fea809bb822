r"""Host costs of DLRM's operators in PyTorch: `host_op_us_by` of catalog/stacks/pytorch-dlrm.toml.

    python studies/recsys/host_costs.py overheads_T1_by_workload.csv \
        overheads_T2_by_op_workload.csv overheads_all_types_DLRM_default_V100_00e7118.csv

An operator costs the host T1 (the gap before it) + T2 (until its first launch) + T3 (after its
last) + T5 for each further launch; 4 us per launch come on top (`host_launch_us`). T1 and T2 are
means over the DLRM workloads of one GPU, corrected for the profiler. T3 and T5 come from one trace
without that correction and are scaled by the ratio of its T2 to the corrected ones. Operators that
launch nothing (transposes, views) cost T1 + T5 and are added to the operator they belong to, as
are the two gradient accumulations to each linear layer's backward.

Our graph has operators of its own: a linear layer is a product and a bias, its backward two
products and the bias gradient. The printed values are those of our operators.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

SMALL = 4096  # larger batches are of runs on several GPUs


def _rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def main(t1_path: str, t2_path: str, trace_path: str) -> None:
    """Prints microseconds per operator of our graph."""
    t1 = mean(
        float(row["mean_us"])
        for row in _rows(t1_path)
        if row["model"].startswith("DLRM") and int(row["batch_size"]) <= SMALL
    )
    samples: dict[str, list[float]] = defaultdict(list)
    for row in _rows(t2_path):
        if row["model"].startswith("DLRM") and int(row["batch_size"]) <= SMALL:
            samples[row["op"]].append(float(row["mean_us"]))
    t2 = {op: mean(values) for op, values in samples.items()}
    trace: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _rows(trace_path):
        if row["type"] != "launches" and row["op"]:
            trace[row["type"]][row["op"].removesuffix("0")] = float(row["mean_us_or_num_launches"])
    t2 = {op.removesuffix("0"): value for op, value in t2.items()}
    scale = median(t2[op] / raw for op, raw in trace["t2"].items() if op in t2)
    out = sys.stdout.write
    out(f"T1 {t1:.1f} us; scale of T3 and T5 {scale:.2f}\n")

    def whole(op: str, launches: int = 1) -> float:
        t3, t5 = trace["t3"].get(op, 0.0), trace["t5"].get(op, 0.0)
        return t1 + t2[op] + scale * (t3 + (launches - 1) * t5)

    def silent(op: str) -> float:
        return t1 + scale * trace["t5"][op]

    accumulate = whole("torch::autograd::AccumulateGrad") + 4.0
    layer = whole("AddmmBackward", 3) + silent("TBackward") + 2 * accumulate
    values = {
        "gemm": whole("aten::linear"),
        "bias": scale * trace["t5"]["aten::linear"],
        "gemm_backward": (layer - accumulate) / 2.5,
        "bias_grad": layer - 2 * (layer - accumulate) / 2.5,
        "relu": whole("aten::relu"),
        "relu_backward": whole("ReluBackward"),
        "sigmoid": whole("aten::sigmoid"),
        "sigmoid_backward": whole("SigmoidBackward"),
        "embedding_bag": whole("LookupFunction"),
        "embedding_bag_backward": whole("LookupFunctionBackward"),
        "concat": whole("aten::cat") + 2 * silent("aten::view"),
        "split": 2 * whole("SliceBackward", 2),
        "triangle": whole("aten::index") + silent("aten::slice"),
        "scatter": whole("IndexBackward", 11),
        "grad_add": t1 + scale * (trace["t2"]["aten::add"] + trace["t3"]["aten::add"]),
        "bce_loss": whole("aten::binary_cross_entropy") + scale * 43.0,
        "bce_loss_backward": whole("BinaryCrossEntropyBackward") + whole("aten::ones_like"),
        "mse_loss": whole("aten::mse_loss", 2),
        "mse_loss_backward": whole("MseLossBackward", 2) + whole("aten::ones_like"),
        "optimizer": whole("Optimizer.step#SGD.step", 12),
        "zero_grad": whole("Optimizer.zero_grad#SGD.zero_grad", 12),
    }
    for name, value in values.items():
        out(f"{name} = {value:.0f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
