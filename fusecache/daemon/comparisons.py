"""Which folders Alluxio has compared with their under storage, and when: what a stored block's version is known by.

A block that this node stores holds the version its id stands for, unless the file had changed in the under storage,
unnoticed, before the block was stored. So its version is confirmed when

* its data never changes;
* or Alluxio has compared the folder with its under storage *after* the block was stored here, and the file still has
  the same id.

One comparison confirms all blocks of a folder that were there when it was asked for. It is asked of the agent in the
background; whoever needed it does without this once, and finds it confirmed the next time.

Decides nothing: passthrough (`passthrough_offers`) and readers of what was fetched (`prefetch.reader`) do.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple, NoReturn, Protocol

import structlog
import trio
from cachetools import LRUCache

from fusecache.cache.record import Entry
from fusecache.clock import Clock
from fusecache.errors import FusecacheError

log = structlog.get_logger(__name__)

MAX_FOLDERS = 50_000
REPEAT_S = 5.0
"""A folder is not compared again sooner, whether that failed or not ..."""

REPEAT_FACTOR = 10
"""... nor before so many times as long as it took: a folder of a million files keeps a master busy for many seconds,
and must not do so all the time while its blocks are being stored."""

CLOCK_STEP_S = 0.5
"""When wall clock and time since boot have moved apart by more than this, older comparisons count no longer: a
block's age is known by the wall clock only."""


class Comparing(Protocol):
    """What is used of `remote_tree.RemoteTree`."""

    def is_immutable(self, folder: int) -> bool:
        """Whether the folder's data never changes."""
        ...

    def is_current(self, inode: int) -> bool:
        """Whether a name is known to have this inode now."""
        ...

    async def ask(self, kind: str, **fields: object) -> dict[str, object]:
        """A question to the agent."""
        ...


class Comparison(NamedTuple):
    """One comparison of a folder."""

    wall_s: float
    """Wall-clock time when it was asked for."""
    wall_minus_boot_s: float


class Comparisons:
    """The comparisons that one worker knows of. Event loop only."""

    def __init__(self, tree: Comparing, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock
        self._compared: LRUCache[int, Comparison] = LRUCache(MAX_FOLDERS)
        self._wanted: dict[int, None] = {}
        self._not_before: LRUCache[int, float] = LRUCache(MAX_FOLDERS)
        self._wake = trio.Event()

    def confirm(self, entry: Entry, fd: int) -> bool:
        """Whether a file's open block file holds the version of its id.

        If that is not known, its folder is compared for the next time. Never waits.
        """
        folder = entry.parent
        if self._is_confirmed(folder, fd):
            # An id that the comparison found replaced may have a block of the version after it.
            return self._tree.is_current(entry.inode)
        if folder not in self._wanted and self._not_before.get(folder, 0.0) <= self._clock.now():
            self._wanted[folder] = None
            self._wake.set()
        return False

    async def run(self) -> NoReturn:
        """Have folders compared, one after the other."""
        while True:
            while self._wanted:
                folder = next(iter(self._wanted))
                await self._compare(folder)
                del self._wanted[folder]
            self._wake = trio.Event()
            await self._wake.wait()

    def _is_confirmed(self, folder: int, fd: int) -> bool:
        if self._tree.is_immutable(folder):
            return True
        comparison = self._compared.get(folder)
        if comparison is None:
            return False
        if abs(self._wall_minus_boot_s() - comparison.wall_minus_boot_s) > CLOCK_STEP_S:
            del self._compared[folder]
            return False
        # ctime: set when the block worker moved the complete block into place.
        return os.fstat(fd).st_ctime_ns < comparison.wall_s * 1e9

    async def _compare(self, folder: int) -> None:
        begun = self._clock.now()
        asked = Comparison(time.time(), self._wall_minus_boot_s())
        try:
            await self._tree.ask("confirm", folder=folder)
            self._compared[folder] = asked
        except FusecacheError as error:
            log.info("a folder's blocks are not confirmed", folder=folder, error=str(error))
        now = self._clock.now()
        self._not_before[folder] = max(begun + REPEAT_S, now + REPEAT_FACTOR * (now - begun))

    def _wall_minus_boot_s(self) -> float:
        return time.time() - self._clock.now()
