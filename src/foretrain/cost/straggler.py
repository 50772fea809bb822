"""The slowest of many devices: a synchronous step waits for it.

If the speeds of equal devices scatter by sigma, the slowest of n is E[max of n normals] sigma
behind the mean: 1.4 sigma among 8, 2.3 among 64, 3.0 among 512. Explained in
docs/explain/network.md.
"""

from __future__ import annotations

from statistics import NormalDist

from foretrain.cost.calibration import load


def slowest_of(devices: int) -> float:
    """Returns the expected maximum of `devices` standard normal numbers (Blom 1958), 0 for one."""
    if devices <= 1:
        return 0.0
    return NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def straggler_factor(devices: int) -> float:
    """Returns how much longer computation takes when a step waits for the slowest device."""
    return 1.0 + float(load("step")["straggler_sigma"]) * slowest_of(devices)
