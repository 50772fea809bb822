"""How often `foretrain fit` names a planted fault from three runs that differ in plan only.

    python studies/fit/recognise.py cases.csv [JOB...]     # about an hour on two cores; resumes
    python studies/fit/tables.py cases.csv                 # the tables of docs/explain/fit.md

For every job of jobs.py: a constant is made 20 to 50 % better or worse, the steps of three runs are
simulated with it, each gets log-normal noise of 2 %, and `fit` sees the noisy steps. Fixed before
anything was run:

- `random` triples: three plans drawn from those that fit in memory, keep tp inside a node and are
  at most four times slower than the fastest drawn; the same model, sequence, batch, cluster, stack.
- `suggested` triples: what `suggest` proposes, which knows nothing of the fault.
- A case is *silent* when the planted fault moves no step of the three by more than the noise (2 %),
  *weak* up to 6 %, else *clear*. All are counted, apart.
- `none`: nothing is planted. `two`: two constants are off at once. `scatter`: one constant is off,
  and steps scatter by 5 % instead of 2 %, as if the model had an error of its own from plan to
  plan; `fit` is told 2 % (`scatter`) or 5 % (`told`). These three on suggested triples.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from math import exp, log
from pathlib import Path

import jobs

from foretrain.analysis.fit import NOISE, fit
from foretrain.analysis.fit_plans import SLOWEST, OtherPlan, other_plans
from foretrain.analysis.fit_response import CONSTANTS, StepModel
from foretrain.analysis.fit_search import Measured
from foretrain.analysis.fit_suggest import suggest
from foretrain.cost.adjust import Adjustments
from foretrain.errors import ForetrainError
from foretrain.predict import predict

POOL, TRIPLES, DRAWS = 6, 8, 8
FACTORS = (0.5, 0.6, 0.7, 0.8, 1.2, 1.3, 1.4, 1.5)
BEYOND = 3  # cases per constant of the arms none, two, scatter, told
FIELDS = (
    "job", "held_out", "arm", "plans", "constant", "factor", "effect", "verdict", "named",
    "probability", "tied",
)  # fmt: skip

Runs = list[tuple[OtherPlan, StepModel]]


def main(out: Path, names: Sequence[str]) -> None:
    """Appends the cases of every job that `out` does not have yet."""
    done: set[str] = set()
    if out.exists():
        with out.open(newline="") as file:
            done = {row["job"] for row in csv.DictReader(file)}
    for job in (*jobs.DEVELOPMENT, *jobs.HELD_OUT):
        if job.name in done or (names and job.name not in names):
            continue
        rows = [{"job": job.name, "held_out": job in jobs.HELD_OUT, **c} for c in cases(job)]
        new = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def cases(job: jobs.Job) -> Iterator[dict[str, object]]:
    """Yields one row per simulated case of a job."""
    draw = random.Random(job.name)
    pool = _pool(job, draw)
    for _ in range(TRIPLES):
        runs = draw.sample(pool, 3)
        for constant in CONSTANTS:
            yield case("random", runs, {constant: fault(draw)}, draw)
    found = suggest(job.run())
    runs = [(plan, StepModel(plan.run)) for plan in found.plans]
    for constant in CONSTANTS:
        for i in range(DRAWS):
            yield case("suggested", runs, {constant: FACTORS[i % len(FACTORS)]}, draw)
        for _ in range(BEYOND):
            other = draw.choice([c for c in CONSTANTS if c != constant])
            yield case("none", runs, {}, draw)
            yield case("two", runs, {constant: fault(draw), other: fault(draw)}, draw)
            yield case("scatter", runs, {constant: fault(draw)}, draw, scatter=0.05)
            told = {"scatter": 0.05, "noise": 0.05}
            yield case("told", runs, {constant: fault(draw)}, draw, **told)


def case(
    arm: str,
    runs: Runs,
    factors: dict[str, float],
    draw: random.Random,
    scatter: float = NOISE,
    noise: float = NOISE,
) -> dict[str, object]:
    """Returns what `fit` says of three runs with these constants off."""
    truth = Adjustments(**factors)
    steps = [true_step_s(model, truth) for _, model in runs]
    effect = max(abs(log(s / m.base_s)) for s, (_, m) in zip(steps, runs, strict=True))
    measured = [
        Measured(name=plan.title, model=model, step_s=step * exp(draw.gauss(0.0, scatter)))
        for step, (plan, model) in zip(steps, runs, strict=True)
    ]
    found = fit(measured, noise=noise)
    best = found.named or found.explanations[0].constant
    return {
        "arm": arm,
        "plans": " | ".join(plan.title or "as given" for plan, _ in runs),
        "constant": " ".join(factors),
        "factor": " ".join(f"{factor:.3f}" for factor in factors.values()),
        "effect": f"{effect:.4f}",
        "verdict": found.verdict,
        "named": found.named or "",
        "probability": f"{found.probability.get(best, 0.0):.3f}",
        "tied": " ".join(found.tied),
    }


def fault(draw: random.Random) -> float:
    """Returns a factor 20 to 50 % below or above 1."""
    return draw.choice(FACTORS)


@cache
def true_step_s(model: StepModel, truth: Adjustments) -> float:
    """Returns the simulated step with the planted constants, apart from what `fit` simulates."""
    return model.step_s(truth)


def _pool(job: jobs.Job, draw: random.Random) -> Runs:
    """Returns plans of a job as people run them, in random order."""
    run = job.run()
    plans = [p for p in other_plans(run) if p.run.plan.tp <= run.cluster.devices_per_node]
    draw.shuffle(plans)
    found: Runs = []
    for plan in plans:
        if len(found) == POOL:
            break
        try:
            if predict(plan.run).fits:
                found.append((plan, StepModel(plan.run)))
        except ForetrainError:
            continue
    fastest = min(model.base_s for _, model in found)
    return [(plan, model) for plan, model in found if model.base_s <= SLOWEST * fastest]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
