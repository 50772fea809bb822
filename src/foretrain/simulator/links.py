"""The links of each rank that a transfer uses, and how much of them it fills.

    bottleneck   scale-up, PCIe or NICs, as the price says     full, half by one pair of ranks
    out, in      the link between device and node              seconds it needs / seconds taken

A copy to the host and a collective that crosses the PCIe slot of the device meet on out and in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foretrain.simulator.segment_play import EventTimes

#: Share of the NICs of a rank that a transfer fills: one pair reaches about half a 400G NIC
#: (10 x 1 H100, nccl-tests: 24.9 of 50 GB/s); a collective fills them.
PAIR_SHARE = 0.5


@dataclass(slots=True)
class Links:
    """Numbers of links, given as they are met."""

    times: EventTimes
    known: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])

    def uses(self, rank: int, category: str, event: int) -> tuple[tuple[int, float], ...]:
        """Returns the links of a rank that a transfer uses, each with the fraction it fills."""
        times = self.times
        link = times.link[event]
        found: list[tuple[int, float]] = []
        if link:
            found.append((self._link(rank, link), PAIR_SHARE if category == "pp" else 1.0))
        moving = times.value[event] - times.latency[event]
        if moving > 0.0:
            for name, seconds in zip(("out", "in"), times.crossing.get(event, ()), strict=False):
                if seconds > 0.0:
                    found.append((self._link(rank, name), min(1.0, seconds / moving)))
        return tuple(found)

    def _link(self, rank: int, name: str) -> int:
        return self.known.setdefault((rank, name), len(self.known))
