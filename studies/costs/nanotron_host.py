"""Host time of a nanotron decoder layer: host_op_us, host_launch_us, host_comm_us of its stack.

    python studies/costs/nanotron_host.py overheads_T1_by_workload.csv \
        overheads_T2_by_op_workload.csv overheads_all_types_DLRM_default_V100_00e7118.csv

Counts the operators that nanotron's public code (src/nanotron/models/llama.py,
parallel/tensor_parallel/functional.py, both 2025) runs for one layer and micro-batch under tensor
parallelism with asynchronous communication: a column-parallel product is three (the ranks before,
this rank's own part, those behind), so is the input gradient of a row-parallel one; the sequence
offsets of flash attention are computed anew in every layer; keys and values are concatenated for
the rotary kernel; gradients go to fp32 buffers parameter by parameter. An operator costs the host
T1 + T2 + T3 + T5 for each further launch, by the published tables of PyTorch operators
(studies/recsys/host_costs.py explains them); the operator of a table stands for those of its kind.
The tables are of x86 hosts of V100 nodes; HOST is between what is taken for older cloud hosts (1)
and for current servers (0.5): a guess, as H100 nodes of 2023 have hosts of 2021. Nothing here reads
a measured step.

Our graph has fewer operators for the same layer (GRAPH_*: with the head's share of a 16-layer
model); the printed constants spread the total over them.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

#: table operator: (number in forward and backward, launches each)
LAYER = {
    "LookupFunction": (5, 1),  # Triton norms 2, rotary of q and of kv, flash attention: functions
    "aten::bmm": (6 + 6, 1),  # explicit products: parts of 2 column, 2 row gradients
    "aten::linear": (2, 1),  # row-parallel products
    "BmmBackward0": (6, 1),  # whole products of the backward: 4 weights, 2 column inputs
    "aten::to": (4, 1),  # copies to contiguous layouts: q, k, v, kv
    "aten::cat": (1 + 3, 1),  # k with v; backward of three splits
    "aten::ones_like": (2, 1),  # sequence offsets
    "aten::sum": (4 + 4, 1),  # lengths and their running sums; reductions of the norms' gradients
    "aten::add": (2, 1),
    "aten::sigmoid": (1, 1),  # SiLU
    "aten::mul": (1, 1),
    "LookupFunctionBackward": (5, 2),
    "MulBackward0": (1, 2),
    "SigmoidBackward0": (1, 1),
    "ToCopyBackward0": (4, 1),
    "SliceBackward0": (2, 1),
    "aten::add_": (2 + 6, 1),  # residual gradients; fp32 buffers of 6 parameters
    "torch::autograd::AccumulateGrad": (6, 1),
}
COLLECTIVES = 4 + 6
SILENT = 60  # views, transposes, splits, empty tensors: 8 for each product, and the layouts
GRAPH_OPERATORS, GRAPH_COLLECTIVES, GRAPH_LAUNCHES = 30, 10.5, 45
LAUNCH_US = 4.0  # T4
HOST = 0.75


def _rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def _name(op: str) -> str:
    return op.removesuffix("0")


def main(t1_path: str, t2_path: str, trace_path: str) -> None:
    """Prints the host time of a layer and the constants of the stack."""
    t1 = mean(float(row["mean_us"]) for row in _rows(t1_path))
    samples: dict[str, list[float]] = defaultdict(list)
    for row in _rows(t2_path):
        if int(row["count"]) >= 50:
            samples[_name(row["op"])].append(float(row["mean_us"]))
    t2 = {op: mean(values) for op, values in samples.items()}
    trace: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _rows(trace_path):
        if row["type"] != "launches" and row["op"]:
            trace[row["type"]][_name(row["op"])] = float(row["mean_us_or_num_launches"])
    scale = median(t2[op] / raw for op, raw in trace["t2"].items() if op in t2)
    t3, t5 = (
        scale * median(value for value in trace[kind].values() if value > 0.0)
        for kind in ("t3", "t5")
    )
    total, launches = SILENT * (t1 + scale * trace["t5"]["aten::view"]), 0
    for op, (number, each) in LAYER.items():
        own = _name(op) in trace["t3"] and not op.startswith("Lookup")  # T3: the embedding's own
        after = scale * trace["t3"][_name(op)] if own else t3
        total += number * (t1 + t2[_name(op)] + after + (each - 1) * t5)
        launches += number * each
    comm = t1 + t2["All2All_Req"]
    out = sys.stdout.write
    out(f"T1 {t1:.1f} us, scale of T3 and T5 {scale:.2f}, T3 {t3:.1f} us, T5 {t5:.1f} us\n")
    out(f"{launches} launches, {COLLECTIVES} collectives\n")
    total, launched, comm = HOST * total, HOST * LAUNCH_US, HOST * comm
    whole = total + launches * launched + COLLECTIVES * comm
    out(f"{whole / 1e3:.2f} ms per layer and micro-batch\n")
    rest = total + (launches - GRAPH_LAUNCHES) * launched
    out(f"host_launch_us {launched:.1f}\n")
    out(f"host_op_us {rest / GRAPH_OPERATORS:.0f}\n")
    out(f"host_comm_us {COLLECTIVES * comm / GRAPH_COLLECTIVES:.0f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
