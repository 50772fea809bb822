"""How popular the rows of Criteo's tables are: `zipf` of those models in catalog/models/dlrm.toml.

    python studies/recsys/criteo_popularity.py

NVIDIA publishes the sizes of the tables of Criteo 1TB when rows that occur less than 15 times (DLRM
small) or less than 3 times (DLRM large) share one row. Under a power law of exponent s the number
of rows that occur at least f times is proportional to f ** (-1 / s), so

    s = log(15 / 3) / log(rows at 3 / rows at 15)

of each table; both models list the same tables in another order, so they are paired by size. The
median over the tables of more than a million rows, which hold nearly all of what does not fit in a
cache, is the exponent of all. No step time is used.
"""

from __future__ import annotations

import sys
from math import log
from statistics import median

from foretrain.frontends.catalog import find_model
from foretrain.frontends.spec import RecSpec

LARGE = 1_000_000


def sizes(name: str) -> list[int]:
    """Returns the rows of a model's tables, largest first."""
    spec = find_model(name)
    if not isinstance(spec, RecSpec):
        raise TypeError(name)
    return sorted((table.rows for table in spec.tables), reverse=True)


def main() -> None:
    """Prints the exponent of each large table and their median."""
    found: list[float] = []
    for rare, frequent in zip(sizes("dlrm-criteo-large"), sizes("dlrm-criteo-small"), strict=True):
        if frequent > LARGE:
            found.append(log(15 / 3) / log(rare / frequent))
            sys.stdout.write(f"{rare:>11,} -> {frequent:>10,} rows: s = {found[-1]:.3f}\n")
    sys.stdout.write(f"median {median(found):.2f}\n")


if __name__ == "__main__":
    main()
