"""Plain-text tables whose rounded parts still add up to their rounded total."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor


def round_to_sum(values: Sequence[float], decimals: int) -> list[float]:
    """Returns `values` rounded to `decimals` so that they add up to their rounded sum.

    Largest remainder method: every value is rounded down, and the units that are missing from the
    rounded sum go to the values with the largest remainders (earlier ones first when equal). No
    value moves by a whole unit or more.
    """
    unit = 10.0**decimals
    # The tiny lift keeps a value like 0.3 * 10 = 2.9999999999999996 on its own digit.
    scaled = [value * unit + 1e-9 for value in values]
    floors = [floor(value) for value in scaled]
    missing = round(sum(values) * unit) - sum(floors)
    order = sorted(range(len(values)), key=lambda i: (floors[i] - scaled[i], i))
    for i in order[:missing]:
        floors[i] += 1
    return [whole / unit for whole in floors]


def decimals_for(total: float, digits: int = 4) -> int:
    """Returns how many decimals show `total` with about `digits` significant digits (0 to 4)."""
    decimals, size = digits - 1, abs(total)
    while size >= 10.0 and decimals > 0:
        size /= 10.0
        decimals -= 1
    return min(decimals, 4)


def table(
    rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), indent: str = "  "
) -> list[str]:
    """Returns the lines of an aligned table; columns in `left` are left-aligned, others right.

    Rows may be shorter than the widest one; trailing blanks are cut.
    """
    if not rows:
        return []
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def parts_table(
    parts: Sequence[tuple[str, float]], *, unit: str, total_name: str, decimals: int | None = None
) -> list[str]:
    """Returns a table of parts with their share in %, ending in a total that is their sum.

    Values are given in `unit` already. Both columns are rounded so that they add up. Parts that
    would print as zero are left out (they are zero in the sum as well).
    """
    total = sum(value for _, value in parts)
    digits = decimals_for(total) if decimals is None else decimals
    values = round_to_sum([value for _, value in parts], digits)
    shares = round_to_sum([100.0 * value / total if total else 0.0 for _, value in parts], 1)
    rows: list[tuple[str, str, str]] = [("", unit, "%")]
    for (name, _), value, share in zip(parts, values, shares, strict=True):
        if value or share:
            rows.append((name, f"{value:.{digits}f}", f"{share:.1f}"))
    rows.append((total_name, f"{sum(values):.{digits}f}", f"{sum(shares):.1f}"))
    lines = table(rows)
    rule = "  " + "-" * max(len(line) - 2 for line in lines)
    return [*lines[:-1], rule, lines[-1]]
