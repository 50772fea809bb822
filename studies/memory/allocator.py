"""PyTorch's caching allocator on one device, as far as the sizes of its segments decide.

Requests are rounded to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from
segments of 20 MiB, above from segments of their own size in steps of 2 MiB. The smallest free block
that is large enough serves a request and is split; neighbours that are free merge; segments are
returned only when the device is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 1 << 20
SMALL, LARGE, ROUND = MIB, 10 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment; `key` is its place among the free blocks, 0 while it is in use."""

    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    key: int = 0


class Allocator:
    """Free blocks, and the most bytes reserved and in use so far."""

    def __init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._made = 0
        self._live = 0.0
        self.reserved = 0.0
        self.allocated = 0.0

    def take(self, size: float) -> Block:
        """Returns a block of at least `size` bytes."""
        wanted = max(-(-int(size) // 512), 1) * 512
        small = wanted <= SMALL
        free = self._free[small]
        place = bisect_left(free, (wanted,))
        block = free.pop(place)[2] if place < len(free) else self._segment(wanted, small=small)
        block.key = 0
        rest = block.size - wanted
        if rest >= (512 if small else SMALL + 1):
            tail = Block(size=rest, small=small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, wanted
            self._put(tail)
        self._live += block.size
        self.allocated = max(self.allocated, self._live)
        return block

    def give(self, block: Block | None) -> None:
        """Frees a block and merges it with free neighbours."""
        if block is None:
            return
        self._live -= block.size
        before, after = block.before, block.after
        if before is not None and before.key:
            self._drop(before)
            block = self._joined(before, block)
        if after is not None and after.key:
            self._drop(after)
            block = self._joined(block, after)
        self._put(block)

    def _segment(self, size: int, *, small: bool) -> Block:
        whole = ROUND if small else 20 * MIB if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved += whole
        return Block(size=whole, small=small)

    def _joined(self, first: Block, second: Block) -> Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _put(self, block: Block) -> None:
        self._made += 1
        block.key = self._made
        insort(self._free[block.small], (block.size, block.key, block))

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.key)))
        block.key = 0
