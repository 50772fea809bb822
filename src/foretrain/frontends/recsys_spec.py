"""Reading a recommendation model: `{family: dlrm, tables: ..., bottom: [...], top: [...]}`.

Tables are a list of `{rows, dim, pooling, name, count}`, or a mapping of columns for tables of one
kind: `{rows: [1000, 40_000_000], dim: 128, pooling: [1, 12]}`; `count` repeats a table. How its
rows are read may stand with a table (zipf, or distinct and reuse) or in `training.lookups`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from foretrain.errors import InputError, Problem, nearest
from foretrain.frontends.spec import RecSpec, Table

INTERACTIONS = ("dot", "cat", "dcn")
LOSSES = ("bce", "mse")
_KEYS = ("tables", "dense", "bottom", "top", "interaction", "cross_layers", "cross_rank", "loss")
_TABLE_KEYS = ("rows", "dim", "pooling", "name", "count", "zipf", "distinct", "reuse")
_LARGEST = 1 << 40  # rows of a table; more are a typing error
_MOST_TABLES = 2000
#: The largest exponent of popularity that makes sense: nearly all lookups find one row.
MOST_ZIPF = 5.0


def is_rec_family(family: object) -> bool:
    """Returns whether a model of this family is a recommendation model."""
    return isinstance(family, str) and family.strip().lower() == "dlrm"


def rec_spec_from_mapping(mapping: Mapping[str, Any], *, where: str = "model") -> RecSpec:
    """Returns the RecSpec of an inline model, a model file or a catalog entry.

    Raises InputError with every problem found.
    """
    problems = [
        Problem(what="unknown key", where=f"{where}.{key}", allowed=", ".join(_KEYS),
                way_out=nearest(key, _KEYS))
        for key in mapping
        if key not in (*_KEYS, "family", "name", "layers")
    ]  # fmt: skip
    reader = _Reader(mapping, where, problems)
    values: dict[str, Any] = {
        "dense": reader.whole("dense"),
        "bottom": reader.widths("bottom"),
        "top": reader.widths("top"),
        "interaction": reader.word("interaction", INTERACTIONS, "dot"),
        "loss": reader.word("loss", LOSSES, "bce"),
        "cross_layers": reader.whole("cross_layers", 3),
        "cross_rank": reader.whole("cross_rank", 512),
    }
    tables = _tables(mapping.get("tables"), f"{where}.tables", problems)
    if not problems:
        problems += _together(values, tables, where)
    if problems:
        raise InputError(problems)
    name = str(mapping.get("name") or "dlrm")
    return RecSpec(name=name, family="dlrm", tables=tables, **values)


def _together(values: Mapping[str, Any], tables: Sequence[Table], where: str) -> list[Problem]:
    """Returns what is wrong between fields that are each right on their own."""
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems = [
        Problem(what="two tables have one name", where=f"{where}.tables", value=name)
        for name in twice
    ]
    width = values["bottom"][-1]
    other = next((table for table in tables if table.dim != width), None)
    if values["interaction"] == "dot" and other is not None:
        problems.append(
            Problem(
                what=f"a dot interaction needs tables as wide as the bottom MLP's output, {width}",
                where=f"{where}.tables.{other.name}.dim", value=other.dim,
                way_out="set dim or the last width of bottom, or interaction: cat",
            )
        )  # fmt: skip
    return problems


def _tables(given: object, where: str, problems: list[Problem]) -> tuple[Table, ...]:
    allowed = "a list of {rows, dim, pooling}, or {rows: [...], dim: ..., pooling: ...}"
    if isinstance(given, Mapping):
        rows: list[object] = [*_columns(cast("Mapping[str, Any]", given), where, problems)]
    elif isinstance(given, list | tuple) and given:
        rows = list(cast("Sequence[Any]", given))
    else:
        problems.append(Problem(what="missing: the embedding tables", where=where, allowed=allowed))
        return ()
    tables: list[Table] = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            problems.append(Problem(what="must be a mapping", where=f"{where}[{i}]", value=row,
                                    allowed=", ".join(_TABLE_KEYS)))  # fmt: skip
            continue
        tables += _repeated(cast("Mapping[str, Any]", row), f"{where}[{i}]", len(tables), problems)
        if len(tables) > _MOST_TABLES:
            problems.append(Problem(what="too many tables", where=where,
                                    allowed=f"up to {_MOST_TABLES}"))  # fmt: skip
            break
    return tuple(tables)


def _columns(given: Mapping[str, Any], where: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """Columns become rows: lists have one entry per table, single values hold for all."""
    lists = {
        key: list(cast("Sequence[Any]", value))
        for key, value in given.items()
        if isinstance(value, list | tuple)
    }
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        what = "the lists have different lengths"
        value = ", ".join(f"{key} {len(values)}" for key, values in lists.items())
        problems.append(Problem(what=what, where=where, value=value))
        return []
    if lengths == {0}:
        problems.append(Problem(what="the lists are empty: no table", where=where))
    single = {key: value for key, value in given.items() if key not in lists}
    return [
        {**single, **{key: values[i] for key, values in lists.items()}}
        for i in range(next(iter(lengths), 1))
    ]


def _repeated(
    row: Mapping[str, Any], where: str, first: int, problems: list[Problem]
) -> list[Table]:
    """The tables of one entry; none when something is wrong with it."""
    before = len(problems)
    problems += [
        Problem(what="unknown key", where=f"{where}.{key}", allowed=", ".join(_TABLE_KEYS),
                way_out=nearest(str(key), _TABLE_KEYS))
        for key in row
        if key not in _TABLE_KEYS
    ]  # fmt: skip
    reader = _Reader(row, where, problems)
    rows, dim = reader.whole("rows", high=_LARGEST), reader.whole("dim", high=65536)
    count = reader.whole("count", 1, high=_MOST_TABLES)
    pooling = reader.number("pooling", 1.0, high=1e6)
    zipf = reader.number("zipf", 0.0, high=MOST_ZIPF)
    distinct = reader.number("distinct", 1.0) if row.get("distinct") is not None else None
    reuse = reader.pairs("reuse")
    name = str(row.get("name", ""))
    if name and not all(c.isalnum() or c in "_-" for c in name):
        problems.append(Problem(what="bad name of a table", where=f"{where}.name", value=name,
                                allowed="letters, digits, _ and -"))  # fmt: skip
    if len(problems) > before:
        return []
    return [
        Table(
            name=(f"{name}_{i}" if count > 1 else name) if name else f"t{first + i}",
            rows=rows, dim=dim, pooling=pooling, zipf=zipf, distinct=distinct, reuse=reuse,
        )
        for i in range(count)
    ]  # fmt: skip


class _Reader:
    """Reads fields of one mapping; what is wrong is added to `problems` and read as a stand-in."""

    def __init__(self, values: Mapping[str, Any], where: str, problems: list[Problem]) -> None:
        self.values, self.where, self.problems = values, where, problems

    def _refuse(self, key: str, what: str, allowed: str) -> None:
        value = self.values.get(key)
        self.problems.append(
            Problem(what=what, where=f"{self.where}.{key}", value=value, allowed=allowed)
        )

    def whole(self, key: str, default: int | None = None, high: int = 1_000_000) -> int:
        """Returns a whole number above 0; without a default it is required."""
        value = self.values.get(key, default)
        if _whole(value, high):
            return cast("int", value)
        what = "missing" if value is None else "must be a whole number above 0"
        self._refuse(key, what, f"1 to {high}")
        return 1

    def number(self, key: str, default: float, *, high: float = 1.0) -> float:
        """Returns a number above 0 (0 only where that is the default), up to `high`."""
        value = self.values.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and (0 < float(value) <= high or float(value) == default):
            return float(value)
        self._refuse(key, "must be a number", f"above 0, up to {high:g}")
        return default

    def pairs(self, key: str) -> tuple[tuple[float, float], ...]:
        """Returns pairs of shares: of the rows that are read and of the lookups."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else []
        pairs = [
            tuple(float(share) for share in cast("Sequence[Any]", item))
            for item in items
            if isinstance(item, list | tuple)
            and len(cast("Sequence[Any]", item)) == 2
            and all(_share(share) for share in cast("Sequence[Any]", item))
        ]
        if not items or len(pairs) != len(items):
            allowed = "[[share of the rows, share of the lookups], ...], hottest rows first"
            self._refuse(key, "must be pairs of shares", allowed)
            return ()
        return cast("tuple[tuple[float, float], ...]", tuple(pairs))

    def widths(self, key: str) -> tuple[int, ...]:
        """Returns the widths of the layers of an MLP."""
        value = self.values.get(key)
        items = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else []
        if items and all(_whole(item, 1_000_000) for item in items):
            return tuple(items)
        what = "missing" if value is None else "must be a list of whole numbers above 0"
        self._refuse(key, what, "the widths of its layers, e.g. [512, 256, 128]")
        return (1,)

    def word(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """Returns one of the allowed words."""
        value = str(self.values.get(key, default)).strip().lower()
        if value not in allowed:
            self._refuse(key, "unknown word", ", ".join(allowed))
        return value


def _share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _whole(value: object, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= high
