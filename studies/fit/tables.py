"""Prints the tables of docs/explain/fit.md from the cases that recognise.py wrote.

python studies/fit/tables.py cases.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from foretrain.analysis.fit_response import CONSTANTS

Row = dict[str, str]
CLASSES = ("silent", "weak", "clear")
BINS = ((0.667, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 0.99), (0.99, 1.01))


def say(line: str) -> None:
    """Writes one line."""
    sys.stdout.write(line + "\n")


def strength(row: Row) -> str:
    """Returns silent, weak or clear: how far the fault moves the step it moves most."""
    effect = float(row["effect"])
    return "silent" if effect <= 0.02 else "weak" if effect <= 0.06 else "clear"


def outcome(rows: Sequence[Row]) -> str:
    """Returns cases, named rightly (one of the planted), wrongly, and by an ideal observer."""
    if not rows:
        return "0 | - | - | -"
    right = sum(row["named"] in row["constant"].split() for row in rows)
    wrong = sum(row["named"] != "" for row in rows) - right
    known = [row for row in rows if row["ideal"]]
    ideal = sum(row["ideal"] == row["constant"] for row in known)
    bound = f"{ideal} of {len(known)} ({ideal / len(known):.0%})" if known else "-"
    shares = f"{right} ({right / len(rows):.0%}) | {wrong} ({wrong / len(rows):.1%})"
    return f"{len(rows)} | {shares} | {bound}"


def table(title: str, rows: Sequence[Row], groups: dict[str, Callable[[Row], bool]]) -> None:
    """Prints one table with a row per group."""
    say(f"\n{title}\n\n| | cases | named rightly | wrongly | ideal observer |")
    say("|---|---:|---:|---:|---:|")
    for name, wanted in groups.items():
        say(f"| {name} | {outcome([row for row in rows if wanted(row)])} |")


def main(path: Path) -> None:
    """Prints all tables."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for arm in ("random", "suggested"):
        mine = [row for row in rows if row["arm"] == arm]
        groups: dict[str, Callable[[Row], bool]] = {
            word: (lambda row, word=word: strength(row) == word) for word in CLASSES
        }
        groups["all"] = lambda row: True
        for constant in CONSTANTS:
            groups[f"clear, {constant}"] = lambda row, c=constant: (
                row["constant"] == c and strength(row) == "clear"
            )
        for held_out in ("False", "True"):
            name = "all, held-out jobs" if held_out == "True" else "all, development jobs"
            groups[name] = lambda row, h=held_out: row["held_out"] == h
            name = "clear, held-out jobs" if held_out == "True" else "clear, development jobs"
            groups[name] = lambda row, h=held_out: row["held_out"] == h and strength(row) == "clear"
        table(f"{arm} triples", mine, groups)
    others = {
        "two faults at once": lambda row: row["arm"] == "two",
        "scatter 5 %, told 2 %": lambda row: row["arm"] == "scatter" and strength(row) == "clear",
        "scatter 5 %, told 5 %": lambda row: row["arm"] == "told" and strength(row) == "clear",
        "nothing planted": lambda row: row["arm"] == "none",
    }
    table("beyond the rule (suggested triples, clear faults)", rows, others)
    say("\ncalibration: probability said, named rightly")
    for low, high in BINS:
        mine = [
            row
            for row in rows
            if row["arm"] in ("random", "suggested")
            and row["named"]
            and low <= float(row["probability"]) < high
        ]
        right = sum(row["named"] == row["constant"] for row in mine)
        share = f"{right / len(mine):.0%}" if mine else "-"
        say(f"| {low:.2f} to {min(high, 1.0):.2f} | {len(mine)} | {share} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
