"""What measured steps imply, in words: the verdict, one row per constant, the next measurement."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import exp, expm1
from typing import Any

from foretrain.analysis.fit import DECISIVE, NOISE, Fit
from foretrain.analysis.fit_search import Explanation, Measured
from foretrain.analysis.fit_separate import Separation
from foretrain.report.tables import table
from foretrain.report.words import percent
from foretrain.units import format_seconds

WIDTH = 100

#: What a constant is called; "host" is a cost, the others are rates.
NAMES: Mapping[str, str] = {
    "compute": "efficiency of operators",
    "scaleup": "bandwidth inside a node",
    "nic": "bandwidth of the NICs",
    "host": "host time per launch",
}

#: How each is measured on its own.
DIRECT: Mapping[str, str] = {
    "compute": "time the matrix products of the model alone on one GPU",
    "scaleup": "run nccl-tests (all_reduce_perf) on the GPUs of one node",
    "nic": "run nccl-tests (all_reduce_perf) over two nodes",
    "host": "trace one step and add up the gaps between kernels",
}


def render_fit(fit: Fit, separation: Separation | None = None) -> str:
    """Returns the fit as plain text; its first line is the verdict in words."""
    sections = [
        textwrap.wrap(verdict_words(fit), WIDTH),
        _run_lines(fit),
        _constant_lines(fit),
        _next_lines(fit, separation),
        textwrap.wrap(
            f"Measured steps are taken to vary by {percent(NOISE)}; a prior is the 90 % band of "
            "the cost model for that constant. One constant is varied at a time.",
            WIDTH,
        ),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def verdict_words(fit: Fit) -> str:
    """Returns the verdict in one or two sentences."""
    if fit.verdict == "agrees":
        return "Prediction and measurement agree within the noise of a measurement."
    if fit.verdict == "one run":
        able = sum(e.factor is not None for e in fit.explanations)
        gap = f"Measured {_gap(fit.runs[0])} than predicted. One run cannot name the cause"
        if not able:
            return f"{gap}, and no single constant of the cost model explains it."
        each = "this constant alone could" if able == 1 else f"each of {able} constants alone could"
        return f"{gap}: {each} explain it."
    if fit.named is not None:
        best = fit.of(fit.named)
        odds = ""
        others = [e for e in fit.explanations if e is not best and e.factor is not None]
        if others:
            second = min(others, key=lambda e: e.score)
            odds = f", {_odds(second.score - best.score)} against {NAMES[second.constant]}"
        return (
            f"The {NAMES[fit.named]} explains the runs: {factor_words(best)} of what the cost "
            f"model says ({best.plausibility} under its prior{odds})."
        )
    if fit.verdict == "tied":
        names = _joined([f"the {NAMES[name]}" for name in fit.tied])
        return f"The runs cannot be told apart: {names} explain them about equally well."
    best = fit.explanations[0]
    text = "No single constant of the cost model explains the runs"
    if best.factor is None:
        return f"{text}."
    return (
        f"{text}; the closest is the {NAMES[best.constant]} ({factor_words(best)}), which leaves "
        f"{percent(expm1(best.misfit))} unexplained. More than one cause, or a plan that is "
        "not what was measured."
    )


def factor_words(explanation: Explanation) -> str:
    """Returns a factor with its own 90 % interval, e.g. 'x 0.72 (0.70 to 0.74)'."""
    factor, error = explanation.factor, explanation.error
    if factor is None:
        return "-"
    if error < 1.0005:
        return f"x {factor:.3g}"
    return f"x {factor:.3g} ({factor / error:.3g} to {factor * error:.3g})"


def _gap(run: Measured) -> str:
    word = "slower" if run.log_gap > 0 else "faster"
    times = exp(abs(run.log_gap))
    if times > 2.0:
        return f"{times:.1f} times {word}"
    return f"{percent(abs(exp(run.log_gap) - 1.0))} {word}"


def _odds(difference: float) -> str:
    odds = exp(min(difference, 20.0) / 2.0)
    return f"odds {odds:,.0f} to 1" if odds < 1000 else "odds over 1,000 to 1"


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _run_lines(fit: Fit) -> list[str]:
    shown = [e for e in fit.explanations if e.factor is not None] if len(fit.runs) > 1 else []
    head = ["run", "measured", "predicted", "gap", *(f"with {e.constant}" for e in shown)]
    rows = [
        [
            run.name,
            format_seconds(run.step_s),
            format_seconds(run.model.base_s),
            _gap(run),
            *(format_seconds(e.steps_s[i]) for e in shown),
        ]
        for i, run in enumerate(fit.runs)
    ]
    return ["Step time", *table([head, *rows])]


def _constant_lines(fit: Fit) -> list[str]:
    if fit.verdict == "agrees":
        return []
    rows: list[list[str]] = [["", "alone it would be", "prior (90 %)", "", ""]]
    several = len(fit.runs) > 1
    if several:
        rows[0][4] = "left over"
    for e in fit.explanations:
        prior = f"x {1 / e.prior:.2f} to {e.prior:.2f}" if e.prior > 1 else "-"
        name = f"{NAMES[e.constant]} ({e.constant})"
        if e.factor is None:
            rows.append([name, "no value does", prior, e.reason])
            continue
        left = percent(expm1(e.misfit)) if several else ""
        rows.append([name, factor_words(e), prior, e.plausibility, left])
    return ["What each constant would have to be", *table(rows, left=(0, 1, 2, 3))]


def _next_lines(fit: Fit, separation: Separation | None) -> list[str]:
    if fit.verdict not in ("one run", "tied"):
        return []
    names = fit.tied or tuple(e.constant for e in fit.explanations if e.factor is not None)
    if not names:
        return []
    lines = ["What would tell them apart" if len(names) > 1 else "What would confirm it"]
    if separation is not None:
        steps = ", ".join(
            f"{format_seconds(s)} if it is {name}" for name, s in separation.steps_s.items()
        )
        lines += _bullet(f"measure {separation.name} with {separation.title}: {steps}")
    elif len(names) > 1:
        lines += _bullet("no single change of the plan that fits would: measure directly")
    for name in names:
        lines += _bullet(f"{name}: {DIRECT[name]}")
    return lines


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def fit_json(fit: Fit, separation: Separation | None = None) -> dict[str, Any]:
    """Returns the fit as JSON values, schema 1 (docs/reference/json.md)."""
    return {
        "schema": 1,
        "verdict": fit.verdict.replace(" ", "_"),
        "named": fit.named,
        "tied": list(fit.tied),
        "noise": NOISE,
        "decisive_score": DECISIVE,
        "runs": [
            {"run": run.name, "measured_s": run.step_s, "predicted_s": run.model.base_s}
            for run in fit.runs
        ],
        "constants": [_constant_json(e) for e in fit.explanations],
        "separate": None
        if separation is None
        else {
            "run": separation.name,
            "title": separation.title,
            "set": dict(separation.changes),
            "step_time_s": dict(separation.steps_s),
        },
    }


def _constant_json(e: Explanation) -> dict[str, Any]:
    if e.factor is None:
        return {"constant": e.constant, "factor": None, "reason": e.reason}
    return {
        "constant": e.constant,
        "factor": e.factor,
        "low": e.factor / e.error,
        "high": e.factor * e.error,
        "prior_factor": e.prior,
        "plausibility": e.plausibility,
        "step_time_s": list(e.steps_s),
        "misfit": e.misfit,
        "score": e.score,
    }
