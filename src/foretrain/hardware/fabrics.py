"""The fabrics that join nodes: one file of catalog/fabrics each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, Problem, nearest
from foretrain.hardware.device import FABRICS
from foretrain.hardware.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a fabric is. `direct`: NICs reach device memory without a copy by the host.

    What it costs (latency, share of the line rate) is the cost model's business.
    """

    name: str
    description: str
    aliases: tuple[str, ...]
    direct: bool
    source: str


@cache
def list_fabrics() -> tuple[Fabric, ...]:
    """Returns all fabrics of the catalog, sorted by name."""
    return tuple(_fabric(name) for name in names("fabrics"))


def fabric_name(text: str) -> str:
    """Returns the fabric that a person means, e.g. 'ib' for 'InfiniBand'.

    Raises:
        CatalogError: the word is unknown; the nearest fabric is named.
    """
    words = {word: fabric.name for fabric in list_fabrics() for word in fabric.aliases}
    words |= {name: name for name in FABRICS}
    key = re.sub(r"[\s_]+", "-", text.strip().lower())
    if key not in words:
        raise CatalogError(
            Problem(
                what="unknown fabric",
                value=text,
                allowed=", ".join(FABRICS),
                way_out=nearest(key, words),
            )
        )
    return words[key]


def _fabric(name: str) -> Fabric:
    fields = Fields(read_toml("fabrics", name), where=f"catalog/fabrics/{name}.toml")
    fabric = Fabric(
        name=fields.text("name", allowed=(name,)),
        description=fields.text("description"),
        aliases=fields.texts("aliases"),
        direct=fields.flag("direct", default=True),
        source=fields.text("source"),
    )
    fields.refuse_unknown()
    fields.raise_problems()
    return fabric
