"""How much of a block to fetch for one read: pure, one `FetchWindow` per block that is being read.

The kernel's reads say where an application is; a fetch costs a round trip, so a sequential reader should get
more than it asked for and a random reader should not. Blocks up to one fetch unit are fetched whole: one call,
and read from byte 0 to the end they are also stored in Alluxio by the block worker itself. In larger blocks the
window doubles while reads continue where the last fetch ended, and is only the asked range, rounded outwards to
`GRAIN_BYTES`, anywhere else.

Does not fetch, keeps no bytes, knows no time.
"""

from __future__ import annotations

from typing import NamedTuple

GRAIN_BYTES = 128 << 10
"""Smallest fetch: the kernel's own smallest read-ahead, so that neighbours of a random read come free."""

FIRST_WINDOW_BYTES = 1 << 20
"""First fetch of a reader that starts at byte 0 of a block, most often a sequential one."""


class Fetch(NamedTuple):
    """A range of one block to get."""

    start: int
    end: int
    sequential: bool
    """True when the reader seems to go on: a stream to the block's end is worth keeping open."""


class FetchWindow:
    """The window of one block; positions in bytes from the block's start."""

    __slots__ = ("_block_length", "_frontiers", "_unit_bytes")

    MAX_FRONTIERS = 16
    """Readers followed at once in one block (several processes may stream one file)."""

    def __init__(self, block_length: int, unit_bytes: int) -> None:
        self._block_length = block_length
        self._unit_bytes = unit_bytes
        self._frontiers: dict[int, int] = {}
        """End of a sequential reader's last fetch -> its size."""

    def fetch_for(self, start: int, end: int) -> Fetch:
        """The range to fetch so that [start, end) is covered from `start` on; 0 <= start < end <= block length."""
        length = self._block_length
        if length <= self._unit_bytes:
            return Fetch(0, length, sequential=False)
        previous = self._frontiers.pop(start, None)
        if previous is not None:
            size = min(previous * 2, self._unit_bytes)
        elif start == 0:
            size = FIRST_WINDOW_BYTES
        else:
            first = start - start % GRAIN_BYTES
            last = min(length, -(-end // GRAIN_BYTES) * GRAIN_BYTES)
            self._follow(last, last - first)
            return Fetch(first, last, sequential=False)
        stop = min(length, start + max(size, end - start))
        self._follow(stop, stop - start)
        return Fetch(start, stop, sequential=True)

    def _follow(self, frontier: int, size: int) -> None:
        if frontier >= self._block_length:
            return
        self._frontiers[frontier] = size
        if len(self._frontiers) > self.MAX_FRONTIERS:
            del self._frontiers[next(iter(self._frontiers))]
