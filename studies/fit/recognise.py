"""How often `foretrain fit` names a planted fault from three runs that differ in plan only.

    python studies/fit/recognise.py cases.csv [ARM...] [JOB...]     # a minute or two a job; resumes
    python studies/fit/tables.py cases.csv                 # the tables of docs/explain/fit.md

For every job of jobs.py: a constant is made 20 to 50 % better or worse, the steps of three runs are
simulated with it, each gets log-normal noise of 2 %, and `fit` sees the noisy steps. Fixed before
anything was run:

- `random` triples: three plans drawn from those that fit in memory, keep tp inside a node and are
  at most four times slower than the fastest drawn; the same model, sequence, batch, cluster, stack.
- `suggested` triples: what `suggest` proposes, which knows nothing of the fault.
- A constant that the cluster does not have (NICs of a single node, links between the devices of
  nodes with one device) cannot be off: there are no such cases.
- A case is *silent* when the planted fault moves no step of the three by more than the noise (2 %),
  *weak* up to 6 %, else *clear*. All are counted, apart.
- `none`: nothing is planted. `two`: two constants are off at once. `scatter`: one constant is off,
  and steps scatter by 5 % instead of 2 %, as if the model had an error of its own from plan to
  plan; `fit` is told 2 % (`scatter`) or 5 % (`told`). These three on suggested triples.
- `ideal` is what an observer would say who knows all but the noise and which constant it is.
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
from foretrain.analysis.fit_quick import quick_model
from foretrain.analysis.fit_response import CONSTANTS, StepModel
from foretrain.analysis.fit_search import Measured
from foretrain.analysis.fit_suggest import suggest
from foretrain.cost.adjust import Adjustments
from foretrain.errors import ForetrainError
from foretrain.hardware.cluster import Cluster
from foretrain.predict import predict

ARMS = ("random", "suggested", "none", "two", "scatter", "told")
POOL, TRIPLES = 6, 8
SCATTER = 0.05
FACTORS = (0.5, 0.6, 0.7, 0.8, 1.2, 1.3, 1.4, 1.5)
BEYOND = 3  # cases per constant of the arms none, two, scatter, told
FIELDS = (
    "job", "held_out", "arm", "plans", "constant", "factor", "effect", "verdict", "named",
    "probability", "tied", "ideal",
)  # fmt: skip

Runs = list[tuple[OtherPlan, StepModel]]


def main(out: Path, words: Sequence[str]) -> None:
    """Appends the cases of every job and arm that `out` does not have yet."""
    done: set[tuple[str, str]] = set()
    if out.exists():
        with out.open(newline="") as file:
            done = {(row["job"], row["arm"]) for row in csv.DictReader(file)}
    every = (*jobs.DEVELOPMENT, *jobs.HELD_OUT)
    names = [word for word in words if word not in ARMS]
    for job in [j for j in every if j.name in names] if names else every:
        wanted = [arm for arm in ARMS if arm in words or words == names]
        wanted = [arm for arm in wanted if (job.name, arm) not in done]
        found = [*cases(job, wanted)]
        rows = [{"job": job.name, "held_out": job in jobs.HELD_OUT, **row} for row in found]
        new = not out.exists()
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def cases(job: jobs.Job, arms: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yields one row per simulated case of a job; every arm draws from a seed of its own."""
    planted = has(job.run().cluster)
    if "random" in arms:
        draw = random.Random(job.name)
        pool = _pool(job, draw)
        for _ in range(TRIPLES):
            runs = draw.sample(pool, 3)
            for constant in planted:
                yield case("random", runs, {constant: fault(draw)}, draw)
    if not set(arms) - {"random"}:
        return
    found = suggest(job.run())
    runs = [(plan, quick_model(plan.run)) for plan in found.plans]
    for arm in arms:
        draw = random.Random(f"{job.name} {arm}")
        for constant in planted:
            if arm == "suggested":
                for factor in FACTORS:
                    yield case(arm, runs, {constant: factor}, draw)
            elif arm != "random":
                for _ in range(BEYOND):
                    yield _beyond(arm, runs, constant, planted, draw)


def _beyond(
    arm: str, runs: Runs, constant: str, planted: Sequence[str], draw: random.Random
) -> dict[str, object]:
    if arm == "none":
        return case(arm, runs, {}, draw)
    if arm == "two":
        other = draw.choice([c for c in planted if c != constant])
        return case(arm, runs, {constant: fault(draw), other: fault(draw)}, draw)
    noise = NOISE if arm == "scatter" else SCATTER
    return case(arm, runs, {constant: fault(draw)}, draw, scatter=SCATTER, noise=noise)


def has(cluster: Cluster) -> list[str]:
    """Returns the constants that a cluster has: no other can be off."""
    missing = {"nic"} if cluster.nodes == 1 else set[str]()
    missing |= {"scaleup"} if cluster.devices_per_node == 1 else set[str]()
    return [constant for constant in CONSTANTS if constant not in missing]


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
        "ideal": ideal(measured) if arm in ("random", "suggested") else "",
    }


def ideal(runs: Sequence[Measured]) -> str:
    """Returns what an observer names who knows more than any `fit` can: the bound of this study.

    It knows that exactly one constant is off, by one of `FACTORS`, how much noise there is, and
    every step that would follow; it names the most probable constant, however improbable.
    """
    evidence: dict[str, float] = {}
    for constant in has(runs[0].model.run.cluster):
        misses = [
            sum(
                log(true_step_s(run.model, Adjustments(**{constant: factor})) / run.step_s) ** 2
                for run in runs
            )
            for factor in FACTORS
        ]
        evidence[constant] = sum(exp(-0.5 * miss / NOISE**2) for miss in misses)
    return max(evidence, key=lambda constant: evidence[constant])


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
                found.append((plan, quick_model(plan.run)))
        except ForetrainError:
            continue
    fastest = min(model.base_s for _, model in found)
    return [(plan, model) for plan, model in found if model.base_s <= SLOWEST * fastest]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
