"""Fits and suggestions as JSON values, schema 1 (docs/reference/json.md)."""

from __future__ import annotations

from typing import Any

from foretrain.analysis.fit import NAMED, Fit
from foretrain.analysis.fit_search import Explanation
from foretrain.analysis.fit_separate import Separation
from foretrain.analysis.fit_suggest import Suggestion


def fit_json(fit: Fit, separation: Separation | None = None) -> dict[str, Any]:
    """Returns the fit as JSON values, schema 1."""
    return {
        "schema": 1,
        "verdict": fit.verdict.replace(" ", "_"),
        "named": fit.named,
        "tied": list(fit.tied),
        "noise": fit.noise,
        "named_from": NAMED,
        "holds_to_noise": fit.holds_to,
        "probability": dict(fit.probability),
        "runs": [
            {"run": run.name, "measured_s": run.step_s, "predicted_s": run.model.base_s}
            for run in fit.runs
        ],
        "constants": [_constant_json(e) for e in fit.explanations],
        "separate": None
        if separation is None
        else {
            "run": separation.name,
            "set": dict(separation.plan.changes),
            "step_time_s": dict(separation.steps_s),
        },
    }


def suggestion_json(suggestion: Suggestion, run: str) -> dict[str, Any]:
    """Returns the suggested plans as JSON values, schema 1."""
    return {
        "schema": 1,
        "run": run,
        "noise": suggestion.noise,
        "plans": [
            {"set": dict(plan.changes), "step_time_s": step}
            for plan, step in zip(suggestion.plans, suggestion.steps_s, strict=True)
        ],
        "named_share": dict(suggestion.named),
    }


def _constant_json(e: Explanation) -> dict[str, Any]:
    if e.factor is None:
        return {"constant": e.constant, "factor": None, "reason": e.reason}
    return {
        "constant": e.constant,
        "factor": e.factor,
        "low": e.low,
        "high": e.high,
        "band": e.band,
        "plausibility": e.plausibility,
        "step_time_s": list(e.steps_s),
        "misfit": e.misfit,
    }
