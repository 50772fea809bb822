"""Typed values out of the mapping of a data file; problems are collected, not raised at once."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from foretrain.errors import FileFormatError, Problem, nearest


class Fields:
    """Reads the keys of one table and remembers which were read and what is wrong.

    A reader returns a harmless placeholder where the value is bad; `raise_problems` ends it.
    """

    def __init__(
        self, data: object, *, where: str, prefix: str = "", problems: list[Problem] | None = None
    ) -> None:
        self.where = where
        self.prefix = prefix
        self.problems = [] if problems is None else problems
        self._read: set[str] = set()
        self.data: Mapping[str, Any] = {}
        if isinstance(data, Mapping):
            self.data = cast("Mapping[str, Any]", data)
        else:
            self.problem("not a table of keys", "", data, allowed="key = value")

    def problem(
        self, what: str, key: str, value: object = None, *, allowed: str = "", way_out: str = ""
    ) -> None:
        """Adds one problem with the file and the full key."""
        path = f"{self.prefix}{key}".rstrip(".")
        where = f"{self.where}, key {path!r}" if path else self.where
        text = repr(value) if isinstance(value, float) else value  # nan prints as nan
        self.problems.append(
            Problem(what=what, where=where, value=text, allowed=allowed, way_out=way_out)
        )

    def _take(self, key: str, default: object, expected: str) -> object:
        self._read.add(key)
        if key in self.data:
            return self.data[key]
        if default is None:
            self.problem("missing", key, allowed=expected)
        return default

    def text(self, key: str, *, allowed: Collection[str] = (), default: str | None = None) -> str:
        """Returns a text, one of `allowed` where given."""
        expected = ", ".join(allowed) or "a text"
        value = self._take(key, default, expected)
        if value is None:
            return ""
        if not isinstance(value, str) or (default is None and not value.strip()):
            self.problem("not a text", key, value, allowed=expected)
            return ""
        if allowed and value not in allowed:
            self.problem("unknown word", key, value, allowed=expected)
        return value

    def number(self, key: str, *, default: float | None = None, least: float = 0.0) -> float:
        """Returns a finite number above 0, or of at least `least` where that is given."""
        expected = f"a number of at least {least:g}" if least else "a number above 0"
        value = self._take(key, default, expected)
        if value is None:
            return 1.0
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(cast("float", value)):
            self.problem("not a finite number", key, value, allowed=expected)
            return 1.0
        number = float(cast("float", value))
        if number < least or (number == 0.0 and default != 0.0):
            self.problem("out of range", key, value, allowed=expected)
            return 1.0
        return number

    def count(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """Returns a whole number of at least `least`."""
        expected = f"a whole number of at least {least}"
        value = self._take(key, default, expected)
        if value is None:
            return least
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.problem("not a valid count", key, value, allowed=expected)
            return least
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Returns true or false."""
        value = self._take(key, default, "true, false")
        if not isinstance(value, bool):
            self.problem("not a flag", key, value, allowed="true, false")
            return default
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of texts; absent = none."""
        value = self._take(key, (), "a list of texts")
        good = isinstance(value, list | tuple)
        items = list(cast("Iterable[object]", value)) if good else []
        if not good or not all(isinstance(item, str) for item in items):
            self.problem("not a list of texts", key, cast("object", value), allowed='["a", "b"]')
            return ()
        return tuple(str(item) for item in items)

    def has(self, key: str) -> bool:
        """Returns whether the key stands in the table."""
        return key in self.data

    def raw(self, key: str) -> object:
        """Returns the value as it stands (None when absent)."""
        self._read.add(key)
        return self.data.get(key)

    def table(self, key: str) -> Fields:
        """Returns the reader of a sub-table; absent = empty."""
        self._read.add(key)
        prefix = f"{self.prefix}{key}."
        return Fields(
            self.data.get(key, {}), where=self.where, prefix=prefix, problems=self.problems
        )

    def refuse_unknown(self, known: Collection[str] = ()) -> None:
        """Adds a problem for every key that nobody read; `known` are the keys there could be."""
        names = sorted({*self._read, *known})
        for key in self.data:
            if key not in names:
                way_out = nearest(str(key), names)
                self.problem("unknown key", key, allowed=", ".join(names), way_out=way_out)

    def raise_problems(self) -> None:
        """Raises FileFormatError when anything was wrong."""
        if self.problems:
            raise FileFormatError(self.problems)


def read_toml_file(path: Path) -> Mapping[str, Any]:
    """Returns the content of a TOML file of the user.

    Raises:
        FileFormatError: the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    except ValueError as error:  # not TOML, not UTF-8, or not a path
        what = f"not TOML: {error}"
    except RecursionError:
        what = "nested too deeply"
    raise FileFormatError(Problem(what=what, where=str(path)))
