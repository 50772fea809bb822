"""Values that would do in place of one that does not: divisors, even stages, nearest choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log

from foretrain.errors import Problem


def divisors(number: int) -> list[int]:
    """Returns the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def even_stages(layers: int, chunks: int) -> list[int]:
    """Returns layers per virtual stage, as even as possible, the longer stages first."""
    base, extra = divmod(layers, chunks)
    return [base + 1] * extra + [base] * (chunks - extra)


def nearest_choice(value: int, allowed: Sequence[int]) -> int:
    """Returns the allowed value with the smallest ratio to `value`, the smaller one of two."""

    def distance(choice: int) -> tuple[float, int]:
        return abs(log(choice) - log(value)), choice

    return min(allowed, key=distance)


def choice_of(what: str, where: str, value: int, allowed: Iterable[int], key: str) -> Problem:
    """Returns the problem of a value that is none of `allowed`, with the nearest that is."""
    options = list(allowed)
    return Problem(
        what=what,
        where=where,
        value=value,
        allowed=", ".join(str(option) for option in options),
        way_out=f"nearest: {key} {nearest_choice(value, options)}" if options else "",
    )


def multiple_of(what: str, where: str, value: int, unit: int) -> Problem:
    """Returns the problem of a value that is no multiple of `unit`, with the two nearest."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    near = f"{below} or {above}" if below else f"{above}"
    return Problem(
        what=what,
        where=where,
        value=value,
        allowed=f"multiples of {unit}",
        way_out=f"nearest: {near}",
    )


def with_way_out(problem: Problem, more: str) -> Problem:
    """Returns the same problem with one more way out."""
    return Problem(
        what=problem.what,
        where=problem.where,
        value=problem.value,
        allowed=problem.allowed,
        way_out=", ".join(part for part in (problem.way_out, more) if part),
    )
