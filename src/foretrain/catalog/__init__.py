"""The catalog: data files of the package, read once.

`names("devices")` lists what a folder holds, `read_toml("devices", "h100-sxm")` reads one file.
What the content means is decided by the package that owns it (hardware, frontends, run, cost).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from foretrain.errors import CatalogError, FileFormatError, Problem, nearest


@cache
def names(folder: str, suffix: str = ".toml") -> tuple[str, ...]:
    """Returns the names in one folder of the catalog (file names without `suffix`), sorted."""
    root = files(__name__).joinpath(folder)
    if not root.is_dir():
        return ()
    found = (entry.name for entry in root.iterdir() if entry.name.endswith(suffix))
    return tuple(sorted(name.removesuffix(suffix) for name in found))


@cache
def read_bytes(path: str) -> bytes:
    """Returns the content of one data file, e.g. 'graphs/bert.json.gz'.

    Raises:
        CatalogError: the package holds no such file.
    """
    try:
        return files(__name__).joinpath(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise CatalogError(Problem(what="the catalog holds no such file", value=path)) from None


@cache
def read_toml(folder: str, name: str) -> Mapping[str, Any]:
    """Returns the content of `folder/name.toml` (folder "" is the top); do not change it.

    Raises:
        CatalogError: the folder holds no such name; the nearest one is named.
        FileFormatError: the file is not TOML.
    """
    if folder and name not in names(folder):
        problem = Problem(
            what=f"unknown name in catalog/{folder}",
            value=name,
            way_out=nearest(name, names(folder)),
        )
        raise CatalogError(problem)
    path = f"{folder}/{name}.toml" if folder else f"{name}.toml"
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = Problem(what=f"not a TOML file: {error}", where=f"catalog/{path}")
        raise FileFormatError(problem) from None
