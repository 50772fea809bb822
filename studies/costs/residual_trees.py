"""Fits the trees of residuals, decides whether they are worth shipping, and writes the files."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from catboost import CatBoostRegressor
from least_squares import folds

from foretrain.cost.residual import LEAF, Trees

OUT = Path(__file__).resolve().parents[2] / "src/foretrain/catalog/calibration"
TREES, DEPTH, RATE, BORDERS = 100, 5, 0.15, 64
FOLDS = 5
#: A table must hold this many rows and shapes that take part in the fit.
LEAST_ROWS, LEAST_SHAPES = 150, 6
#: Size classes that have a band each; what a table lacks takes the widest of the others.
CLASSES = 3
#: Values of `apart` with fewer shapes have bands of their own, which hold in full.
FEW_SHAPES, FEW_ROWS = 6, 8
#: Tables of fewer rows must gain more: what they gain in turn may be chance.
FEW, WORTH_FEW = 300, 0.85
#: Shipped where the error of shapes left out in turn falls below this share of the formula's: of a
#: named kernel, and of any kernel. What a table of one release says does not hold for another
#: (A100: trees of the aiconfigurator on products of vidur 8.0 -> 9.2 %, reversed 7.1 -> 8.8), so
#: that an unknown kernel gains only where it is the formula that is far off.
WORTH, WORTH_ANY = 0.95, 0.67


@dataclass
class Table:
    """Measured operators that one entry of the calibration prices.

    `shape`: the name of the whole shape pair of each row, which is left out as one. `classes`: the
    size class that decides the band, 0 for big ones. `sizes`: columns that bound where the residual
    acts.
    """

    name: str
    family: str
    key: str
    sms: int
    dtypes: tuple[str, ...]
    source: str
    features: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray
    shape: np.ndarray
    left_out: np.ndarray
    classes: np.ndarray
    sizes: dict[str, np.ndarray]
    case: str = ""
    worth: float = WORTH
    least_shapes: int = LEAST_SHAPES
    apart: str = ""  # size whose values have bands of their own where the table holds few shapes


@dataclass
class Shipped:
    """A table's trees and what residuals.json says of them."""

    trees: Trees
    entry: dict[str, object]


def grow(features: np.ndarray, target: np.ndarray, weight: np.ndarray) -> Trees:
    """Returns trees of the target's median."""
    model = CatBoostRegressor(
        iterations=TREES, depth=DEPTH, learning_rate=RATE, loss_function="MAE",
        leaf_estimation_method="Exact", border_count=BORDERS, l2_leaf_reg=5.0, random_seed=1,
        thread_count=1, verbose=0, allow_writing_files=False,
    )  # fmt: skip
    model.fit(features.T, target, sample_weight=weight)
    return read_trees(model)


def read_trees(model: CatBoostRegressor) -> Trees:
    """Returns the trees of a fitted model, its bias in the leaves of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        data = json.loads(path.read_text(encoding="utf-8"))
    scale, bias = data["scale_and_bias"]
    trees = data["oblivious_trees"]
    feature = np.zeros((DEPTH, len(trees)), dtype=np.intp)
    threshold = np.full((DEPTH, len(trees)), np.inf, dtype=np.float32)  # inf: no question
    leaf = np.zeros((len(trees), 2**DEPTH), dtype=np.float32)
    for t, tree in enumerate(trees):
        for d, split in enumerate(tree["splits"] or []):
            feature[d, t], threshold[d, t] = split["float_feature_index"], split["border"]
        leaf[t, : len(tree["leaf_values"])] = scale * np.array(tree["leaf_values"])
    leaf[0] += bias[0] if isinstance(bias, list) else bias
    whole = np.round(leaf / LEAF).astype(np.int32)
    return Trees(feature=feature, threshold=threshold, leaf=whole)


def error(target: np.ndarray, said: np.ndarray | float) -> np.ndarray:
    """Returns |predicted / measured - 1| where `said` is predicted for the logarithm `target`."""
    return np.abs(np.exp(said - target) - 1.0)


def fit(table: Table) -> Shipped | None:
    """Returns the trees of a table where they are worth it, and prints the errors."""
    target = np.log(table.measured / table.predicted)
    used = np.flatnonzero(~table.left_out)
    if len(used) < LEAST_ROWS or len(np.unique(table.shape[used])) < table.least_shapes:
        return None
    x, y, classes = table.features[:, used], target[used], table.classes[used]
    weight = np.where(classes == 0, 3.0, 1.0)
    fold = folds(table.shape[used], FOLDS)
    said = np.zeros(len(used))
    for which in range(FOLDS):
        rest = fold != which
        if rest.all() or not rest.any():
            continue
        said[~rest] = grow(x[:, rest], y[rest], weight[rest])(x[:, ~rest])
    before, after = error(y, 0.0), error(y, said)
    big = classes == 0
    least = min(table.worth, WORTH_FEW) if len(used) < FEW else table.worth
    worth = after.mean() <= least * before.mean() and (
        not big.any() or after[big].mean() <= before[big].mean()
    )
    trees = grow(x, y, weight)
    out = table.left_out
    words = _words(table, target, trees(table.features))
    verdict = "" if worth else "  NOT SHIPPED"
    sys.stdout.write(
        f"{table.name:58s} in turn {100 * before.mean():5.1f} -> {100 * after.mean():5.1f} %; "
        f"{out.sum()} rows left out: {words}{verdict}\n"
    )
    sys.stdout.flush()
    if not worth:
        return None
    bands = [_band(np.abs(y - said)[classes == c]) for c in range(CLASSES)]
    known = [value for value in bands if value]
    bands = [value or max(known, default=2.0) for value in bands]
    bounds = {
        name: [float(column[used].min()), float(column[used].max())]
        for name, column in table.sizes.items()
    }
    entry: dict[str, object] = {
        "name": table.name,
        "family": table.family,
        "key": table.key,
        "case": table.case,
        "dtypes": list(table.dtypes),
        "sms": table.sms,
        "bounds": bounds,
        "band": bands,
        "mark": "fitted",
        "source": f"{table.source}; left out: {words}",
    }
    own = _own_bands(table, used, np.abs(y - said), bands) if table.apart else {}
    if own:
        entry["own_bands"] = {table.apart: own}
    return Shipped(trees=trees, entry=entry)


def _own_bands(
    table: Table, used: np.ndarray, size: np.ndarray, bands: list[float]
) -> dict[str, list[float]]:
    """Returns the bands of values of `apart` with few shapes, none narrower than the table's.

    Each of few shapes that is left out in turn stands for others, so that the worst of them counts:
    the largest 90 % factor of a shape, over all classes.
    """
    values, shapes = table.sizes[table.apart][used], table.shape[used]
    found: dict[str, list[float]] = {}
    every = np.unique(values)
    for value in every if len(every) > 1 else ():  # the bands of a table of one are its own
        names = np.unique(shapes[values == value])
        if len(names) >= FEW_SHAPES:
            continue
        worst = max(_band(size[(values == value) & (shapes == name)], FEW_ROWS) for name in names)
        if worst > min(bands):
            found[f"{value:g}"] = [max(worst, band) for band in bands]
    return found


def _words(table: Table, target: np.ndarray, said: np.ndarray) -> str:
    out = table.left_out
    parts = []
    for name, which in (("all", out), ("big", out & (table.classes == 0))):
        if which.any():
            old, new = error(target[which], 0.0), error(target[which], said[which])
            parts.append(f"{name} {100 * old.mean():.1f} -> {100 * new.mean():.1f} %")
    return ", ".join(parts)


def _band(size: np.ndarray, least: int = 21) -> float:
    """Returns the 90 % factor of logarithms of errors; 0 of fewer than `least`."""
    return round(float(np.exp(np.quantile(size, 0.9))), 3) if len(size) >= least else 0.0


def save(shipped: list[Shipped]) -> None:
    """Writes residuals.json, an entry per line, and residuals.npz, an array per entry and part."""
    lines = ",\n".join(json.dumps(part.entry) for part in shipped)
    (OUT / "residuals.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    arrays: dict[str, np.ndarray] = {}
    for part in shipped:
        name, trees = part.entry["name"], part.trees
        arrays[f"{name}/feature"] = trees.feature.astype(np.uint8)
        arrays[f"{name}/threshold"] = trees.threshold.astype(np.float32)
        arrays[f"{name}/leaf"] = trees.leaf.astype(np.int16)
    np.savez_compressed(OUT / "residuals.npz", **arrays)
