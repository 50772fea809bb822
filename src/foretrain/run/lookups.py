"""How the rows of embedding tables are read: `training.lookups` and `training.table_optimizer`.

    uniform                     every row is as likely as any other (the default)
    {zipf: 1.05}                the k-th most popular row is read in proportion to k ** -1.05
    {file: lookups.csv}         measured: columns table, lookups, distinct
    {file: locality_stats.txt}  measured: the reuse histograms of dlrm_datasets; the first holds
                                for all tables

A measurement says how many different rows a number of lookups found; see
docs/explain/recommenders.md.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from foretrain.errors import FileFormatError, Problem
from foretrain.frontends.recsys_spec import MOST_ZIPF
from foretrain.frontends.spec import Model, RecSpec, Table
from foretrain.run.aliases import TABLE_OPTIMIZER_SYNONYMS, TABLE_OPTIMIZERS
from foretrain.run.fields import Fields
from foretrain.run.values import Section, as_number

_WAY_OUT = "uniform, {zipf: 1.05} or {file: lookups.csv}"
_COLUMNS = ("table", "lookups", "distinct")
#: The exponent of `lookups: zipf` without one: popularity of web objects is near 1 (Breslau 1999).
ZIPF = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Measured reuse: rows found per lookup, and bins from the hottest rows to the coldest."""

    distinct: float
    bins: tuple[tuple[float, float], ...] = ()


def read_table_optimizer(
    section: Section, model: Model | None, optimizer: str, lines: list[str]
) -> str:
    """Returns the optimizer of tables that backward updates: as given, else like the dense one."""
    word = section.choice("table_optimizer", TABLE_OPTIMIZERS, TABLE_OPTIMIZER_SYNONYMS)
    if not isinstance(model, RecSpec):
        if section.has("table_optimizer"):
            what = "the model has no embedding tables that backward updates"
            section.refuse("table_optimizer", what, section.values["table_optimizer"])
        return "sgd"
    if word is not None:
        return word
    usual = {"sgd": "sgd", "none": "sgd", "adagrad": "adagrad", "adam": "adam", "adamw": "adam"}
    word = usual.get(optimizer, "rowwise-adagrad")
    lines.append(f"table_optimizer = {word} (not given; optimizer {optimizer})")
    return word


def with_lookups(
    fields: Fields, model: Model | None, folder: Path | None, lines: list[str]
) -> Model | None:
    """Returns the model with what `training.lookups` says about its tables."""
    section = Section(path="training", values=fields.section("training"), problems=fields.problems)
    given = section.values.get("lookups")
    if model is None:
        return None
    if given is None:
        if isinstance(model, RecSpec):
            lines.append(f"lookups = {_usual(model)} (not given)")
        return model
    if not isinstance(model, RecSpec):
        section.refuse("lookups", "the model has no embedding tables", given)
        return model
    words = _words(given)
    if words is None:
        section.refuse("lookups", "not understood", given, _WAY_OUT)
        return model
    kind, value = words
    if kind == "uniform":
        plain = (replace(t, zipf=0.0, distinct=None, reuse=()) for t in model.tables)
        return replace(model, tables=tuple(plain))
    if kind == "zipf":
        exponent = as_number(value)
        if exponent is None or not 0.0 <= exponent <= MOST_ZIPF:
            section.refuse("lookups", "not an exponent", value, f"0 to {MOST_ZIPF:g}")
            return model
        skewed = (replace(t, zipf=exponent, distinct=None, reuse=()) for t in model.tables)
        return replace(model, tables=tuple(skewed))
    if not isinstance(value, str) or not value.strip():
        section.refuse("lookups", "names no file", given, _WAY_OUT)
        return model
    path = Path(value) if folder is None else folder / value
    try:
        found = read_reuse(path)
    except FileFormatError as error:
        fields.refuse(error.problems, FileFormatError)
        return model
    return _applied(section, model, found)


def _usual(model: RecSpec) -> str:
    """What the model says itself about its lookups."""
    if any(table.distinct is not None for table in model.tables):
        return "measured reuse, as the model says"
    exponents = sorted({table.zipf for table in model.tables})
    if exponents == [0.0]:
        return "uniform"
    return "zipf " + ", ".join(f"{value:g}" for value in exponents) + ", as the model says"


def _words(given: object) -> tuple[str, Any] | None:
    if isinstance(given, str):
        word = given.strip().lower()
        return {"uniform": ("uniform", None), "zipf": ("zipf", ZIPF)}.get(word)
    if isinstance(given, Mapping):
        items = list(cast("Mapping[Any, Any]", given).items())
        if len(items) == 1 and items[0][0] in ("zipf", "file"):
            return str(items[0][0]), items[0][1]
    return None


def _applied(section: Section, model: RecSpec, found: Mapping[str, Reuse]) -> RecSpec:
    names = [table.name for table in model.tables]
    for pattern in found:
        if not any(fnmatchcase(name, pattern) for name in names):
            section.refuse("lookups", "the file names a table that the model has not", pattern,
                           f"names and patterns, e.g. {names[0]} or *")  # fmt: skip

    def apply(table: Table) -> Table:
        for pattern, reuse in found.items():
            if fnmatchcase(table.name, pattern):
                return replace(table, distinct=reuse.distinct, reuse=reuse.bins)
        return table

    return replace(model, tables=tuple(map(apply, model.tables)))


def read_reuse(path: Path) -> dict[str, Reuse]:
    """Returns the measured reuse in a file, by pattern of table names. Raises FileFormatError."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise FileFormatError(Problem(what="not a text file in UTF-8", where=str(path))) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"cannot read the file of lookups: {reason or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    if "Histogram of col sizes" in text:
        return {"*": read_histogram(text, str(path))}
    return _read_csv(text, str(path))


def read_histogram(text: str, where: str) -> Reuse:
    """Returns the first reuse histogram of a dlrm_datasets statistics file.

    A bin (a, b] holds the rows that were read more than a and at most b times.
    """
    total, unique = (_count(text, word, where) for word in ("indices", "unique cols"))
    section = text.partition("Histogram of col sizes:")[2]
    rows, _, rest = section.partition("Ratio of index distribution")
    row_shares, lookup_shares = (_shares(part.partition("\n[")[0]) for part in (rows, rest))
    if not row_shares or len(row_shares) != len(lookup_shares):
        raise FileFormatError(Problem(what="no reuse histogram in the file", where=where))
    bins = tuple(reversed(list(zip(row_shares, lookup_shares, strict=True))))
    kept = tuple((rows, lookups) for rows, lookups in bins if rows or lookups)
    if (
        unique > total
        or not kept
        or not all(_sums_to_one(column) for column in zip(*kept, strict=True))
    ):
        what = "the histogram is damaged: more different rows than lookups, or shares that do not "
        raise FileFormatError(Problem(what=what + "add up to 1", where=where))
    return Reuse(distinct=unique / total, bins=kept)


def _sums_to_one(shares: Sequence[float]) -> bool:
    return all(share <= 1.0 for share in shares) and abs(sum(shares) - 1.0) < 0.05


def _count(text: str, word: str, where: str) -> float:
    match = re.search(rf"# of {word}: *(\d+(?:\.\d+)?)", text)
    if match is None or float(match[1]) <= 0:
        raise FileFormatError(Problem(what=f"no number of {word} in the file", where=where))
    return float(match[1])


def _shares(text: str) -> list[float]:
    found = re.findall(r"^\(\d+[^:]*: *(\d*\.?\d+|\d+\.) *$", text, re.MULTILINE)
    return [float(value) for value in found]


def _read_csv(text: str, where: str) -> dict[str, Reuse]:
    reader = csv.DictReader(text.splitlines())
    try:
        names: Sequence[str] = reader.fieldnames or ()
        rows = list(reader)
    except csv.Error as error:
        raise FileFormatError(Problem(what=f"not a CSV file: {error}", where=where)) from None
    missing = [column for column in _COLUMNS if column not in names]
    if missing:
        what = f"no column {missing[0]}"
        allowed = f"{', '.join(_COLUMNS)}, or a statistics file of dlrm_datasets"
        raise FileFormatError(Problem(what=what, where=where, allowed=allowed))
    found: dict[str, Reuse] = {}
    problems: list[Problem] = []
    for line, row in enumerate(rows, 2):
        lookups, distinct = as_number(row["lookups"]), as_number(row["distinct"])
        if lookups is None or distinct is None or not 0 < distinct <= lookups:
            what = "needs lookups and, of them, at least one and at most all distinct"
            value = f"lookups {row['lookups']}, distinct {row['distinct']}"
            problems.append(Problem(what=what, where=f"{where}, line {line}", value=value))
            continue
        if row["table"] in found:
            what = "the table is given twice"
            problems.append(Problem(what=what, where=f"{where}, line {line}", value=row["table"]))
        found[str(row["table"])] = Reuse(distinct=distinct / lookups)
    if problems or not found:
        nothing = Problem(what="no table in the file", where=where)
        raise FileFormatError(problems[:20] or [nothing])
    return found
