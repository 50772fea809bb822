"""Several calibration files of a user as one: a later file wins where both measured the same."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretrain.cost.calibration import Entries, constants_of_user
from foretrain.cost.network.measured import MeasuredCurve
from foretrain.cost.operator_constants import read_operators
from foretrain.cost.user_calibration import UserCalibration, measured_by_user, read_calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFiles:
    """Constants of operators by table of the catalog, and curves of collectives.

    `made_for`: file -> patterns of the devices that its constants of operators are made for.
    """

    entries: Entries
    network: UserCalibration
    made_for: Mapping[str, frozenset[str]]


def read_files(paths: Sequence[str | Path]) -> UserFiles:
    """Returns what calibration files hold together.

    Of entries for one device, dtype and kernel a lookup takes the first, so those of later files
    stand first; of curves of one group and collective only the last file's are kept.

    Raises:
        FileFormatError: one of the files cannot be read or holds a broken entry.
    """
    entries: dict[str, list[Mapping[str, Any]]] = {}
    curves: dict[tuple[object, ...], list[MeasuredCurve]] = {}
    made_for: dict[str, frozenset[str]] = {}
    sources: list[str] = []
    for path in map(Path, paths):
        own = read_operators(path)
        made_for[str(path)] = frozenset(
            name for items in own.values() for item in items for name in item["devices"]
        )
        for table, items in own.items():
            entries[table] = [*items, *entries.get(table, [])]
        here: dict[tuple[object, ...], list[MeasuredCurve]] = {}
        for curve in read_calibration(path).curves:
            here.setdefault(_measured_on(curve), []).append(curve)
        sources += [str(path)] if here else []
        curves.update(here)
    kept = tuple(curve for group in curves.values() for curve in group)
    network = UserCalibration(curves=kept, path=", ".join(sources))
    return UserFiles(entries=entries, network=network, made_for=made_for)


def _measured_on(curve: MeasuredCurve) -> tuple[object, ...]:
    fabric = curve.fabric if curve.nodes > 1 else ""  # within a node it says nothing
    return (curve.device, curve.nodes, curve.ranks, fabric, curve.collective)


@contextmanager
def calibrated_by(files: UserFiles) -> Generator[None]:
    """Within the block, what the files have measured goes before shipped constants."""
    with constants_of_user(files.entries), measured_by_user(files.network):
        yield
