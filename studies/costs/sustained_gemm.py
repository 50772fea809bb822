"""Rate of matrix products under sustained load over that of bursts: `[[sustained]]` of gemm.toml.

    python studies/costs/sustained_gemm.py

sustained_gemm.csv holds the share of the peak that Transformer Engine's general_gemm reached in a
loop over random data, one row per shape: the dense shapes of 8B to 405B decoders in the system
files b200_bf16_ceperm.json (commit e691807) and a100_pcie.json (commit 3005b17) of the public
repository MooreThreads/SimuMax, rounded to three digits; accumulate: into an fp32 result. The model
is the one that fits published tables of bursts (gemm.py); the ratio is printed by duration. Long
loops heat the device until its power limit lowers the clock; short ones end before. Nothing here
reads a measured step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from foretrain.cost.compute.gemm import alignment_loss, column_seconds, constants_for
from foretrain.cost.machine import Machine
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack
from foretrain.stack import Stack

LONG_US = 300.0
#: TE.Linear in FP8 on B200, a product of 8192 cubed 200 times (TransformerEngine issue 1747).
FP8_B200 = ("b200-sxm", 8192.0, 2377.1e12)


def main() -> None:
    """Prints the median ratio of short and long products of each device."""
    table = pd.read_csv(Path(__file__).with_suffix(".csv"))
    stack = load_stack("megatron-te")
    for (name, dtype), rows in table.groupby(["device", "dtype"]):
        machine = Machine(device=find_device(name), stack=stack, warm=False)
        columns = {x: rows[x].to_numpy(float) for x in "mnk"}
        columns |= {"b": np.ones(len(rows)), "row": columns["k"]}
        columns["out_bytes"] = np.where(rows.accumulate > 0, 8.0, 2.0)
        constants = constants_for(machine, dtype).values
        loss = alignment_loss(columns, dtype, dtype)
        burst = column_seconds(columns, loss, dtype, machine, constants).seconds
        flops = 2.0 * columns["m"] * columns["n"] * columns["k"]
        measured = flops / (rows.efficiency.to_numpy() * machine.peak(dtype))
        for word, part in (
            ("short", measured < LONG_US * 1e-6),
            ("long", measured > LONG_US * 1e-6),
        ):
            for accumulate in (0, 1):
                ratio = (burst / measured)[part & (rows.accumulate == accumulate)]
                if len(ratio):
                    sys.stdout.write(
                        f"{name} {dtype} {word} accumulate {accumulate}: {len(ratio)} shapes, "
                        f"median {np.median(ratio):.2f}\n"
                    )
        long = (burst / measured)[measured > LONG_US * 1e-6]
        sys.stdout.write(f"{name} {dtype} all long: {len(long)}, median {np.median(long):.3f}\n")
    fp8(stack)


def fp8(stack: Stack) -> None:
    """Prints the ratio of the one published rate in FP8, cast included."""
    name, size, measured = FP8_B200
    machine = Machine(device=find_device(name), stack=stack, warm=False)
    columns = {x: np.full(1, size) for x in ("m", "n", "k", "row")}
    columns |= {"b": np.ones(1), "out_bytes": np.full(1, 2.0)}
    constants = constants_for(machine, "fp8").values
    burst = column_seconds(columns, np.ones(1), "fp8", machine, constants).seconds[0]
    ratio = measured * burst / (2.0 * size**3)
    sys.stdout.write(f"{name} fp8 one shape of {burst * 1e6:.0f} us: {ratio:.3f}\n")


if __name__ == "__main__":
    main()
