"""The links between the devices of one node, as `nvidia-smi topo -m` prints them.

A cell of the matrix names the path between two devices: NV# (a bonded set of # NVLinks), PIX (one
PCIe switch), PXB (several), PHB (a host bridge), NODE (between host bridges of one NUMA node), SYS
(between sockets). From it follow: the route and bottleneck between two devices, the links that a
group's rings use, how many rings NVLink alone carries, and which groups share a link.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations
from pathlib import Path

from foretrain.catalog import names, read_toml
from foretrain.errors import FileFormatError, Problem

#: Paths over PCIe, the nearest first.
PCIE_PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_CELL = re.compile(r"X|NV([1-9]\d{0,2})|PIX|PXB|PHB|NODE|SYS|PSB|SOC")
#: The matrix of a node of 64 devices has some 20 kB.
MAX_FILE_BYTES = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
#: Rings are searched by trying orders up to this group size; larger groups take the fewest links.
_MAX_SEARCH = 8
_MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A physical link: `kind` nvlink, slot (x16 of a device), bridge, socket or nic.

    `ends` are device indices (NVLink: the pair; slot: one) or the number of the bridge or NIC.
    `count` is the number of bonded links.
    """

    kind: str
    ends: tuple[int, ...]
    count: int = 1

    def __str__(self) -> str:
        """Returns e.g. 'nvlink 0-3' or 'socket'."""
        return f"{self.kind} {'-'.join(str(end) for end in self.ends)}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Paths between the devices of a node: `paths[i][j]` is PIX .. SYS or NV#, 'X' for i = j.

    `nics` names the adapters and `nic_paths[k][i]` the path from adapter k to device i. `origin` is
    the file it came from, empty for one of the catalog.
    """

    name: str
    paths: tuple[tuple[str, ...], ...]
    nics: tuple[str, ...] = ()
    nic_paths: tuple[tuple[str, ...], ...] = ()
    origin: str = ""

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return len(self.paths)

    def nvlinks(self, a: int, b: int) -> int:
        """Returns the NVLinks between two devices, 0 for none."""
        word = self.paths[a][b]
        return int(word[2:]) if word.startswith("NV") else 0

    def route(self, a: int, b: int) -> tuple[Link, ...]:
        """Returns the links between two devices, NVLink where there is one."""
        count = self.nvlinks(a, b)
        if count:
            return (Link(kind="nvlink", ends=(min(a, b), max(a, b)), count=count),)
        word = self.paths[a][b]
        links = [Link(kind="slot", ends=(a,)), Link(kind="slot", ends=(b,))]
        if PCIE_PATHS.index(word) >= PCIE_PATHS.index("PHB"):
            bridges = {self._bridge(a), self._bridge(b)}
            links += [Link(kind="bridge", ends=(bridge,)) for bridge in sorted(bridges)]
        if word == "SYS":
            links.append(Link(kind="socket", ends=()))
        return tuple(links)

    def bottleneck(self, a: int, b: int) -> str:
        """Returns the narrowest part of the route: NV#, PIX, PXB, PHB, NODE or SYS."""
        return self.paths[a][b]

    def links(self, members: Sequence[int]) -> Counter[Link]:
        """Returns the links that one ring over `members`, in order, crosses, and how often."""
        used: Counter[Link] = Counter()
        if len(members) > 1:
            for a, b in zip(members, (*members[1:], members[0]), strict=True):
                used.update(self.route(a, b))
        return used

    def sharers(self, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns for every group how many groups use its most wanted link (itself included)."""
        uses = [set(self.links(group)) for group in groups]
        wanted = Counter(link for use in uses for link in use)
        return tuple(max((wanted[link] for link in use), default=1) for use in uses)

    def rings(self, members: Iterable[int]) -> int:
        """Returns how many rings over `members` NVLink alone carries at full link speed.

        A ring uses one direction of one link per hop. Two devices with one link: 1. 0: some member
        is not reached by NVLink, the group falls back to PCIe.
        """
        return _rings(self, tuple(sorted(set(members))))

    def nearest_nics(self, device: int) -> tuple[int, ...]:
        """Returns the adapters with the shortest path to a device (empty: none are listed)."""
        ranks = [PCIE_PATHS.index(paths[device]) for paths in self.nic_paths]
        return tuple(k for k, rank in enumerate(ranks) if rank == min(ranks))

    def _bridge(self, device: int) -> int:
        """Returns the first device behind the same PCIe switches: it names their host bridge."""
        for other in range(self.devices):
            if other == device or self._near(device, other):
                return other
        return device

    def _near(self, a: int, b: int) -> bool:
        if self.paths[a][b] in ("PIX", "PXB"):
            return True
        # NVLink hides the PCIe path: the same nearest adapters tell the same switch
        near = self.nearest_nics(a) if self.nic_paths else ()
        return bool(near) and len(near) < len(self.nics) and near == self.nearest_nics(b)


@lru_cache(maxsize=4096)
def _rings(topology: Topology, members: tuple[int, ...]) -> int:
    if len(members) < 2:
        return 0
    free = {(a, b): topology.nvlinks(a, b) for a in members for b in members if a != b}
    most = min(sum(free[a, b] for b in members if b != a) for a in members)
    if len(members) == 2 or most == 0:
        return most
    if len(members) > _MAX_SEARCH or len(set(free.values())) == 1:
        return most
    first, rest = members[0], members[1:]
    every = (_hops(first, order) for order in permutations(rest))
    orders = [hops for hops in every if all(free[hop] for hop in hops)]
    return _pack(orders, free, most)


def _hops(first: int, order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ring = (first, *order)
    return tuple(zip(ring, (*order, first), strict=True))


def _pack(
    orders: Sequence[tuple[tuple[int, int], ...]], free: dict[tuple[int, int], int], most: int
) -> int:
    """Returns how many of the rings fit on the free links at once; the search is bounded."""
    best, budget = 0, _MAX_STEPS
    stack = [(0, 0, free)]
    while stack and best < most and budget:
        start, count, left = stack.pop()
        for i in range(start, len(orders)):
            if all(left[hop] for hop in orders[i]):
                budget -= 1
                rest = dict(left)
                for hop in orders[i]:
                    rest[hop] -= 1
                stack.append((i, count + 1, rest))
                best = max(best, count + 1)
            if not budget:
                break
    return best


def tile(members: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the sibling groups of a node: translations of `members` that cover it, once each.

    {0, 2} of four devices: {0, 2}, {1, 3}. What no translation covers takes no part.
    """
    first = min(members)
    offsets = sorted(member - first for member in members)
    taken: set[int] = set()
    groups: list[tuple[int, ...]] = []
    for start in range(size):
        group = tuple(start + offset for offset in offsets)
        if group[-1] < size and not taken.intersection(group):
            groups.append(group)
            taken.update(group)
    return tuple(groups)


def read_topology(path: Path) -> Topology:
    """Returns the topology of a file with the output of `nvidia-smi topo -m`.

    Raises:
        FileFormatError: not readable, or not such a matrix.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        what = "not a text file in UTF-8"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        what = f"cannot read: {getattr(error, 'strerror', None) or error}"
        raise FileFormatError(Problem(what=what, where=str(path))) from None
    if len(raw) > MAX_FILE_BYTES:
        what = f"larger than {MAX_FILE_BYTES >> 20} MiB, so hardly the matrix of one node"
        raise FileFormatError(Problem(what=what, where=str(path)))
    return parse_topology(text, where=str(path))


def parse_topology(text: str, *, where: str) -> Topology:
    """Returns the topology in the output of `nvidia-smi topo -m`; other lines are skipped.

    Raises:
        FileFormatError: no matrix, or one whose cells are missing or of unknown words.
    """
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    start = next((i for i, line in enumerate(lines) if _is_head(line.split())), None)
    if start is None:
        raise FileFormatError(
            Problem(
                what="no matrix of `nvidia-smi topo -m`",
                where=where,
                allowed="a line of names (GPU0 GPU1 ...), then one line per device",
            )
        )
    heads = re.findall(r"\S+", re.split(r"CPU Affinity|NUMA Affinity", lines[start])[0])
    table: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for number, line in enumerate(lines[start + 1 :], start=start + 2):
        words = line.split()
        if not words or words[0] not in heads:
            break
        cells = words[1 : 1 + len(heads)]
        bad = [cell for cell in cells if not _CELL.fullmatch(cell)]
        if bad or len(cells) < len(heads):
            problems.append(
                Problem(
                    what=f"expected {len(heads)} paths",
                    where=f"{where}, line {number}",
                    value=", ".join(bad) or f"{len(cells)} cells",
                    allowed="X, NV#, PIX, PXB, PHB, NODE, SYS",
                )
            )
        table[words[0]] = [{"PSB": "PIX", "SOC": "SYS"}.get(cell, cell) for cell in cells]
    if problems:
        raise FileFormatError(problems)
    return _from_table(heads, table, where)


def _is_head(words: Sequence[str]) -> bool:
    """Whether a line names the columns: GPU0 first, and no path after it."""
    return words[:1] == ["GPU0"] and not (len(words) > 1 and _CELL.fullmatch(words[1]))


def _from_table(heads: Sequence[str], table: dict[str, list[str]], where: str) -> Topology:
    gpus = [name for name in heads if re.fullmatch(r"GPU\d+", name)]
    nics = [name for name in heads if name not in gpus]
    missing = [name for name in gpus if name not in table]
    if missing:
        what = "lines are missing"
        raise FileFormatError(Problem(what=what, where=where, value=", ".join(missing)))
    column = {name: i for i, name in enumerate(heads)}
    paths = tuple(tuple(table[a][column[b]] for b in gpus) for a in gpus)
    for i, row in enumerate(paths):
        for j, word in enumerate(row):
            if (word == "X") != (i == j) or word != paths[j][i]:
                what = "the matrix is not symmetric"
                value = f"{gpus[i]} to {gpus[j]}: {word}, back: {paths[j][i]}"
                raise FileFormatError(Problem(what=what, where=where, value=value))
    return Topology(
        name=Path(where).name,
        paths=paths,
        nics=tuple(nics),
        nic_paths=tuple(tuple(table[g][column[nic]] for g in gpus) for nic in nics),
        origin=where,
    )


@cache
def usual_topology(device: str, devices: int) -> Topology | None:
    """Returns the catalog's link topology of a node of `devices` such devices, None: it has none.

    A smaller node is the first devices of a larger one.
    """
    for name in names("topologies"):
        data = read_toml("topologies", name)
        if any(re.fullmatch(pattern, device) for pattern in data["devices"]):
            whole = parse_topology(data["matrix"], where=f"catalog/topologies/{name}.toml")
            if 1 < devices <= whole.devices:
                return first_devices(whole, devices, name)
    return None


def first_devices(whole: Topology, count: int, name: str) -> Topology:
    """Returns the topology of the first `count` devices, as one of the catalog."""
    return Topology(
        name=name,
        paths=tuple(row[:count] for row in whole.paths[:count]),
        nics=whole.nics,
        nic_paths=tuple(row[:count] for row in whole.nic_paths),
    )
