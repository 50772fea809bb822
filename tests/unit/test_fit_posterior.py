"""The probabilities of causes against integrals worked out by hand."""

from __future__ import annotations

from math import exp, log, pi, sqrt

import numpy as np
import pytest

from foretrain.analysis.fit import judge
from foretrain.analysis.fit_posterior import (
    ELSE,
    GRID,
    LOG_PRIOR,
    NOTHING,
    SOMETHING_ELSE,
    USUAL_FAULT,
    log_density,
    probabilities,
    quantiles,
)


def curve(gaps: list[float], slopes: list[float]) -> np.ndarray:
    """Misses of runs whose ln(step) is linear in the log time factor."""
    return np.array([slope * GRID - gap for gap, slope in zip(gaps, slopes, strict=True)])


def normal(value: float, sigma: float) -> float:
    return exp(-0.5 * (value / sigma) ** 2) / (sigma * sqrt(2 * pi))


def test_the_prior_is_a_distribution():
    step = GRID[1] - GRID[0]
    weight = np.exp(LOG_PRIOR) * step
    assert weight.sum() == pytest.approx(1.0)
    usual = weight[np.abs(GRID) < log(USUAL_FAULT)].sum()
    assert 0.75 < usual < 0.9  # nine of ten for a normal distribution, heavier tails here


def test_the_evidence_is_the_gaussian_integral():
    """A narrow likelihood: the integral is prior(u) x the integral over the normal in u."""
    noise, gaps, slopes = 0.02, [0.30, 0.12], [1.0, 0.4]
    found = probabilities({"nic": curve(gaps, slopes)}, gaps, noise)
    prior = float(np.exp(np.interp(0.3, GRID, LOG_PRIOR)))
    width = noise / sqrt(sum(slope**2 for slope in slopes))
    nic = prior * width * sqrt(2 * pi) / (2 * pi * noise**2)
    nothing = normal(0.30, noise) * normal(0.12, noise)
    spread = sqrt(noise**2 + ELSE**2)
    other = normal(0.30, spread) * normal(0.12, spread)
    total = nic + nothing + other
    assert found["nic"] == pytest.approx(nic / total, rel=0.01)
    assert found[SOMETHING_ELSE] == pytest.approx(other / total, rel=0.01)
    assert sum(found.values()) == pytest.approx(1.0)


def test_equal_evidence_is_equal_probability_at_any_slope():
    """What is common to all runs cannot tell a strong constant from a weak one by much."""
    gaps = [0.1, 0.1, 0.1]
    strong, weak = curve(gaps, [1.0] * 3), curve(gaps, [0.5] * 3)
    found = probabilities({"compute": strong, "scaleup": weak}, gaps, 0.02)
    assert 0.4 < found["compute"] / found["scaleup"] < 2.5
    assert judge(found)[0] == "tied"


def test_ratios_between_runs_decide():
    gaps = [0.20, 0.05, 0.0]
    found = probabilities(
        {"nic": curve(gaps, [0.8, 0.2, 0.0]), "compute": curve(gaps, [0.3, 0.6, 0.9])}, gaps, 0.02
    )
    assert judge(found) == ("named", "nic", ())


def test_more_scatter_makes_names_less_sure():
    gaps = [0.20, 0.05, 0.0]
    curves = {"nic": curve(gaps, [0.8, 0.2, 0.0]), "host": curve(gaps, [0.5, 0.4, 0.3])}
    shares = [probabilities(curves, gaps, noise)["nic"] for noise in (0.01, 0.02, 0.05, 0.1)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.95 > shares[-1]


def test_no_gap_needs_no_cause():
    gaps = [0.01, -0.02, 0.015]
    found = probabilities({"nic": curve(gaps, [0.8, 0.2, 0.0])}, gaps, 0.02)
    assert found[NOTHING] == max(found.values())
    assert judge(found)[0] == "agrees"


def test_contradicting_gaps_are_something_else():
    gaps = [0.4, -0.4, 0.4]
    found = probabilities({"nic": curve(gaps, [0.8, 0.2, 0.5])}, gaps, 0.02)
    assert judge(found)[0] == "none"


def test_quantiles_of_a_normal():
    low, middle, high = quantiles(log_density(curve([0.3], [1.0]), 0.02), (0.05, 0.5, 0.95))
    assert middle == pytest.approx(0.3, abs=0.005)
    assert high - low == pytest.approx(2 * 1.645 * 0.02, rel=0.05)
