"""Open descriptors of local block files, at most so many; the oldest unused one is closed first.

A block of this node's block worker is a file; `open` gets its descriptor from the Alluxio client without a call
(`open_local`) and keeps it, so that a read is one preadv(2). An open descriptor survives eviction of its block.
A reader in a thread holds the block (`users`), so that its descriptor is never closed, and its number never
given to another file, under a read.

Everything here runs on the event loop's thread. Nothing here reads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable

from fusecache.alluxio.model import Block


class OpenBlock:
    """One open block file."""

    __slots__ = ("block_id", "doomed", "fd", "length", "users", "written_ns")

    def __init__(self, block_id: int, fd: int, length: int) -> None:
        self.block_id = block_id
        self.fd = fd
        """-1 once closed: ask `OpenBlocks` again."""
        self.length = length
        self.users = 0
        """Threads reading from it now."""
        self.doomed = False
        """To be closed when the last user leaves."""
        found = os.fstat(fd)
        self.written_ns = found.st_mtime_ns if found.st_nlink > 1 else None
        """Of a hard link: when its content was last written. None = a block file proper, which nobody writes to."""

    def rewritten(self) -> bool:
        """Whether another name of the same file was written to since this was opened (asked after each read)."""
        return self.written_ns is not None and os.fstat(self.fd).st_mtime_ns != self.written_ns


class OpenBlocks:
    """All open block files of the process."""

    def __init__(self, open_local: Callable[[Block], int | None], limit: int) -> None:
        self._open_local = open_local
        self._limit = limit
        self._blocks: OrderedDict[int, OpenBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def open(self, block: Block) -> OpenBlock | None:
        """The block's file, None when this node has no complete one (no call is made to find out)."""
        known = self._blocks.get(block.block_id)
        if known is not None:
            self._blocks.move_to_end(block.block_id)
            return known
        fd = self._open_local(block)
        return None if fd is None else self.adopt(block, fd)

    def adopt(self, block: Block, fd: int) -> OpenBlock:
        """Keep a descriptor that was opened elsewhere (it is closed here from now on)."""
        known = self._blocks.get(block.block_id)
        if known is not None:
            os.close(fd)
            return known
        opened = OpenBlock(block.block_id, fd, block.length)
        self._blocks[block.block_id] = opened
        if len(self._blocks) > self._limit:
            self._close_oldest()
        return opened

    def close(self, opened: OpenBlock) -> None:
        """Forget a block: close now, or when its last user leaves."""
        self._blocks.pop(opened.block_id, None)
        if opened.fd < 0:
            return
        if opened.users:
            opened.doomed = True
            return
        os.close(opened.fd)
        opened.fd = -1

    def leave(self, opened: OpenBlock) -> None:
        """One user less."""
        opened.users -= 1
        if opened.doomed and not opened.users:
            opened.doomed = False
            os.close(opened.fd)
            opened.fd = -1

    def close_all(self) -> None:
        """Close everything (shutdown)."""
        for opened in list(self._blocks.values()):
            self.close(opened)

    def _close_oldest(self) -> None:
        for opened in self._blocks.values():
            if not opened.users:
                self.close(opened)
                return
