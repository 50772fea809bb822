"""Max-min fair sharing of links among the transfers that are active at one time.

Progressive filling: raise the rate of all transfers together until a link is full; the transfers
on it keep that rate; go on with the others until all are fixed or run at rate 1. On every link
sum(rate x fraction) <= 1. Only the connected component of links around a transfer that came or
went is solved again: the others cannot change.
"""

from __future__ import annotations

from collections.abc import Sequence

Uses = tuple[tuple[int, float], ...]

#: A rate this close to 1 is 1: sums of fractions such as 10 x 0.1 are off by rounding.
ROUNDING = 1e-12


def fair_rates(flows: Sequence[Uses]) -> list[float]:
    """Returns the max-min fair rate (at most 1) of each flow, given (link, fraction) pairs.

    `fraction` is the part of the link's capacity that the flow fills at rate 1.
    """
    free: dict[int, float] = {}
    users: dict[int, dict[int, float]] = {}  # per link the flows that are not fixed yet
    for flow, uses in enumerate(flows):
        for link, fraction in uses:
            free[link] = 1.0
            users.setdefault(link, {})[flow] = fraction
    rates = [1.0] * len(flows)
    level = 0.0
    while users:
        rate, link = min((free[link] / sum(on.values()), link) for link, on in users.items())
        if rate >= 1.0 - ROUNDING:
            break
        level = max(level, rate)  # rates never fall from round to round, but rounding may
        for flow in list(users[link]):
            rates[flow] = level
            for other, fraction in flows[flow]:
                free[other] = max(0.0, free[other] - level * fraction)
                del users[other][flow]
                if not users[other]:
                    del users[other]
    return rates


class LinkShares:
    """The active transfers and their shares; `share[task]` is up to date after `settle`.

    `changed` holds the links whose transfers must be solved again; empty: nothing to settle.
    """

    __slots__ = ("_active", "_uses", "changed", "share")

    def __init__(self, uses: Sequence[Uses]) -> None:
        self._uses = uses
        self._active: dict[int, dict[int, None]] = {}
        self.changed: dict[int, None] = {}
        self.share: list[float] = [1.0] * len(uses)

    def join(self, task: int) -> None:
        """Returns nothing; `task` begins to move bytes, alone at rate 1 until settled."""
        self.share[task] = 1.0
        for link, _ in self._uses[task]:
            on = self._active.setdefault(link, {})
            on[task] = None
            if len(on) > 1:
                self.changed[link] = None

    def leave(self, task: int) -> None:
        """Returns nothing; `task` has moved all its bytes."""
        for link, _ in self._uses[task]:
            on = self._active[link]
            del on[task]
            if on:
                self.changed[link] = None

    def settle(self) -> list[int]:
        """Returns the tasks whose share is not what it was."""
        different: list[int] = []
        seen: dict[int, None] = {}
        for link in self.changed:
            if link in seen:
                continue
            tasks = sorted(self._component(link, seen))
            rates = fair_rates([self._uses[task] for task in tasks])
            for task, rate in zip(tasks, rates, strict=True):
                if rate != self.share[task]:
                    self.share[task] = rate
                    different.append(task)
        self.changed.clear()
        return different

    def _component(self, link: int, seen: dict[int, None]) -> dict[int, None]:
        """Returns the tasks that share links, directly or through others; marks links as seen."""
        tasks: dict[int, None] = {}
        seen[link] = None
        border = [link]
        while border:
            for task in self._active[border.pop()]:
                if task in tasks:
                    continue
                tasks[task] = None
                for other, _ in self._uses[task]:
                    if other not in seen:
                        seen[other] = None
                        border.append(other)
        return tasks
