"""`foretrain catalog`: what is known, and where each value comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, Problem, nearest

KINDS = ("devices", "models", "clusters", "stacks", "fabrics")
SINGULAR = {kind: kind.removesuffix("s") for kind in KINDS}


def catalog_text(kind: str | None, name: str | None) -> str:
    """Returns the overview (no kind), the list of a kind, or one entry with its sources.

    Raises:
        CatalogError: an unknown kind or name; the nearest one is named.
    """
    if kind is None:
        counts = [f"  {kind:<10} {len(_entries(kind)):>4}" for kind in KINDS]
        return "\n".join(["foretrain catalog KIND [NAME]", "", *counts])
    word = kind.lower()
    word = word if word in KINDS else f"{word}s"
    if word not in KINDS:
        allowed, way_out = ", ".join(KINDS), nearest(kind, KINDS)
        problem = Problem(
            what="unknown kind", where="catalog", value=kind, allowed=allowed, way_out=way_out
        )
        raise CatalogError(problem)
    return _list(word) if name is None else _entry(word, name)


def _entries(kind: str) -> list[str]:
    if kind == "models":
        from foretrain.frontends.catalog import list_models

        return [model.name for model in list_models()]
    return list(names(kind))


def _list(kind: str) -> str:
    from foretrain.report.tables import table

    rows = _LISTS[kind]()
    numbers = ("parameters", "layers", "hidden", "heads")
    left = tuple(
        i for i, word in enumerate(rows[0]) if word not in numbers and not word.endswith(")")
    )
    count = len(rows) - 1
    return "\n".join([f"{count} {kind if count != 1 else SINGULAR[kind]}", *table(rows, left=left)])


def _devices() -> list[list[str]]:
    from foretrain.hardware.names import list_devices

    rows = [["name", "memory (GiB)", "bandwidth (GB/s)", "bf16 (TFLOP/s)", "scale-up (GB/s)"]]
    for device in list_devices():
        peak = device.peak_flops.get("bf16", 0.0) / 1e12
        rows.append(
            [
                device.name,
                f"{device.memory_bytes / 2**30:.1f}",
                f"{device.memory_bandwidth / 1e9:,.0f}",
                f"{peak:,.0f}" if peak else "-",
                f"{device.scaleup_bandwidth / 1e9:,.0f}" if device.scaleup_bandwidth else "-",
            ]
        )
    return rows


def _models() -> list[list[str]]:
    from foretrain.frontends.catalog import list_models
    from foretrain.units import format_count

    rows = [["name", "family", "parameters", "layers", "hidden", "heads"]]
    for model in list_models():
        count = format_count(model.num_parameters) if model.num_parameters else "-"
        size = [
            getattr(model, key, "-") for key in ("layers", "hidden", "heads")
        ]  # images: no hidden
        shape = [str(value) for value in size]
        rows.append([model.name, model.family, count, *shape])
    return rows


def _stacks() -> list[list[str]]:
    from foretrain.run.stacks import load_stack

    stacks = [load_stack(name) for name in names("stacks")]
    return [["name", "preset", "what"], *([s.name, s.preset, s.description] for s in stacks)]


def _clusters() -> list[list[str]]:
    from foretrain.hardware.catalog import list_clusters

    rows = [[c.name, c.cluster.text, c.description] for c in list_clusters()]
    return [["name", "cluster", "what"], *rows]


def _fabrics() -> list[list[str]]:
    from foretrain.hardware.fabrics import list_fabrics

    return [["name", "what"], *([fabric.name, fabric.description] for fabric in list_fabrics())]


_LISTS: Mapping[str, Callable[[], list[list[str]]]] = {
    "devices": _devices,
    "models": _models,
    "stacks": _stacks,
    "clusters": _clusters,
    "fabrics": _fabrics,
}


def _entry(kind: str, name: str) -> str:
    """One entry: every value, and beside it its source."""
    from foretrain.report.tables import table

    data = dict(_data(kind, name))
    sources = cast("Mapping[str, Any]", data.pop("sources", {}))
    rows = [
        [key, str(value), str(sources.get(key, sources.get(key.split(".")[0], "")))]
        for key, value in _flatten(data)
    ]
    return "\n".join([f"{SINGULAR[kind]} {data.get('name', name)}", *table(rows, left=(0, 1, 2))])


def _data(kind: str, name: str) -> Mapping[str, Any]:
    if kind == "models":
        from dataclasses import asdict

        from foretrain.frontends.catalog import find_model

        values = {k: v for k, v in asdict(find_model(name)).items() if v not in (None, ())}
        tables = values.pop("tables", ())
        return values | {f"table {table['name']}": _table_words(table) for table in tables}
    if kind == "devices":
        from foretrain.hardware.names import find_device

        name = find_device(name).name
    return read_toml(kind, name.lower())


def _table_words(table: Mapping[str, Any]) -> str:
    """An embedding table in words."""
    words = f"{table['rows']:,} x {table['dim']}, {table['pooling']:g} lookups per sample"
    return words + (f", popularity zipf {table['zipf']:g}" if table["zipf"] else "")


def _flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flatten(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
