"""Fits what families of devices have in common, writes gemm_prior.toml, and says what it is worth.

    python studies/costs/gemm_families.py TABLES [--write]

TABLES holds what op_tables.py writes. A family is left out as a whole: its errors are printed as
they are predicted by a joint fit of the others, and after 30 probe rows (20 with m >= 64, 10 with
m, n, k >= 1024, drawn 24 times) fitted as `calibrate ops` does: from the geometric mean of the
constants of the other families, by priors as wide as these differ, with the tiles that fit better.
Errors are those of left-out (n, k) pairs, as in gemm.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gemm import OUT, SEED, Rows, Values, fit_rows, joint_values, read, report
from gemm_targets import BASE, FAMILIES, ODD, PRIORS

from foretrain.validation.ops.fitting import fit_constants, fit_cost

Prior = tuple[Values, Values]  # where a fit starts, and how wide its priors are
#: Sets of tiles that a kernel of an unknown device may have; no prior is narrower than that.
TILES, LEAST_WIDTH = ("basic", "fine"), 0.1
SOURCE = (
    "geometric mean and spread over device families: A100, H100, B200 with B300 and GB200, "
    "RTX PRO 6000 (NVIDIA aiconfigurator 0.12.0)"
)
#: Sets of probe rows that are drawn of a left-out device.
DRAWS = 24


def main(tables: Path, *, write: bool) -> None:
    """Leaves out every family in turn; writes the priors of all when asked."""
    frame = read(tables)
    frame = frame[(frame.dtype == "bf16") & frame.device.isin(FAMILIES)]
    rng = np.random.default_rng(SEED)
    every = {name: Rows(frame[frame.device == name], name, "bf16") for name in FAMILIES}
    samples = {
        name: Rows(rows.frame[~rows.frame["stack"].str.lower().isin(ODD)], name, "bf16").sample(rng)
        for name, rows in every.items()
    }
    own = {name: {t: fit_rows([rows], t) for t in TILES} for name, rows in samples.items()}
    for name, family in FAMILIES.items():
        others = [rows for other, rows in samples.items() if FAMILIES[other] != family]
        report(f"{name} bf16, its family left out", every[name], joint_values(others), "basic")
        after_probes(name, every[name], prior_of(own, family), rng)
    if write:
        (OUT / "gemm_prior.toml").write_text(prior_text(prior_of(own)), encoding="utf-8")


def prior_of(own: dict[str, dict[str, Values]], without: str = "") -> dict[str, Prior]:
    """Returns, by tiles, what the constants of device families usually are, and how they differ.

    `own`: of every device, by tiles; devices of one family have one vote. `without`: a family.
    """
    found: dict[str, Prior] = {}
    for tiles in TILES:
        families: dict[str, list[list[float]]] = {}
        for device, values in own.items():
            if FAMILIES[device] != without:
                logs = [float(np.log(values[tiles][name])) for name in BASE]
                families.setdefault(FAMILIES[device], []).append(logs)
        means = np.array([np.mean(members, axis=0) for members in families.values()])
        width = np.maximum(means.std(axis=0, ddof=1), LEAST_WIDTH)
        start = np.exp(means.mean(axis=0))
        found[tiles] = (
            dict(zip(BASE, start.tolist(), strict=True)),
            dict(zip(BASE, width.tolist(), strict=True)),
        )
    return found


def fit_probes(rows: Rows, priors: dict[str, Prior]) -> tuple[Values, str]:
    """Returns the constants and tiles of a few rows, as `calibrate ops` fits them."""
    fits: list[tuple[float, Values, str]] = []
    low, high = (np.array([PRIORS[name][i] for name in BASE]) for i in (2, 3))
    for tiles, prior in priors.items():
        start, width = (np.array(list(part.values())) for part in prior)

        def model(values: np.ndarray, tiles: str = tiles) -> np.ndarray:
            return rows.model(dict(zip(BASE, values, strict=True)), tiles)

        found = fit_constants(model, rows.measured, start, width, low=low, high=high)
        cost = fit_cost(model, rows.measured, found, start, width)
        fits.append((cost, dict(zip(BASE, found.tolist(), strict=True)), tiles))
    return min(fits, key=lambda fit: fit[0])[1:]


def after_probes(name: str, rows: Rows, priors: dict[str, Prior], rng: np.random.Generator) -> None:
    """Prints the errors of big left-out shapes after 30 probes, drawn anew DRAWS times."""
    used = np.flatnonzero(~rows.left_out)
    big = used[rows.classes[used] == 0]
    wide = used[rows.columns["m"][used] >= 64]
    test = rows.take(np.flatnonzero(rows.left_out & (rows.classes == 0)))
    errors: list[float] = []
    for _ in range(DRAWS):
        drawn = [rng.choice(wide, 20, replace=False), rng.choice(big, 10, replace=False)]
        found = fit_probes(rows.take(np.concatenate(drawn)), priors)
        errors.append(100.0 * float(np.abs(test.error(*found)).mean()))
    sys.stdout.write(
        f"{name} bf16, after 30 probes, big shapes, {DRAWS} draws: median "
        f"{np.median(errors):.1f} %, 90th percentile {np.quantile(errors, 0.9):.1f} %\n"
    )
    sys.stdout.flush()


def prior_text(priors: dict[str, Prior]) -> str:
    """Returns the TOML of what the constants of device families usually are."""
    lines = [
        "# What GEMM constants usually are, and how much (logarithm) device families differ: where",
        "# `calibrate ops` starts with a device that has none of its own. Written by",
        "# studies/costs/gemm_families.py: change that script, not this file. Keys: see gemm.toml.",
        "",
    ]
    for tiles, parts in priors.items():
        lines += ["[[prior]]", f'tiles = "{tiles}"', 'dtypes = ["bf16", "fp16", "tf32"]']
        lines += ['mark = "fitted"', f'source = "{SOURCE}"']
        for word, part in zip(("start", "width"), parts, strict=True):
            lines += [f"[prior.{word}]"]
            lines += [f"{key} = {float(f'{value:.4g}')}" for key, value in part.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), write="--write" in sys.argv[2:])
