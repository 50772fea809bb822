"""The constants of the cost model: catalog/calibration/*.toml, read lazily and cached.

A constant belongs to a device, a generation, a dtype or a software kernel, never to a model. Every
entry carries a `mark` (measured, fitted, spec, guess) and a `source`. `find` walks from the
constants made for a device to those of its generation and form, its generation, and everything.
Entries of a user's calibration file (operator_constants.py) stand before the shipped ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

from foretrain.errors import FileFormatError, InternalError, Problem

MARKS = ("measured", "fitted", "spec", "guess")


class Named(Protocol):
    """What a lookup needs to know of a device."""

    @property
    def name(self) -> str:
        """Returns the catalog name."""
        ...

    @property
    def generation(self) -> str:
        """Returns the generation, e.g. hopper."""
        ...

    @property
    def form(self) -> str:
        """Returns the form, e.g. sxm."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """One entry that was found for a device.

    `provenance` is the entry's own mark where the constants were made for the device, else guess.
    `row` names the row of intervals.toml: measured, fitted, generation or other.
    """

    values: Mapping[str, Any]
    provenance: str
    row: str

    def number(self, name: str, default: float | None = None) -> float:
        """Returns one constant; InternalError if it is absent and there is no default."""
        value = self.values.get(name, default)
        if value is None:
            raise InternalError(f"calibration entry lacks {name!r}: {self.values.get('source')}")
        return float(value)


Entries = Mapping[str, Sequence[Mapping[str, Any]]]
_user: ContextVar[Entries | None] = ContextVar("user_constants", default=None)


@contextmanager
def constants_of_user(entries: Entries) -> Generator[None]:
    """Puts a user's entries, by name of the table, before the shipped ones within the block."""
    token = _user.set(entries)
    try:
        yield
    finally:
        _user.reset(token)


def tables_of_user(device: str) -> tuple[str, ...]:
    """Returns the tables in which the user's entries (`constants_of_user`) hold for a device."""
    return tuple(
        name.removesuffix("_fitted")
        for name, entries in (_user.get() or {}).items()
        if any(fnmatchcase(device, pattern) for entry in entries for pattern in entry["devices"])
    )


def load(name: str) -> Mapping[str, Any]:
    """Returns the content of catalog/calibration/`name`.toml; FileFormatError if it is broken.

    Its entries begin with those of the user, where there are any (`constants_of_user`).
    """
    shipped, user = _shipped(name), _user.get()
    if user is None or name not in user:
        return shipped
    return {**shipped, "entry": [*user[name], *shipped["entry"]]}


@cache
def _shipped(name: str) -> Mapping[str, Any]:
    path = files("foretrain.catalog").joinpath("calibration", f"{name}.toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise FileFormatError(Problem(what=str(error), where=f"calibration/{name}.toml")) from error


def find(entries: Iterable[Mapping[str, Any]], device: Named) -> Constants | None:
    """Returns the constants that fit `device` best, or None.

    Order: made for this device; same generation and form; same generation; any device.
    """
    best: Mapping[str, Any] | None = None
    best_rank = 4
    for entry in entries:
        rank = _rank(entry, device)
        if rank < best_rank:
            best, best_rank = entry, rank
    if best is None:
        return None
    row = ("own", "generation", "generation", "other")[best_rank]
    mark = str(best.get("mark", "guess"))
    if row == "own":
        row = {"measured": "measured", "fitted": "fitted"}.get(mark, "generation")
        return Constants(values=best, provenance=mark, row=row)
    return Constants(values=best, provenance="guess", row=row)


def _rank(entry: Mapping[str, Any], device: Named) -> int:
    name, generation, form = device.name.lower(), device.generation.lower(), device.form.lower()
    if any(fnmatchcase(name, pattern) for pattern in entry.get("devices", ())):
        return 0
    generations = entry.get("generations", ())
    if any(pattern != "*" and fnmatchcase(generation, pattern) for pattern in generations):
        forms = entry.get("forms")
        if forms is None:
            return 2
        return 1 if any(form.startswith(prefix) for prefix in forms) else 3
    return 3 if "*" in generations else 4
