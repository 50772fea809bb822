"""The plans worth measuring before anything is off, in words."""

from __future__ import annotations

import textwrap

from foretrain.analysis.fit_response import CONSTANTS
from foretrain.analysis.fit_suggest import Suggestion
from foretrain.report.fit_text import DIRECT, NAMES, WIDTH
from foretrain.report.tables import table
from foretrain.report.words import percent
from foretrain.units import format_seconds

#: From this share of faults on a constant counts as recognised, and below the other as hidden.
MOSTLY, HARDLY = 0.9, 0.25


def render_suggestion(suggestion: Suggestion, run: str) -> str:
    """Returns the suggested plans as plain text; its first lines say what they can tell."""
    plans = [["", "plan", "predicted"]]
    for i, (plan, step) in enumerate(zip(suggestion.plans, suggestion.steps_s, strict=True), 1):
        settings = " ".join(f"--set {word}" for word in plan.title.split())
        plans.append([str(i), settings or "as given", format_seconds(step)])
    shares = [["if this is off by 20 to 50 %", "it is named in"]]
    for constant in CONSTANTS:
        share = suggestion.named.get(constant)
        words = "no plan uses it" if share is None else f"{100 * share:.0f} % of cases"
        shares.append([f"{NAMES[constant]} ({constant})", words])
    sections = [
        textwrap.wrap(_verdict(suggestion, run), WIDTH),
        ["Plans to measure", *table(plans, left=(0, 1)), *_shorter(suggestion)],
        ["What foretrain fit would make of them", *table(shares, left=(0, 1))],
        _hidden(suggestion),
        textwrap.wrap(
            f"Of {suggestion.tried} plans of this model, batch and cluster. Shares are of "
            f"simulated measurements that scatter by {percent(suggestion.noise)} (--noise).",
            WIDTH,
        ),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _verdict(suggestion: Suggestion, run: str) -> str:
    good = [c for c in CONSTANTS if suggestion.named.get(c, 0.0) >= MOSTLY]
    if not good:
        return f"No three plans of {run} tell the constants of the cost model apart well."
    names = ", ".join(NAMES[c] for c in good)
    text = f"Three plans of {run} that tell apart what could be off: {names}"
    less = [c for c in CONSTANTS if HARDLY <= suggestion.named.get(c, 0.0) < MOSTLY]
    if less:
        text += f"; less surely: {', '.join(NAMES[c] for c in less)}"
    return f"{text}."


def _shorter(suggestion: Suggestion) -> list[str]:
    """Says why a plan has another sequence."""
    if not any("training.sequence" in plan.changes for plan in suggestion.plans):
        return []
    text = (
        "One has a shorter sequence: no plan of the whole sequence shows all constants. It serves "
        "to measure the cluster, its tokens/s mean nothing."
    )
    return ["", *textwrap.wrap(text, WIDTH)]


def _hidden(suggestion: Suggestion) -> list[str]:
    hidden = [c for c in CONSTANTS if suggestion.named.get(c, 1.0) < HARDLY]
    if not hidden:
        return []
    lines = ["What no plan of this job shows, because it hardly changes the step"]
    for constant in hidden:
        text = f"{constant}: {DIRECT[constant]}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return lines
