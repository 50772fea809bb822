"""Factors on the constants of the cost model, applied to prices: what if one of them were off?

Each constant stands for a whole family: the efficiency of every operator, the bandwidth of the
links inside a node (NVLink, XGMI, PCIe), that of the NICs, the time of the host per launch. Only
the part of a price that the constant decides is scaled: kernel floors and message latencies stay.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from foretrain.cost.prices import Prices

#: Links of `Prices.link` that the factor `scaleup` scales.
INNER_LINKS = ("scaleup", "pcie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Factors; 1 leaves a constant as it is.

    `compute` multiplies the efficiency of operators, `scaleup` and `nic` the bandwidth of the links
    inside a node and between nodes (above 1 is faster), `host` the time of a launch (above 1 is
    slower).
    """

    compute: float = 1.0
    scaleup: float = 1.0
    nic: float = 1.0
    host: float = 1.0

    def words(self) -> tuple[str, ...]:
        """Returns one phrase per factor that is not 1, e.g. 'nic x 0.8'."""
        factors = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(f"{name} x {factor:.4g}" for name, factor in factors if factor != 1.0)


def adjust_prices(prices: Prices, adjustments: Adjustments) -> Prices:
    """Returns the prices with other constants; the same object where all factors are 1."""
    if not adjustments.words():
        return prices
    rate = np.array([_rate(link, adjustments) for link in prices.link])
    value = prices.latency_s + (prices.value_s - prices.latency_s) / rate
    ratio = np.divide(value, prices.value_s, out=np.ones_like(value), where=prices.value_s > 0.0)
    return replace(
        prices,
        value_s=value,
        low_s=prices.low_s * ratio,
        high_s=prices.high_s * ratio,
        host_s=prices.host_s * adjustments.host,
    )


def _rate(link: str, adjustments: Adjustments) -> float:
    if link == "nic":
        return adjustments.nic
    if link in INNER_LINKS:
        return adjustments.scaleup
    return adjustments.compute
