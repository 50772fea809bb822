"""What measured steps imply, in words: the verdict, one row per constant, the next measurement."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from math import exp, expm1

from foretrain.analysis.fit import MOST_SCATTER, Fit
from foretrain.analysis.fit_posterior import NOTHING, SOMETHING_ELSE
from foretrain.analysis.fit_search import Explanation, Measured
from foretrain.analysis.fit_separate import Separation
from foretrain.report.tables import table
from foretrain.report.words import percent
from foretrain.units import format_seconds

WIDTH = 100

#: What a cause is called; "host" is a cost, the other constants are rates.
NAMES: Mapping[str, str] = {
    "compute": "efficiency of operators",
    "scaleup": "bandwidth inside a node",
    "nic": "bandwidth of the NICs",
    "host": "host time per launch",
    NOTHING: "noise alone",
    SOMETHING_ELSE: "something else",
}

#: How each is measured on its own.
DIRECT: Mapping[str, str] = {
    "compute": "time the matrix products of the model alone on one GPU",
    "scaleup": "run nccl-tests (all_reduce_perf) on the GPUs of one node",
    "nic": "run nccl-tests (all_reduce_perf) over two nodes",
    "host": "trace one step and add up the gaps between kernels",
}

#: Standard deviation of ln(predicted / measured) between plans of one job: the median of 28 groups
#: of 8 families of published runs is 0.116, of families 0.103 (studies/fit/plan_scatter.py).
PLAN_SCATTER = 0.1
#: Causes less probable than this are not spoken of.
SPOKEN = 0.05


def render_fit(fit: Fit, separation: Separation | None = None) -> str:
    """Returns the fit as plain text; its first line is the verdict in words."""
    sections = [
        textwrap.wrap(verdict_words(fit), WIDTH),
        _run_lines(fit),
        _constant_lines(fit),
        _next_lines(fit, separation),
        textwrap.wrap(_fine_print(fit), WIDTH),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def verdict_words(fit: Fit) -> str:
    """Returns the verdict in one or two sentences."""
    if fit.verdict == "agrees":
        return "Prediction and measurement agree within the noise of a measurement."
    if fit.verdict == "one run":
        return _single_words(fit)
    if fit.named is not None:
        best = fit.of(fit.named)
        rest = _chances(fit, [c for c in fit.probability if c != fit.named])
        return (
            f"The {NAMES[fit.named]} explains the runs: {factor_words(best)} of what the cost "
            f"model says (probability {_share(fit.probability[fit.named])}; the value is "
            f"{best.plausibility} for this constant)." + (f" Left: {rest}." if rest else "")
        )
    if fit.verdict == "tied":
        return (
            f"The runs cannot tell what is off. Most likely it is the {NAMES[fit.tied[0]]} "
            f"({_share(fit.probability[fit.tied[0]])}), but not ruled out: "
            f"{_chances(fit, [c for c in fit.probability if c != fit.tied[0]])}."
        )
    best = fit.explanations[0]
    text = "No single constant of the cost model explains the runs"
    if best.factor is None:
        return f"{text}."
    return (
        f"{text}; the closest is the {NAMES[best.constant]} ({factor_words(best)}), which leaves "
        f"{percent(expm1(best.misfit))} unexplained. More than one cause, a plan that is not what "
        f"was measured, or runs that scatter by more than {percent(fit.noise)} (--noise)."
    )


def factor_words(explanation: Explanation) -> str:
    """Returns a factor with its own 90 % interval, e.g. 'x 0.72 (0.70 to 0.74)'."""
    factor = explanation.factor
    if factor is None:
        return "-"
    if explanation.high < 1.001 * explanation.low:
        return f"x {factor:.3g}"
    return f"x {factor:.3g} ({explanation.low:.3g} to {explanation.high:.3g})"


def _single_words(fit: Fit) -> str:
    able = sum(e.factor is not None for e in fit.explanations)
    gap = f"Measured {_gap(fit.runs[0])} than predicted. One run cannot name the cause"
    if not able:
        return f"{gap}, and no single constant of the cost model explains it."
    each = "this constant alone could" if able == 1 else f"each of {able} constants alone could"
    return f"{gap}: {each} explain it."


def _chances(fit: Fit, causes: Sequence[str]) -> str:
    ranked = sorted(causes, key=lambda c: -fit.probability[c])
    spoken = [c for c in ranked if fit.probability[c] >= SPOKEN]
    spoken = spoken or (ranked[:1] if fit.verdict == "tied" else [])
    return ", ".join(f"{NAMES[c]} {_share(fit.probability[c])}" for c in spoken)


def _share(probability: float) -> str:
    if probability > 0.995:
        return "over 99 %"
    return f"{100 * probability:.0f} %" if probability >= 0.01 else "under 1 %"


def _gap(run: Measured) -> str:
    word = "slower" if run.log_gap > 0 else "faster"
    times = exp(abs(run.log_gap))
    if times > 2.0:
        return f"{times:.1f} times {word}"
    return f"{percent(abs(exp(run.log_gap) - 1.0))} {word}"


def _fine_print(fit: Fit) -> str:
    text = (
        f"Steps are taken to scatter by {percent(fit.noise)} around a right prediction (--noise). "
        "The 90 % band is how well the cost model knows a constant. One constant is varied at a "
        "time."
    )
    if fit.holds_to is None:
        return text
    more = "or more" if fit.holds_to >= MOST_SCATTER else "and no more"
    return (
        f"{text} The name holds for a scatter of {percent(fit.holds_to)} {more}; against published "
        f"runs, predictions for plans of one job scatter by about {percent(PLAN_SCATTER)}."
    )


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
    several = len(fit.runs) > 1
    more = ["left over", "probability"] if several else []
    rows: list[list[str]] = [["", "alone it would be", "90 % band", "", *more]]
    for e in fit.explanations:
        band = f"x {1 / e.band:.2f} to {e.band:.2f}" if e.band > 1 else "-"
        name = f"{NAMES[e.constant]} ({e.constant})"
        if e.factor is None:
            rows.append([name, "no value does", band, e.reason])
            continue
        row = [name, factor_words(e), band, e.plausibility]
        if several:
            row += [percent(expm1(e.misfit)), _share(fit.probability[e.constant])]
        rows.append(row)
    rows += [
        [NAMES[cause], "", "", "", "", _share(fit.probability[cause])]
        for cause in (NOTHING, SOMETHING_ELSE)
        if cause in fit.probability
    ]
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
        settings = " ".join(f"--set {word}" for word in separation.plan.title.split())
        lines += _bullet(f"measure {separation.name} with {settings}: {steps}")
    elif len(names) > 1:
        lines += _bullet("no other plan of this job that fits in memory would: measure directly")
    for name in names:
        lines += _bullet(f"{name}: {DIRECT[name]}")
    return lines


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
