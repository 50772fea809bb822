"""Reading the text that nccl-tests (and rccl-tests) print, as people have it.

Several collectives in one file, old and new column layouts, prefixes that launchers put before
each line, sizes of 0, `N/A` in the error column and NCCL's own lines in between are understood.
The out-of-place columns count. algbw and busbw are checked against bytes and time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from foretrain.cost.network.curve import bus_factor
from foretrain.errors import FileFormatError, Problem
from foretrain.units import GB, US

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
#: Widest first: "reduce" is part of other names.
_NAMES = sorted(COLLECTIVES, key=len, reverse=True)
_PERF = re.compile(rf"\b({'|'.join(_NAMES)})_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,7})\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_NUMBER = r"(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_ROW = re.compile(
    rf"(?:^|\s)(\d{{1,18}})\s+(\d{{1,18}})\s+([a-z]\w*)((?:\s+(?:[a-z]\w*|-?\d+))*?)"
    rf"\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+(\d+|N/A|{_NUMBER})"
    rf"(?:\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+(?:\d+|N/A|{_NUMBER}))?\s*$"
)
#: An hour: no collective lasts longer, the number is damaged.
MOST_US = 3.6e9
#: algbw and busbw are printed with two decimals: half a unit of the last, and 1 % of the value.
_PRINTED, _TOLERANCE = 0.006, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One size: bytes as printed, seconds, and the printed bandwidths in GB/s."""

    num_bytes: int
    seconds: float
    algbw: float
    busbw: float
    line: int


@dataclass(slots=True, kw_only=True)
class Table:
    """One collective of a log: who took part and the samples. `collective` "" until known."""

    collective: str = ""
    ranks: int = 0
    nodes: int = 0
    device: str = ""
    dtype: str = ""
    reduces: bool = False
    mixed: str = ""  # another device among the ranks
    where: str = ""
    samples: list[Sample] = field(default_factory=list[Sample])
    doubts: list[str] = field(default_factory=list[str])


def read_log(path: Path, *, collective: str = "") -> list[Table]:
    """Returns the tables of a log of nccl-tests, each with its collective and group.

    A log that does not name its collective is told by the bandwidths' ratio, the reduction column
    and the file's name; `collective` decides where these leave it open.

    Raises:
        FileFormatError: not readable, no table in it, a table whose collective stays open, or
            whose bandwidths contradict its bytes and times.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        what = f"cannot read: {getattr(error, 'strerror', None) or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    tables = [table for table in _tables(text, str(path)) if table.samples]
    if not tables:
        raise FileFormatError(
            Problem(
                what="no table of nccl-tests",
                where=str(path),
                allowed="lines of size, count, type, [redop], [root], time, algbw, busbw, error",
            )
        )
    problems: list[Problem] = []
    for table in tables:
        table.collective = table.collective or collective or _guess(table, path)
        problems += _check(table)
    if problems:
        raise FileFormatError(problems)
    return tables


def _tables(text: str, where: str) -> list[Table]:
    """The tables in order; a new one starts with its headline or its list of ranks."""
    tables = [Table(where=where)]
    hosts: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        current = tables[-1]
        name = _PERF.search(line)
        if name and "concluded" not in line:
            if current.samples or current.collective:
                current = Table(where=where)
                tables.append(current)
                hosts = set()
            current.collective = COLLECTIVES[name[1]]
            continue
        rank = _RANK.search(line)
        if rank:
            if current.samples:
                current = Table(where=where)
                tables.append(current)
                hosts = set()
            hosts.add(rank[2])
            current.ranks = max(current.ranks, int(rank[1]) + 1)
            device = rank[3].strip()
            if current.device and device != current.device:
                current.mixed = device
            current.nodes, current.device = len(hosts), device
            continue
        row = None if "#" in line else _ROW.search(line)
        if row:
            _add(current, row, number)
    return tables


def _add(table: Table, row: re.Match[str], number: int) -> None:
    """Adds one line of a table; sizes of 0 carry no message."""
    words = row[4].split()
    table.dtype = row[3]
    table.reduces = table.reduces or any(
        word in ("sum", "prod", "max", "min", "avg") for word in words
    )
    if int(row[1]) > 0 and 0.0 < float(row[5]) <= MOST_US:
        table.samples.append(
            Sample(
                num_bytes=int(row[1]),
                seconds=float(row[5]) * US,
                algbw=float(row[6]),
                busbw=float(row[7]),
                line=number,
            )
        )


def _guess(table: Table, path: Path) -> str:
    """The collective of a table without headline: by busbw / algbw, redop, and the file's name."""
    big = max(table.samples, key=lambda sample: sample.num_bytes)
    ratio = big.busbw / big.algbw if big.algbw else 0.0
    fitting = [
        name
        for name in dict.fromkeys(COLLECTIVES.values())
        if abs(ratio / bus_factor(name, max(table.ranks, 2)) - 1.0) < _TOLERANCE
        and table.reduces == (name in ("all_reduce", "reduce_scatter", "reduce"))
    ]
    if len(fitting) == 1:
        return fitting[0]
    stem = re.sub(r"[^a-z]", "", path.name.lower())
    named = [COLLECTIVES[n] for n in _NAMES if n.replace("_", "") in stem]
    return named[0] if named and named[0] in fitting else ""


def _check(table: Table) -> list[Problem]:
    """What is missing, and bandwidths that contradict bytes and times."""
    where = f"{table.where}, line {table.samples[0].line}"
    if not table.collective:
        names = ", ".join(dict.fromkeys(COLLECTIVES.values()))
        what, way_out = "the log does not say which collective it is", "give --collective"
        return [Problem(what=what, where=where, allowed=names, way_out=way_out)]
    if table.ranks < 2:
        what, way_out = "the log does not list its ranks", "keep the lines '#  Rank  0 ...'"
        return [Problem(what=what, where=where, way_out=way_out)]
    if table.mixed:
        what, way_out = "the ranks are on different devices", "measure groups of one device"
        value = f"{table.device}, {table.mixed}"
        return [Problem(what=what, where=where, value=value, way_out=way_out)]
    factor = bus_factor(table.collective, table.ranks)
    wrong: list[Sample] = []
    for sample in table.samples:
        algbw = sample.num_bytes / sample.seconds / GB
        good = _near(sample.algbw, algbw) and _near(sample.busbw, algbw * factor)
        if not good:
            wrong.append(sample)
    if len(wrong) > len(table.samples) / 2:
        first = wrong[0]
        return [
            Problem(
                what=f"algbw and busbw do not follow from bytes and time as a {table.collective} "
                f"of {table.ranks} ranks",
                where=f"{table.where}, line {first.line}",
                value=f"{first.algbw:g}, {first.busbw:g} GB/s",
                allowed=f"{first.num_bytes / first.seconds / GB:.2f}, "
                f"{first.num_bytes / first.seconds / GB * factor:.2f} GB/s",
                way_out="is it another collective, or a part of the ranks only?",
            )
        ]
    for sample in wrong:  # single misprints are left out, and named
        table.samples.remove(sample)
        table.doubts.append(f"line {sample.line}: bandwidth contradicts bytes and time, left out")
    return []


def _near(printed: float, expected: float) -> bool:
    return abs(printed - expected) <= _PRINTED + _TOLERANCE * expected
