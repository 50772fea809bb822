"""Host time per operator of Megatron-Core, with and without Transformer Engine: host_op_us.

    python studies/costs/megatron_host.py measured_runs.csv.gz

NVIDIA's functional tests of Megatron-LM train GPT models of 12 layers and a hidden size of 512 on
one node: the device waits for the host all the time, and a step is what the host takes to launch
it. Printed by device (which stands for its host), transformer implementation, tp and pp: the host
time per operator at which the predicted step is the median measured one. Rows without a pipeline
are fitted, those with one are not; the constant is the geometric mean of the hosts of A100 and H100
nodes, and host_on how far both implementations are from it, in the geometric mean.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median

from foretrain.errors import InputError
from foretrain.predict import predict
from foretrain.run.spec import RunSpec
from foretrain.validation.compare import measured_step
from foretrain.validation.mapping import map_row
from foretrain.validation.mapping.words import Unsupported
from foretrain.validation.predict_rows import run_of
from foretrain.validation.rows import MeasuredRun, read_rows

#: Both are bound by the host, where a step is linear in the time per operator.
LOW_US, HIGH_US = 100.0, 200.0
LAYERS, HIDDEN = 12, 512

Key = tuple[str, str, int, int]


def host_op_us(run: RunSpec, seconds: float) -> float:
    """Returns the host time per operator (us) that makes the predicted step `seconds`."""

    def step(value: float) -> float:
        stack = replace(run.stack, host_op_us=value, host_on={})
        return predict(replace(run, stack=stack)).step_time_s.value

    low, high = step(LOW_US), step(HIGH_US)
    return LOW_US + (seconds - low) / (high - low) * (HIGH_US - LOW_US)


def _groups(path: Path) -> dict[tuple[Key, int], list[tuple[MeasuredRun, float]]]:
    """Rows that a prediction cannot tell apart but for their stack, by what it can."""
    found: dict[tuple[Key, int], list[tuple[MeasuredRun, float]]] = defaultdict(list)
    for run in read_rows(path):
        row, seconds = run.row, measured_step(run.row, run.measured)
        plain = (row.cp or 1) == 1 and (row.vpp or 1) == 1 and row.model_class == "llm_dense"
        small = row.n_layers == LAYERS and row.hidden == HIDDEN
        if row.family != "megatron_ci_golden" or not plain or not small or seconds is None:
            continue
        kind = "local" if '"transformer-impl":"local"' in row.notes else "Transformer Engine"
        key = (row.gpu_norm, kind, row.tp or 1, row.pp or 1)
        found[key, row.gbs or 0].append((run, seconds))
    return found


def main(path: str) -> None:
    """Prints the host time of each group, the fitted ones and those of pipelines."""
    fitted: dict[tuple[str, str], list[float]] = defaultdict(list)
    checked: dict[tuple[str, str], list[float]] = defaultdict(list)
    for ((device, kind, tp, pp), _), rows in sorted(_groups(Path(path)).items()):
        try:
            spec = run_of(map_row(rows[0][0].row))
            value = host_op_us(spec, median(seconds for _, seconds in rows))
        except (InputError, Unsupported):
            continue
        (fitted if pp == 1 else checked)[kind, device].append(value)
        print(f"{kind}, {device}, tp {tp}, pp {pp}: {value:.0f} us ({len(rows)} rows)")
    paces: list[float] = []
    for kind in sorted({kind for kind, _ in fitted}):
        by = {device: median(v) for (k, device), v in fitted.items() if k == kind and len(v) > 1}
        for device, value in by.items():
            other = checked[kind, device]
            text = f"{median(other):.0f} us" if other else "none"
            print(f"{kind}, {device}: {value:.0f} us, pipelines (not fitted) {text}")
        mean = sqrt(by["A100-SXM"] * by["H100-SXM"])
        paces.append(by["A100-SXM"] / mean)
        print(
            f"{kind}: host_op_us {mean:.0f}, A100 {paces[-1]:.2f} of it, H100 {1 / paces[-1]:.2f}"
        )
    pace = sqrt(paces[0] * paces[1])
    print(f"host_on: ampere {pace:.2f}, hopper {1 / pace:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
