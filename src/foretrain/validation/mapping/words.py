"""What the mapping functions share: the way to say "not modelled" and to list assumptions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class Unsupported(Exception):  # noqa: N818 - no fault: a row that nothing is predicted for
    """Ends the mapping of one row with the reason why it is not predicted."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(slots=True)
class Assumed:
    """The choices made for a row where its source says nothing, in the order they were made."""

    lines: list[str] = field(default_factory=list[str])

    def add(self, line: str) -> None:
        """Adds one line."""
        self.lines.append(line)


def has_word(text: str, *words: str) -> bool:
    """Returns whether one of the words stands in `text`, whatever its case."""
    lower = text.lower()
    return any(word in lower for word in words)


def first_number(pattern: str, text: str) -> float | None:
    """Returns the first group of a pattern in `text` as a number, None without a match."""
    match = re.search(pattern, text, re.IGNORECASE)
    return float(match[1]) if match else None
