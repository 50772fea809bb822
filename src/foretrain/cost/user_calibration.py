"""The user's calibration file (TOML): what was measured on their machines; it wins.

`foretrain calibrate` writes it, `--calibration FILE` reads it. [[network.curve]] holds measured
curves of collectives; other tables belong to other providers and are left alone here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from foretrain.cost.network.measured import MeasuredCurve, curve_from_table, curve_to_table
from foretrain.cost.toml_text import toml_lines
from foretrain.errors import FileFormatError, Problem

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCalibration:
    """What a calibration file holds for collectives, and where it came from."""

    curves: tuple[MeasuredCurve, ...] = ()
    path: str = ""


_current: ContextVar[UserCalibration] = ContextVar("measured_by_user", default=UserCalibration())  # noqa: B039


@contextmanager
def measured_by_user(calibration: UserCalibration) -> Generator[None]:
    """Prices collectives with the user's curves within the block, where they fit a group."""
    token = _current.set(calibration)
    try:
        yield
    finally:
        _current.reset(token)


def current_calibration() -> UserCalibration:
    """Returns what holds within `measured_by_user`, an empty calibration outside."""
    return _current.get()


def read_calibration(path: Path) -> UserCalibration:
    """Returns the measured curves of a calibration file.

    Raises:
        FileFormatError: not readable, not TOML, or an entry that lacks a value.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        what = f"cannot read: {error.strerror or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(Problem(what=f"not TOML: {error}", where=str(path))) from None
    network: object = data.get("network", {})
    entries: object = (
        cast("dict[str, Any]", network).get("curve", []) if isinstance(network, dict) else None
    )
    if not isinstance(entries, list):
        what = "[[network.curve]] holds no list of curves"
        raise FileFormatError(Problem(what=what, where=str(path)))
    curves: list[MeasuredCurve] = []
    problems: list[Problem] = []
    for number, entry in enumerate(cast("list[Any]", entries), start=1):
        try:
            curves.append(curve_from_table(entry))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            where = f"{path}, [[network.curve]] number {number}"
            what = f"missing or malformed: {error}"
            way_out = "write it again with `foretrain calibrate network`"
            problems.append(Problem(what=what, where=where, way_out=way_out))
    if problems:
        raise FileFormatError(problems)
    return UserCalibration(curves=tuple(curves), path=str(path))


def calibration_text(curves: Sequence[MeasuredCurve]) -> str:
    """Returns the content of a calibration file with these curves."""
    lines = [
        "# Calibration of foretrain, read by --calibration; sizes in bytes of nccl-tests.",
        f"schema = {SCHEMA}",
    ]
    for curve in curves:
        lines += ["", "[[network.curve]]"]
        lines += toml_lines(curve_to_table(curve))
    return "\n".join(lines) + "\n"
