"""Where the constants of the stack nanotron come from: unit, rank and slack of its memory rows.

Usage: python studies/memory/nanotron_memory.py measured_runs.csv.gz
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foretrain.frontends.catalog import resolve_model
from foretrain.frontends.spec import ModelSpec
from foretrain.strategy.stages import stages_by_cost
from foretrain.units import GIB

FAMILY = "ultrascale_playbook"
LOGIT_BYTES = 10.0  # two copies in fp32, the gradient in bf16


@dataclass(frozen=True, kw_only=True)
class Stage:
    """GiB of one stage: model states, activations in flight, gradients of a backward, logits."""

    states: float
    activations: float
    gradients: float
    logits: float


def say(text: str) -> None:
    """Writes a line."""
    sys.stdout.write(text + "\n")


def read(path: Path) -> list[dict[str, str]]:
    """Returns the rows of good grade with a memory figure."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [r for r in rows if r["family"] == FAMILY and r["peak_mem_gib"] and r["quality"] == "A"]


def number(row: Mapping[str, str], key: str) -> int:
    """Returns a whole number of a row, 1 where it is not stated."""
    return int(float(row[key] or 1))


def spec_of(row: Mapping[str, str]) -> ModelSpec:
    """Returns the model of a row."""
    keys = {"layers": "n_layers", "hidden": "hidden", "heads": "heads", "ffn": "ffn"}
    sizes = {name: number(row, key) for name, key in keys.items()}
    tied = "untied" not in row["arch_note"]
    return resolve_model({"family": "llama", **sizes, "vocab": number(row, "vocab"), "tied": tied})


def stages(row: Mapping[str, str]) -> list[Stage]:
    """Returns the closed forms of every stage, see docs/explain/memory.md."""
    spec = spec_of(row)
    h, f, v = spec.hidden, spec.ffn, spec.vocab
    tp, pp, dp = (number(row, key) for key in ("tp", "pp", "dp"))
    layers = stages_by_cost(spec, pp) if pp > 1 else (spec.layers,)
    tokens = number(row, "mbs") * number(row, "seq_len")
    shared = dp if row["zero_stage"] == "1" else 1
    found: list[Stage] = []
    for i, count in enumerate(layers):
        first, last = i == 0, i == pp - 1
        head = last and (pp > 1 or not spec.tied)
        parameters = (count * (4 * h * h + 3 * h * f) + v * h * (first + head)) / tp
        alive = min(number(row, "ga_steps"), pp - i)
        found.append(
            Stage(
                states=parameters * (6 + 12 / shared) / GIB,
                activations=tokens * (16 * h + 8 * f) / tp * count * alive / GIB,
                gradients=2 * parameters / GIB,
                logits=tokens * v / tp * LOGIT_BYTES / GIB if last else 0.0,
            )
        )
    return found


def unit(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints measured over expected differences of rows that differ in the ZeRO stage."""
    pairs: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    keys = ("model", "tp", "pp", "dp", "mbs", "ga_steps")
    for row in rows:
        pairs.setdefault(tuple(row[key] for key in keys), {})[row["zero_stage"]] = row
    ratios: list[tuple[float, float]] = []
    for pair in pairs.values():
        if {"0", "1"} <= set(pair):
            gap = stages(pair["0"])[0].states - stages(pair["1"])[0].states
            measured = float(pair["0"]["peak_mem_gib"]) - float(pair["1"]["peak_mem_gib"])
            if gap > 0:
                ratios.append((gap / float(pair["0"]["peak_mem_gib"]), measured / gap))
    large = sorted(ratio for share, ratio in ratios if share > 0.4)
    say(f"unit: {len(large)} pairs whose states dominate: measured / GiB of states "
          f"median {median(large):.3f}; 1.000 if GiB, 1.074 if 1e9 bytes")  # fmt: skip


def error(rows: Sequence[Mapping[str, str]], model: Callable[[list[Stage]], float]) -> float:
    """Returns the median error of a closed form."""
    return median(abs(model(stages(r)) / float(r["peak_mem_gib"]) - 1) for r in rows)


def rank(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints the error of the fullest stage and of the first, with one micro-batch per step."""
    one = [r for r in rows if number(r, "pp") > 1 and number(r, "ga_steps") == 1]

    def need(stage: Stage) -> float:
        return 1.05 * (stage.states + stage.activations + stage.logits)

    say(f"rank: {len(one)} rows with one micro-batch: fullest stage "
          f"{error(one, lambda s: max(map(need, s))):.3f}, first stage "
          f"{error(one, lambda s: need(s[0])):.3f} median error")  # fmt: skip


def slack(rows: Sequence[Mapping[str, str]]) -> None:
    """Prints the median error of rows with pipelines for several shares of slack."""
    many = [r for r in rows if number(r, "pp") > 1 and number(r, "ga_steps") > 1]
    for share in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4):

        def need(found: list[Stage], share: float = share) -> float:
            s = found[0]
            return 0.1 + s.states + (1.05 + share) * s.activations + s.gradients

        say(f"slack: {share:.2f} of activations: median error {error(many, need):.3f} "
              f"({len(many)} rows)")  # fmt: skip


def main() -> None:
    """Prints the three results."""
    rows = read(Path(sys.argv[1]))
    unit(rows)
    rank(rows)
    slack(rows)


if __name__ == "__main__":
    main()
