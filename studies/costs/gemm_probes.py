"""Prints what `calibrate ops` makes of 30 probes on a device whose family is hidden.

    python studies/costs/gemm_probes.py TABLES [--kernel NAME] [--draws COUNT] [--only PATTERN]

TABLES holds what op_tables.py writes. Every device of gemm_families.py in turn: the entries of its
family are taken out of the calibration, with what gemm_prior.toml knows of it; 30 rows (20 with
m >= 64, 10 with m, n, k >= 1024) of pairs (n, k) that take part in fits go through
`calibrate_ops` as a user's table does; errors and coverage are those of left-out pairs from 1024
on. Without --kernel probes and rows are of all kernels of the table, as they come, so that a
prediction is of an unknown one; with it both are of that kernel. Takes 3 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from gemm import SEED, Rows, Values, fit_rows, read
from gemm_families import TILES, Prior, prior_of
from gemm_targets import FAMILIES, ODD

from foretrain.cost import calibration
from foretrain.cost.calibration import constants_of_user
from foretrain.validation.ops.calibrate import calibrate_ops
from foretrain.validation.ops.predict import OpOutcome, predict_ops
from foretrain.validation.ops.table import MeasuredOp, OpRow

WIDE, BIG, TEST = 20, 10, 1500
#: Tables of the catalog that hold entries of devices.
HIDDEN = ("gemm_fitted", "gemm_kernels")


@contextmanager
def hidden(devices: Sequence[str], priors: Mapping[str, Prior]) -> Generator[None]:
    """Takes the entries of some devices out of the calibration, and puts other priors into it."""
    shipped = calibration._shipped  # the one place where all tables are read

    def without(name: str) -> Mapping[str, Any]:
        table = shipped(name)
        if name == "gemm_prior":
            return {**table, "prior": [_prior(*item) for item in priors.items()]}
        if name not in HIDDEN:
            return table
        kept = [entry for entry in table["entry"] if not _holds_for(entry, devices)]
        return {**table, "entry": kept}

    with patch.object(calibration, "_shipped", without):
        yield


def _holds_for(entry: Mapping[str, Any], devices: Sequence[str]) -> bool:
    patterns = entry.get("devices", ())
    return any(fnmatchcase(device, pattern) for device in devices for pattern in patterns)


def _prior(tiles: str, parts: Prior) -> dict[str, Any]:
    start, width = parts
    return {"tiles": tiles, "dtypes": ["bf16"], "start": start, "width": width}


def row_of(values: Mapping[Any, Any], number: int, *, named: bool) -> OpRow:
    """Returns a row of the table as `validate ops` reads it; of no kernel where not `named`."""
    shape = {name: float(values[name]) for name in "bmnk"}
    return OpRow(
        id=str(number),
        device=str(values["device"]),
        op="gemm",
        part="forward",
        dtype="bf16",
        stack=str(values["stack"]) if named else "",
        launch_included=False,
        shape=shape,
    )


def rows_of(frame: pd.DataFrame, *, named: bool) -> list[OpRow]:
    """Returns rows of the table as `validate ops` reads them."""
    records = frame.to_dict("records")
    return [row_of(values, number, named=named) for number, values in enumerate(records)]


def draw(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Returns the probes: WIDE rows with m >= 64 and BIG ones of m, n, k >= 1024."""
    wide = frame[frame.m >= 64]
    big = frame[frame[["m", "n", "k"]].min(axis=1) >= 1024]
    parts = [
        part.iloc[rng.choice(len(part), count, replace=False)]
        for part, count in ((wide, WIDE), (big, BIG))
    ]
    return pd.concat(parts)


def scores(outcomes: Sequence[OpOutcome], measured: np.ndarray) -> tuple[float, float]:
    """Returns the mean error and the share inside the 90 % interval, in percent."""
    value, low, high = (
        np.array([getattr(outcome, name) for outcome in outcomes], dtype=float)
        for name in ("value_s", "low_s", "high_s")
    )
    inside = (low <= measured) & (measured <= high)
    return 100.0 * float(np.abs(value / measured - 1.0).mean()), 100.0 * float(inside.mean())


def after_probes(name: str, frame: pd.DataFrame, draws: int) -> str:
    """Returns in words what a hidden device's rows are predicted as, before and after probes."""
    least = frame[["m", "n", "k"]].min(axis=1)
    test = frame[frame.left_out & (least >= 1024)]
    test = test.sample(min(TEST, len(test)), random_state=1)
    rows, measured = rows_of(test, named=True), test.latency_us.to_numpy(float) * 1e-6
    before, _ = scores(predict_ops(rows_of(test, named=False)), measured)
    rng = np.random.default_rng(SEED)
    errors: list[float] = []
    inside: list[float] = []
    for _ in range(draws):
        probes = draw(frame[~frame.left_out], rng)
        table = zip(rows_of(probes, named=True), probes.latency_us, strict=True)
        items = [MeasuredOp(row=row, latency_us=float(us)) for row, us in table]
        entries = [refit.entry for refit in calibrate_ops(items, name, "probes").refits]
        with constants_of_user({"gemm_fitted": entries}):
            error, share = scores(predict_ops(rows), measured)
        errors.append(error)
        inside.append(share)
    return (
        f"as it is {before:5.1f} %, after {WIDE + BIG} probes median {np.median(errors):4.1f} %, "
        f"90th percentile {np.quantile(errors, 0.9):4.1f} %, {np.median(inside):3.0f} % inside"
    )


def main(tables: Path, *, kernel: str, draws: int, only: str) -> None:
    """Hides every family in turn."""
    frame = read(tables)
    frame = frame[(frame.dtype == "bf16") & frame.device.isin(FAMILIES)]
    frame = frame[frame.table == "aic_gemm"]
    rng = np.random.default_rng(SEED)
    own: dict[str, dict[str, Values]] = {}
    for name in FAMILIES:
        here = frame[(frame.device == name) & ~frame["stack"].str.lower().isin(ODD)]
        sample = Rows(here, name, "bf16").sample(rng)
        own[name] = {tiles: fit_rows([sample], tiles) for tiles in TILES}
    for name, family in FAMILIES.items():
        if not fnmatchcase(name, only):
            continue
        here = frame[(frame.device == name) & (frame["stack"].isin([kernel]) | (not kernel))]
        kin = [device for device, other in FAMILIES.items() if other == family]
        with hidden(kin, prior_of(own, family)):
            sys.stdout.write(f"{name:16s} {after_probes(name, here, draws)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    words = sys.argv[1:]

    def option(word: str, usual: str) -> str:
        """Returns what follows a word of the command line."""
        return words[words.index(word) + 1] if word in words else usual

    main(
        Path(words[0]),
        kernel=option("--kernel", ""),
        draws=int(option("--draws", "10")),
        only=option("--only", "*"),
    )
