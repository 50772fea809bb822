"""How the predicted step answers to one constant of the cost model.

A run is compiled and priced once; only the adjusted prices are simulated again. With x the time
factor of a constant (1 / efficiency, 1 / bandwidth, host cost) the step is a longest path, so it
grows with x and is close to piecewise linear in it: between the simulated points a straight line
in x serves, and the searches of fit.py add points where they need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from foretrain.cost.adjust import INNER_LINKS, Adjustments, adjust_prices
from foretrain.cost.answer import width
from foretrain.cost.model import build_cost_model
from foretrain.cost.prices import Prices
from foretrain.predict import CATEGORIES, collector_paused, compile_run
from foretrain.program import Comm, Program
from foretrain.run.spec import RunSpec
from foretrain.simulator.expand import SegmentTimes, expand_folded, quiet_runs
from foretrain.simulator.reference import play
from foretrain.simulator.simulate import event_times

#: The constants that may be off, by their name in Adjustments.
CONSTANTS = ("compute", "scaleup", "nic", "host")
#: No step is shorter than this share of the predicted one, however fast a constant.
LEAST = 0.01


def adjustment(constant: str, log_time: float) -> Adjustments:
    """Returns the factors when what `constant` decides takes exp(`log_time`) times as long."""
    return Adjustments(**{constant: factor_of(constant, log_time)})


def factor_of(constant: str, log_time: float) -> float:
    """Returns the factor on the constant itself: efficiency and bandwidth fall as time grows."""
    return exp(log_time) if constant == "host" else exp(-log_time)


def log_time_of(constant: str, factor: float) -> float:
    """Returns the log time factor of a factor on the constant itself, inverse of `factor_of`."""
    return log(factor) if constant == "host" else -log(factor)


class StepModel:
    """A run, compiled and priced once."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        with collector_paused():
            self.program: Program = compile_run(run).program
        model = build_cost_model(run.cluster, run.stack)
        self.prices: Prices = model.price(self.program.events)
        self._overlap = {name: model.overlap(name) for name in CATEGORIES}
        self._responses = {name: Response(model=self, constant=name) for name in CONSTANTS}

    def step_s(self, adjustments: Adjustments) -> float:
        """Returns the predicted step in seconds with other constants."""
        prices = adjust_prices(self.prices, adjustments)
        times = event_times(prices, self._overlap, plain=False)
        with collector_paused():
            expanded = expand_folded(self.program, times, SegmentTimes(self.program, times))
            return play(expanded.graph, fluid=True).makespan_s

    @cached_property
    def base_s(self) -> float:
        """Returns the predicted step in seconds."""
        return self.step_s(Adjustments())

    @property
    def short(self) -> RunSpec:
        """Returns a run that needs no more memory, as short as it may be."""
        return self.run

    @cached_property
    def num_tasks(self) -> int:
        """Returns about how many tasks one simulation plays."""
        return program_tasks(self.program)

    def event_counts(self) -> Mapping[int, float]:
        """Returns how often each event happens in a step, one rank of every class."""
        return self.program.event_counts()

    def response(self, constant: str) -> Response:
        """Returns how the step answers to a constant; its points are kept."""
        return self._responses[constant]

    def seconds_of(self, constant: str) -> float:
        """Returns the summed time of what a constant decides, one rank of every class."""
        seconds = self.prices.host_s if constant == "host" else self.prices.value_s
        counts = self.event_counts()
        return sum(counts.get(i, 0) * float(seconds[i]) for i in self._events(constant))

    def log_width(self, constant: str) -> float:
        """Returns the log half-width of the 90 % band of a constant, its prior.

        The bands of the events that share the constant, weighted with their time; they move
        together, so they do not average out. The host's is that of the stack's host costs.
        """
        if constant == "host":
            mark = self.run.stack.sources.get("host", "").partition(":")[0]
            return log(width(mark if mark in ("measured", "fitted") else "generation", "host"))
        counts, prices = self.event_counts(), self.prices
        total = weighted = 0.0
        for i in self._events(constant):
            value, high = float(prices.value_s[i]), float(prices.high_s[i])
            if value > 0.0:
                seconds = counts.get(i, 0) * value
                total += seconds
                weighted += seconds * log(high / value)
        return weighted / total if total else 0.0

    def _events(self, constant: str) -> list[int]:
        if constant == "host":
            return list(range(len(self.prices.link)))
        links = {"compute": ("",), "scaleup": INNER_LINKS, "nic": ("nic",)}[constant]
        return [i for i, link in enumerate(self.prices.link) if link in links]


class Response:
    """The step of one run over the log of the time factor of one constant."""

    def __init__(self, *, model: StepModel, constant: str) -> None:
        self._model, self._constant = model, constant
        self._known: dict[float, float] = {}

    @cached_property
    def works(self) -> bool:
        """Returns whether the constant decides anything in this run."""
        return self._model.seconds_of(self._constant) > 0.0

    def at(self, log_time: float) -> float:
        """Returns the simulated step in seconds, remembered."""
        if log_time == 0.0 or not self.works:
            return self._model.base_s
        if log_time not in self._known:
            self._known[log_time] = self._model.step_s(adjustment(self._constant, log_time))
        return self._known[log_time]

    def slope(self, log_time: float) -> float:
        """Returns d ln(step) / d ln(time factor) there, from the simulated points around it."""
        around = np.array([log_time - 0.05, log_time + 0.05])
        low, high = np.log(self.between(around))
        return float(high - low) / 0.1

    def gap(self, log_time: float) -> float:
        """Returns the distance to the nearest simulated point."""
        return min((abs(log_time - known) for known in (0.0, *self._known)), default=0.0)

    def between(self, log_times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the step in seconds, on straight lines between the simulated points and beyond.

        Below the first point the line is cut at zero work: a step never falls under `LEAST`.
        """
        knots = sorted({0.0: self._model.base_s, **self._known}.items())
        x = np.exp([point for point, _ in knots])
        y = np.array([seconds for _, seconds in knots])
        at = np.exp(log_times)
        found = np.interp(at, x, y)
        if len(x) > 1:
            first, last = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
            found += np.minimum(at - x[0], 0.0) * first + np.maximum(at - x[-1], 0.0) * last
        return np.maximum(found, LEAST * self._model.base_s)


def program_tasks(program: Program) -> int:
    """Returns about how many tasks a folded simulation of a program plays."""
    sizes = [len(segment.items) for segment in program.segments]
    total = 0
    for rank_class in program.classes:
        for entry, quiet in zip(rank_class.entries, quiet_runs(rank_class), strict=True):
            if quiet or isinstance(entry, Comm):
                total += 1
            else:
                total += 2 * sum(sizes[i] for i in entry.segments)
    return total
