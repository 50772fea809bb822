"""Why a number is what it is: the object of every stage as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from foretrain.analysis.events import EventShare, event_shares
from foretrain.errors import InputError, Problem
from foretrain.graph.text import graph_text
from foretrain.predict import alive_by_module, compile_run, predict
from foretrain.program import RankClass
from foretrain.report.patterns import matches
from foretrain.report.program_text import event_text, program_text
from foretrain.report.tables import parts_table, table
from foretrain.report.words import gib, moment_words, place, ranks_text, verdict
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import ClassResult, Result
from foretrain.strategy.text import tree_text
from foretrain.units import GIB, format_seconds

STAGES = ("graph", "plan", "program", "cost", "memory")


def explain(run: RunSpec, stage: str, what: str | None = None) -> str:
    """Returns the text form of one stage of a run: graph, plan, program, cost or memory.

    `what` keeps a part: a rank class ("stage 1"; program, memory), or a pattern of names
    ("layers.*.mlp"; graph, program, cost). `plan` is YAML that reads back to the same plan.

    Raises:
        InputError: the stage is unknown, or `what` names nothing in it.
    """
    if stage == "graph":
        return graph_part(graph_text(compile_run(run).graph), what)
    if stage == "plan":
        # the preset beside the tree keeps what it decides elsewhere: stack, precision, padding
        pages = run.plan.expandable_segments
        more = "" if pages is None else f"expandable_segments: {str(pages).lower()}\n"
        return f"preset: {run.plan.preset}\n{more}{tree_text(compile_run(run).tree)}"
    if stage == "program":
        return program_text(compile_run(run).program, what)
    if stage == "cost":
        return cost_text(predict(run), what)
    if stage == "memory":
        return memory_text(predict(run), run, what, alive_by_module(run))
    allowed = ", ".join(STAGES)
    raise InputError(Problem(what="unknown stage", where="--stage", value=stage, allowed=allowed))


def graph_part(text: str, what: str | None) -> str:
    """Returns the lines of a graph's text that `what` names, each with the lines below it."""
    if what is None:
        return text
    kept: list[str] = []
    keep_deeper_than: int | None = None
    block = ""
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        words = line.split()
        if keep_deeper_than is not None and depth > keep_deeper_than:
            kept.append(line)
            continue
        keep_deeper_than = None
        if len(words) < 2:
            continue
        name = words[1].rstrip(":")
        block = name if words[0] == "block" else block
        if matches(name, what) or matches(name, what, path=f"{block}.*"):
            kept.append(line)
            keep_deeper_than = depth
    if not kept:
        raise _nothing("graph", what, [])
    return "\n".join(kept) + "\n"


def cost_text(result: Result, what: str | None = None) -> str:
    """Returns every unique event with its price, band, count, share, formula and provenance."""
    shares = event_shares(result)
    kept = [row for row in shares if what is None or matches(row.cost.label, what)]
    if not kept:
        raise _nothing("cost", what, [row.cost.label for row in shares[:5]])
    total = sum(row.total_s for row in shares)
    lines = [
        f"{len(kept)} of {len(shares)} distinct events; % of the summed event time "
        f"({format_seconds(total)} over one rank of every class)",
        "",
    ]
    for row in kept:
        lines += [*_event_lines(row), ""]
    guessed = [row for row in kept if row.cost.provenance == "guess"]
    if guessed:
        lines.append(f"Guessed constants ({100 * sum(r.share for r in guessed):.1f} %):")
        lines += [f"  {row.cost.label}" for row in guessed]
    if result.warnings:
        lines += ["Warnings:", *(f"  {warning}" for warning in result.warnings)]
    notes = result.program.notes
    lines += ["Notes of the compiler:", *(f"  {note}" for note in notes)] if notes else []
    return "\n".join(lines).rstrip() + "\n"


def _event_lines(row: EventShare) -> list[str]:
    cost = row.cost
    low, high = format_seconds(cost.low_s), format_seconds(cost.high_s)
    why = textwrap.wrap(
        cost.formula or "no formula", 100, initial_indent="    = ", subsequent_indent="      "
    )
    return [
        f"{cost.label}: {format_seconds(cost.value_s)} (90 % band {low} to {high}) "
        f"x {cost.count:,} = {format_seconds(row.total_s)}, {100 * row.share:.2f} %, "
        f"{cost.provenance}",
        f"    {event_text(cost.event)}",
        *why,
    ]


def memory_text(
    result: Result,
    run: RunSpec,
    what: str | None = None,
    modules: Sequence[Mapping[str, float]] = (),
) -> str:
    """Returns what lives at the peak of every rank class, by part and module, and when that is."""
    memory = result.memory
    classes = [c for c in result.classes if what is None or matches(c.name, what)]
    if not classes:
        raise _nothing("memory", what, [c.name for c in result.classes])
    lines = [
        verdict(result, run),
        "",
        f"Device memory of the fullest GPU: {place(result, memory.worst_rank)}, "
        f"peak in {moment_words(result)}",
        *parts_table(
            [(name, value / GIB) for name, value in memory.parts_bytes.items()],
            unit="GiB",
            total_name="device used",
            decimals=2,
        ),
    ]
    held = {c.name: c for c in result.program.classes}
    for rank_class in classes:
        lines += ["", *_class_memory(rank_class, held.get(rank_class.name))]
        for alive in modules[result.classes.index(rank_class) :][:1]:
            rows = sorted(((n, v / GIB) for n, v in alive.items()), key=lambda row: -row[1])
            lines += [
                "  the same by module:",
                *parts_table(rows, unit="GiB", total_name="live", decimals=2),
            ]
    return "\n".join(lines) + "\n"


def _class_memory(rank_class: ClassResult, program_class: RankClass | None) -> list[str]:
    ranks = ranks_text(rank_class.ranks)
    parts = [(name, value / GIB) for name, value in rank_class.peak_parts_bytes.items()]
    lines = [
        f"{rank_class.name} ({ranks}): live tensors at the peak, {rank_class.moment}",
        *parts_table(parts, unit="GiB", total_name="live", decimals=2),
    ]
    if program_class is not None and program_class.persistent:
        rows = [(name, gib(value)) for name, value in program_class.persistent.items()]
        lines += ["  of that all step long:", *table(rows, indent="    ")]
    return lines


def _nothing(stage: str, what: str | None, examples: Sequence[str]) -> InputError:
    way_out = f"names look like {', '.join(repr(name) for name in examples)}" if examples else ""
    text = f"nothing in the {stage} has this name or pattern"
    return InputError(Problem(what=text, where="WHAT", value=what, way_out=way_out))
