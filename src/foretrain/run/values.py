"""Typed reading of one section of a run file: every problem is collected, none stops the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foretrain.errors import Problem, nearest

#: The words people write for yes and no. YAML turns the plain ones into booleans by itself.
YES = ("true", "yes", "on", "1", "enabled")
NO = ("false", "no", "off", "0", "none", "disabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The fields below `path`; wrong ones are added to `problems` and read as None."""

    path: str
    values: Mapping[str, Any]
    problems: list[Problem]

    def where(self, key: str) -> str:
        """Returns the dotted path of a field."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Returns whether the field is given (null counts as absent)."""
        return self.values.get(key) is not None

    def integer(self, key: str, *, low: int = 1, high: int | None = None) -> int | None:
        """Returns a whole number in [low, high], or None when absent or wrong."""
        value = self.values.get(key)
        if value is None:
            return None
        number = as_integer(value)
        allowed = f"a whole number >= {low}" if high is None else f"{low} to {high}"
        if number is None:
            return self.refuse(key, "must be a whole number", value, allowed)
        if number < low or (high is not None and number > high):
            return self.refuse(key, "out of range", value, allowed)
        return number

    def number(self, key: str, *, above: float = 0.0) -> float | None:
        """Returns a finite number greater than `above`, or None when absent or wrong."""
        value = self.values.get(key)
        if value is None:
            return None
        number = as_number(value)
        if number is None or number <= above:
            what = "must be a number" if number is None else f"must be above {above:g}"
            return self.refuse(key, what, value, f"a finite number > {above:g}")
        return number

    def flag(self, key: str) -> bool | None:
        """Returns a yes or no, or None when absent or wrong."""
        value = self.values.get(key)
        if value is None:
            return None
        truth = as_flag(value)
        if truth is None:
            return self.refuse(key, "must be true or false", value, "true, false")
        return truth

    def choice(
        self, key: str, allowed: Iterable[str], synonyms: Mapping[str, str] | None = None
    ) -> str | None:
        """Returns one of the allowed words (synonyms resolved), or None when absent or wrong."""
        value = self.values.get(key)
        if value is None:
            return None
        words = tuple(allowed)
        word = str(value).strip().lower()
        for form in (word, word.replace("_", "-"), word.replace("-", "_")):
            found = (synonyms or {}).get(form, form)
            if found in words:
                return found
        known = [*words, *(synonyms or {})]
        return self.refuse(key, "unknown word", value, ", ".join(words), nearest(word, known))

    def refuse(self, key: str, what: str, value: Any, allowed: str = "", way_out: str = "") -> None:
        """Adds a problem about one field."""
        self.problems.append(
            Problem(what=what, where=self.where(key), value=value, allowed=allowed, way_out=way_out)
        )


def as_integer(value: Any) -> int | None:
    """Returns a whole number given as int, integral float or digits, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def as_number(value: Any) -> float | None:
    """Returns a finite number given as number or text, else None (NaN and infinity too)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_flag(value: Any) -> bool | None:
    """Returns a truth value given as boolean, 0 or 1, or one of the usual words, else None."""
    word = str(value).strip().lower()
    if word in YES:
        return True
    return False if word in NO else None
