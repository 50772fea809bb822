"""Prints the host's time of PyTorch calls by operator, from tables of calls that are timed alone.

    python studies/costs/calls.py TABLES

TABLES holds what op_tables.py and op_tables_more.py write (neusight_vector, neusight_conv). A call
between two events takes

    T = before + max(kernel, after)

`before`: the host until the launch, by operator; `after`: what the host needs behind it, the same
for all; the kernel is the cost model's. One value serves the hosts of all six devices, which weigh
the same; so do four classes of size. Rows of left-out shapes take no part. `[host_op_us_by]` of the
PyTorch stacks is before + BEHIND_S of validation/ops/predict.py less `host_launch_us`; that
constant is what makes an element-wise call the usual operator of those stacks. `spread` is the 90th
percentile of the ratio of calls that only the host decides (intervals.toml, host).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.fitting import fit_constants
from foretrain.validation.ops.predict import BEHIND_S, prepared, stack_of
from foretrain.validation.ops.table import read_ops

SIZES = (0.0, 1e6, 16e6, 64e6, 1e13)
#: A convolution of more is decided by its kernel, which is known to 20 % only.
SHORT_US = 150.0
#: Calls of a host that is slower by more than at the first one take no part.
FIRST_US = 30.0
LAUNCH_US = 6.0  # `host_launch_us` of pytorch-eager


def calls(path: Path) -> pd.DataFrame:
    """Returns the calls of a table with the time of their kernels, in microseconds."""
    items = read_ops(path)
    outcomes = [prepared(item.row) for item in items]
    frame = pd.DataFrame(
        {
            "device": [outcome.device for outcome in outcomes],
            "op": [outcome.op for outcome in outcomes],
            "stack": [outcome.row.stack for outcome in outcomes],
            "bytes": [outcome.events[0].bytes for outcome in outcomes],
            "left_out": [is_left_out(shape_key(o.op, o.row.shape)) for o in outcomes],
            "us": [item.latency_us for item in items],
            "host_us": [item.row.host_us or 0.0 for item in items],
            "kernel_us": 0.0,
        }
    )
    # a host that grew slower with every call: the first ones, and as at the first of all
    slower = frame.host_us - frame.groupby(["device", "op"]).host_us.transform("min")
    frame["us"] -= slower
    frame = frame[slower < FIRST_US].reset_index(drop=True)
    for (device, stack), index in frame.groupby(["device", "stack"]).groups.items():
        cluster = parse_cluster(f"1x1 {device}")
        model = build_cost_model(cluster, stack_of(str(stack))[0], warm=False)
        prices = model.price([outcomes[i].events[0] for i in index])
        frame.loc[index, "kernel_us"] = prices.value_s * 1e6
    return frame


def main(tables: Path) -> None:
    """Fits and prints."""
    every = calls(tables / "neusight_vector.parquet")
    slow = calls(tables / "neusight_conv.parquet")
    frame = pd.concat([every, slow[slow.us < SHORT_US]], ignore_index=True)
    frame["size"] = pd.cut(frame.bytes, SIZES, labels=False)
    rows = frame[~frame.left_out]
    weight = 1.0 / rows.groupby(["device", "op", "size"]).us.transform("size").to_numpy()
    names = sorted(rows.op.unique())
    which = rows.op.map(names.index).to_numpy()
    kernel, measured = rows.kernel_us.to_numpy(), rows.us.to_numpy()

    def model(values: np.ndarray) -> np.ndarray:
        return values[which] + np.maximum(kernel, values[-1])

    start = np.full(len(names) + 1, 20.0)
    fitted = fit_constants(model, measured, start, np.full(start.shape, 2.0),
                           weight=weight / weight.mean())  # fmt: skip
    for name, before in zip(names, fitted, strict=False):
        op_us = before + BEHIND_S * 1e6 - LAUNCH_US
        sys.stdout.write(f"{name:12s} before {before:5.1f} us: host_op_us_by {op_us:.0f}\n")
    sys.stdout.write(f"after {fitted[-1]:.1f} us\n")
    alone = (kernel < fitted[-1]) & (rows["size"] == 0).to_numpy()
    ratio = np.abs(np.log(model(fitted) / measured))[alone]
    order = np.argsort(ratio)
    share = np.cumsum(weight[alone][order]) / weight[alone].sum()
    sys.stdout.write(f"spread {np.exp(ratio[order][np.searchsorted(share, 0.9)]):.2f}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
