"""Blocks that are to go: of files that were freed, replaced or removed from the source.

With Alluxio the master tells block workers at their next heartbeat (each second); until then the old block
goes on serving its old bytes under the old id. Here a thread waits as long, and exists only while something
is to be freed. A block that is a link is rechecked at once: if its source was overwritten in place, it no
longer holds the old bytes and must not stay.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from fusecache.embedded import inode as inodes
from fusecache.embedded.block_store import BlockStore
from fusecache.embedded.inode import Inode


class FreedBlocks:
    """Files whose blocks leave every block store after a delay. Thread-safe."""

    def __init__(self, delay_s: float | None, stores: Callable[[], Sequence[BlockStore]]) -> None:
        """`delay_s` None: blocks stay until they are evicted."""
        self._delay_s = delay_s
        self._stores = stores
        self._waiting: deque[tuple[float, Inode]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, file: Inode) -> None:
        """Free a file's blocks when the delay has passed."""
        if not file.block_count:
            return
        for index in range(file.block_count):
            for store in self._stores():
                store.recheck(inodes.block_id(file.id, index))
        if self._delay_s is None:
            return
        with self._changed:
            self._waiting.append((time.monotonic() + self._delay_s, file))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="embedded free blocks")
                self._thread.start()

    def close(self) -> None:
        """Stop waiting; what waits is freed by the next start (its ids are no longer current)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._closed:
                    self._thread = None
                    return
                due, file = self._waiting[0]
                wait_s = due - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                self._waiting.popleft()
            for index in range(file.block_count):
                for store in self._stores():
                    store.remove(inodes.block_id(file.id, index))
