"""Bytes fetched from block workers and not yet asked for: a bounded store of extents, least recently used out first.

An `Extent` is a range of one block that is being fetched or has been. It is in the buffer from the moment its
fetch starts, so that whoever needs a byte of it waits for the one fetch instead of starting another
(single-flight); a failed fetch leaves the buffer before its waiters wake.

Holds bytes in memory only; runs on the event loop's thread; fetches nothing.
"""

from __future__ import annotations

from collections import OrderedDict

import trio


class Extent:
    """Bytes [start, end) of one block."""

    __slots__ = ("block_id", "data", "done", "end", "error", "start")

    def __init__(self, block_id: int, start: int, end: int) -> None:
        self.block_id = block_id
        self.start = start
        self.end = end
        self.data: memoryview | bytes | None = None
        self.error: Exception | None = None
        self.done = trio.Event()


class ReadBuffer:
    """Extents by block; `limit_bytes` bounds what is kept, not what is in flight."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._by_block: dict[int, list[Extent]] = {}
        self._ready: OrderedDict[tuple[int, int], Extent] = OrderedDict()
        self.held_bytes = 0

    def covering(self, block_id: int, position: int) -> Extent | None:
        """The extent, fetched or in flight, that has byte `position`."""
        for extent in self._by_block.get(block_id, ()):
            if extent.start <= position < extent.end:
                if extent.data is not None:
                    self._ready.move_to_end((block_id, extent.start))
                return extent
        return None

    def next_start(self, block_id: int, position: int) -> int | None:
        """Start of the first extent behind `position`: a fetch need not go further."""
        starts = [extent.start for extent in self._by_block.get(block_id, ()) if extent.start > position]
        return min(starts, default=None)

    def begin(self, block_id: int, start: int, end: int) -> Extent:
        """Announce a fetch."""
        extent = Extent(block_id, start, end)
        self._by_block.setdefault(block_id, []).append(extent)
        return extent

    def finish(self, extent: Extent, data: memoryview | bytes) -> None:
        """The fetch brought all its bytes: wake the waiters, make room."""
        extent.data = data
        self._ready[(extent.block_id, extent.start)] = extent
        self.held_bytes += len(data)
        extent.done.set()
        while self.held_bytes > self._limit_bytes and self._ready:
            self._drop(next(iter(self._ready.values())))

    def fail(self, extent: Extent, error: Exception) -> None:
        """The fetch failed: its waiters get the error, the next read starts a new fetch."""
        extent.error = error
        self._unlink(extent)
        extent.done.set()

    def drop_block(self, block_id: int) -> None:
        """Forget what is kept of a block (closed, or now a local file); fetches in flight go on."""
        for extent in list(self._by_block.get(block_id, ())):
            if extent.data is not None:
                self._drop(extent)

    def _drop(self, extent: Extent) -> None:
        del self._ready[(extent.block_id, extent.start)]
        self.held_bytes -= extent.end - extent.start
        self._unlink(extent)

    def _unlink(self, extent: Extent) -> None:
        extents = self._by_block[extent.block_id]
        extents.remove(extent)
        if not extents:
            del self._by_block[extent.block_id]
