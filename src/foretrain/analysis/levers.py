"""The levers: which single change of a run would help most.

Candidates are ordered by closed-form bounds (candidates.py) and the most promising are predicted,
as many as a fixed budget of work allows, so that a report costs about as much as two or three
predictions. Long steps are predicted with fewer micro-batches and continued in a straight line:
every further micro-batch adds what the busiest stage does for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretrain.analysis.candidate import Candidate
from foretrain.analysis.candidates import WHAT_IF, candidates, what_ifs
from foretrain.analysis.lever import Lever
from foretrain.errors import ForetrainError
from foretrain.predict import predict as predict_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import ClassResult, Result

NUM_LEVERS = 3
#: Gains below this share are within the noise of two runs of the same job.
LEAST_GAIN = 0.005
#: A lever for memory frees at least this share of what is used and costs at most this throughput.
LEAST_FREED = 0.03
LARGEST_LOSS = 0.2

#: Work of a prediction in units of one launch-list entry: a fixed part (compile, price), and what
#: it plays. The budget is about 1.5 s on one core of 2020; a count and no clock, so that the same
#: run always gets the same levers.
FIXED_WORK = 2_500
BUDGET = 34_000
RESERVE = 14_000  # kept for what-ifs and memory
#: Steps with more entries than this are shortened.
LONG_STEP = 1_500

Predict = Callable[[RunSpec], Result]


def find_levers(
    run: RunSpec, result: Result, *, predict: Predict = predict_run
) -> tuple[Lever, ...]:
    """Returns up to three changes of `run`, the most helpful first.

    Where the run fits: the largest gains in throughput among settings that still fit, then one
    what-if of the hardware; settings that only free memory where the upper end of its band may not
    fit. Where the run does not fit: settings that make it fit, fastest first, then those that come
    closest.
    """
    search = _Search.start(run, result, predict)
    options = candidates(run, result) if run.plan.tree is None else []
    if result.fits:
        gaining = sorted(_could_gain(options, result), key=lambda c: -c.saves_s)
        search.try_all(gaining, reserve=RESERVE)
        if len(_gaining(search.levers)) < NUM_LEVERS:
            wishes = _could_gain(what_ifs(run, result), result)
            search.try_all(sorted(wishes, key=lambda c: -c.saves_s))
        if len(_gaining(search.levers)) < NUM_LEVERS:
            freeing = [c for c in options if c.frees > LEAST_FREED]
            rest = sorted(freeing, key=lambda c: -c.frees) if _may_not_fit(result) else gaining
            search.try_all([c for c in rest if c not in search.tried])
    else:
        search.try_kinds([c for c in options if c.frees > 0])
    return _ranked(search.levers, result)


def _may_not_fit(result: Result) -> bool:
    """Returns whether the upper end of the band of the memory is beyond the device."""
    memory = result.memory
    return memory.band * memory.device_used_bytes > memory.usable_bytes


def _could_gain(options: Sequence[Candidate], result: Result) -> list[Candidate]:
    """Returns what may gain enough and may fit, by the closed-form bounds."""
    memory = result.memory
    return [
        c
        for c in options
        if c.saves_s > LEAST_GAIN * result.step_time_s.value
        and memory.device_used_bytes * (1 - min(c.frees, 0.0)) <= memory.usable_bytes
    ]


@dataclass(slots=True, kw_only=True)
class _Search:
    """Predictions made so far, and the work that is left."""

    run: RunSpec
    result: Result
    predict: Predict
    entries: float  # launch-list entries of one rank class and micro-batch
    work_left: float
    correction: float = 1.0  # true step over the step continued from fewer micro-batches
    corrected: bool = False
    tried: list[Candidate]
    levers: list[tuple[Candidate, Lever]]

    @classmethod
    def start(cls, run: RunSpec, result: Result, predict: Predict) -> _Search:
        """Returns a search with its whole budget."""
        entries = sum(len(c.entries) for c in result.program.classes)
        chunks = run.plan.pp * run.plan.interleave * _microbatches(run)
        return cls(
            run=run,
            result=result,
            predict=predict,
            entries=entries / chunks,
            work_left=BUDGET,
            tried=[],
            levers=[],
        )

    def try_all(self, options: Sequence[Candidate], reserve: float = 0.0) -> None:
        """Predicts options in order until the work is spent but for `reserve`."""
        for candidate in options:
            short = self._short(candidate.run)
            if short is not None and not self.corrected:
                self._correct()
            work = self._work(short or candidate.run)
            if work > self.work_left - reserve:
                continue
            self.work_left -= work
            self.tried.append(candidate)
            try:
                found = self.predict(short or candidate.run)
            except ForetrainError:
                continue  # not a plan that can be modelled: no lever
            step = found.step_time_s.value
            if short is not None:
                step = self.correction * _continued(found, short, _microbatches(candidate.run))
            self.levers.append((candidate, self._lever(candidate, found, step)))

    def try_kinds(self, options: Sequence[Candidate]) -> None:
        """Predicts of each kind the smallest change that may fit, and larger ones until one does.

        Kinds that cost least by their bounds come first.
        """
        memory = self.result.memory
        needed = 1 - memory.usable_bytes / memory.device_used_bytes
        ladders: dict[str, list[Candidate]] = {}
        for candidate in sorted(options, key=lambda c: c.frees):
            ladders.setdefault(candidate.kind, []).append(candidate)
        waiting = [
            [c for c in ladder if c.frees >= needed] or ladder[-1:] for ladder in ladders.values()
        ]
        while waiting:
            waiting.sort(key=lambda ladder: -ladder[0].saves_s)
            for ladder in waiting:
                self.try_all([ladder.pop(0)])
            done = {c.kind for c, lever in self.levers if lever.fits_after}
            waiting = [ladder for ladder in waiting if ladder and ladder[0].kind not in done]

    def _lever(self, candidate: Candidate, found: Result, step: float) -> Lever:
        before = self.result
        return Lever(
            title=candidate.title,
            changes=candidate.changes,
            gain=before.step_time_s.value / step - 1,
            step_before_s=before.step_time_s.value,
            step_after_s=step,
            memory_before_bytes=before.memory.device_used_bytes,
            memory_after_bytes=found.memory.device_used_bytes,
            fits_before=before.fits,
            fits_after=found.fits,
            missing_after_bytes=found.memory.missing_bytes,
        )

    def _work(self, run: RunSpec) -> float:
        plan = run.plan
        return FIXED_WORK + self.entries * plan.pp * plan.interleave * _microbatches(run)

    def _short(self, run: RunSpec) -> RunSpec | None:
        """Returns the run with fewer micro-batches, None where it is short or must stay whole."""
        plan, count = run.plan, _microbatches(run)
        kept = max(2 * plan.pp, 4)
        whole = self._work(run) - FIXED_WORK <= LONG_STEP
        # all micro-batches are in flight at once (gpipe), or a limit counts them
        if whole or kept >= count or plan.schedule == "gpipe" or plan.in_flight is not None:
            return None
        batch = run.training.microbatch * _dp(run) * kept
        return replace(run, training=replace(run.training, global_batch=batch))

    def _correct(self) -> None:
        """Measures the error of the straight line on the run itself, once."""
        self.corrected = True
        short = self._short(self.run)
        if short is None:
            return
        self.work_left -= self._work(short)
        line = _continued(self.predict(short), short, _microbatches(self.run))
        self.correction = self.result.step_time_s.value / line


def _dp(run: RunSpec) -> int:
    plan = run.plan
    return run.cluster.world_size // (plan.tp * plan.pp * plan.cp)


def _microbatches(run: RunSpec) -> int:
    return run.training.accumulation(_dp(run))


def _continued(result: Result, run: RunSpec, microbatches: int) -> float:
    """Returns the step time with `microbatches` instead of those of `run`, in seconds."""
    count = _microbatches(run)
    sharded = (run.plan.zero or 0) >= 2 or run.plan.preset == "fsdp"
    each = max(_repeated_s(c, sharded=sharded) for c in result.classes) / count
    return result.step_time_s.value + (microbatches - count) * each


def _repeated_s(rank_class: ClassResult, *, sharded: bool) -> float:
    """Returns what a class does for all micro-batches; gradients reduced once are left out."""
    parts = rank_class.parts
    axes = ("tp", "cp", "ep", "dp") if sharded else ("tp", "cp", "ep")
    exposed = sum(parts.exposed_communication.get(axis, 0.0) for axis in axes)
    return parts.compute + parts.recompute + parts.host + exposed


def _gaining(levers: Sequence[tuple[Candidate, Lever]]) -> list[tuple[Candidate, Lever]]:
    found = [(c, v) for c, v in levers if v.fits_after and v.gain > LEAST_GAIN]
    return sorted(found, key=lambda pair: (pair[0].kind == WHAT_IF, -pair[1].gain))


def _ranked(levers: Sequence[tuple[Candidate, Lever]], result: Result) -> tuple[Lever, ...]:
    """Returns the levers in order of use, of every kind the best for its purpose.

    What only frees memory is of no use where there is room beyond doubt.
    """
    fits = result.fits
    freeing = [
        (c, v)
        for c, v in levers
        if v.memory_after_bytes < (1 - LEAST_FREED) * v.memory_before_bytes
        and (v.gain > -LARGEST_LOSS or not fits)
    ]
    if fits:
        first = _gaining(levers)
        useful = freeing if _may_not_fit(result) else ()
        second = [pair for pair in useful if pair[1].fits_after and pair not in first]
        second.sort(key=lambda pair: -pair[1].gain)
    else:
        first = [pair for pair in levers if pair[1].fits_after]
        first.sort(key=lambda pair: -pair[1].gain)
        second = [pair for pair in freeing if not pair[1].fits_after]
        second.sort(key=lambda pair: pair[1].memory_after_bytes)
    return (*_best_of_kind(first), *_best_of_kind(second))[:NUM_LEVERS]


def _best_of_kind(levers: Sequence[tuple[Candidate, Lever]]) -> list[Lever]:
    kinds: dict[str, Lever] = {}
    for candidate, lever in levers:
        kinds.setdefault(candidate.kind, lever)
    return list(kinds.values())
