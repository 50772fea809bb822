"""The errors of foretrain, one tree.

ForetrainError
    InputError            something the user gave is wrong          (exit code 1)
        FileFormatError   a file cannot be read or has bad content
        PlanError         the plan does not fit model, batch or cluster
        CatalogError      an unknown or ambiguous name
    InfeasibleError       a valid plan that does not fit in memory  (exit code 2)
    InternalError         our own fault                             (exit code 3)
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# what people type is shown whole; a damaged file is not poured onto the screen
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 300
_SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 24
_SHORT.maxlevel = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: what, where, which value, what is allowed, the way out."""

    what: str
    where: str = ""
    value: object = None
    allowed: str = ""
    way_out: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.value is not None:
            text += f" (got {_SHORT.repr(self.value)})"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.way_out:
            text += f"; {self.way_out}"
        return text


class ForetrainError(Exception):
    """Base of all errors raised on purpose; `problems` lists every reason."""

    exit_code = 3

    def __init__(self, problems: Problem | str | Sequence[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem(what=problems)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InputError(ForetrainError):
    """Something the user gave is wrong."""

    exit_code = 1


class FileFormatError(InputError):
    """A file cannot be read, or its content is not what it should be."""


class PlanError(InputError):
    """The plan does not fit the model, the batch or the cluster."""


class CatalogError(InputError):
    """A name is unknown or ambiguous."""


class InfeasibleError(ForetrainError):
    """The job is valid but does not fit in memory."""

    exit_code = 2


class InternalError(ForetrainError):
    """A state that foretrain should never reach."""

    exit_code = 3


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'x'?" for the closest known word, or an empty text."""
    close = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""
