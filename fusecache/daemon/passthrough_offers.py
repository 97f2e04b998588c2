"""Which block files the kernel, or the gate, may read without asking a worker, and their way to the gate.

A worker that has opened the block file of a one-block file offers its descriptor: in `passthrough` mode before it
answers the OPEN, in `no-open` mode when it has answered a READ from it. What is read from then on nobody here can
check, so the version must be confirmed before:

* data that never changes is;
* otherwise Alluxio must have compared the folder with its under storage *after* the block was stored here and still
  have the same id: an unnoticed change before that may be what the block holds.

One comparison confirms all blocks of a folder that were there when it was asked for. It is asked of the agent in the
background; the request that needed it is an ordinary one, and the next one finds it confirmed.

Registers nothing: the gate checks what it gets and tells the kernel.
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
from fusecache.kernel.offers import OfferSender
from fusecache.prefetch.open_blocks import OpenBlock

log = structlog.get_logger(__name__)

MAX_FOLDERS = 50_000
RETRY_S = 5.0
"""A folder whose comparison failed is not asked for again sooner."""

CLOCK_STEP_S = 0.5
"""When wall clock and time since boot have moved apart by more than this, older confirmations count no longer: a
block's age is known by the wall clock only."""


class Confirming(Protocol):
    """What is used of `remote_tree.RemoteTree`."""

    def is_immutable(self, folder: int) -> bool:
        """Whether the folder's data never changes."""
        ...

    async def ask(self, kind: str, **fields: object) -> dict[str, object]:
        """A question to the agent."""
        ...


class Confirmation(NamedTuple):
    """One comparison of a folder."""

    wall_s: float
    """Wall-clock time when it was asked for."""
    wall_minus_boot_s: float


class PassthroughOffers:
    """The worker's half of passthrough. Event loop only."""

    def __init__(self, descriptor: int, tree: Confirming, clock: Clock) -> None:
        self._sender = OfferSender(descriptor)
        self._tree = tree
        self._clock = clock
        self._confirmed: LRUCache[int, Confirmation] = LRUCache(MAX_FOLDERS)
        self._wanted: dict[int, None] = {}
        self._not_before: LRUCache[int, float] = LRUCache(MAX_FOLDERS)
        self._wake = trio.Event()

    def offer(self, inode: int, entry: Entry, opened: OpenBlock) -> bool:
        """Send the descriptor if the block's version is confirmed; otherwise have it confirmed for the next time.

        False when it was not sent.
        """
        if not self._is_confirmed(entry.parent, opened.fd):
            self._want(entry.parent)
            return False
        return self._sender.offer(inode, opened.fd)

    def close(self) -> None:
        """No more offers."""
        self._sender.close()

    async def run(self) -> NoReturn:
        """Have folders compared, one after the other."""
        while True:
            while self._wanted:
                folder = next(iter(self._wanted))
                del self._wanted[folder]
                await self._confirm(folder)
            self._wake = trio.Event()
            await self._wake.wait()

    def _is_confirmed(self, folder: int, fd: int) -> bool:
        if self._tree.is_immutable(folder):
            return True
        confirmation = self._confirmed.get(folder)
        if confirmation is None:
            return False
        if abs(self._wall_minus_boot_s() - confirmation.wall_minus_boot_s) > CLOCK_STEP_S:
            del self._confirmed[folder]
            return False
        # ctime: set when the block worker moved the complete block into place.
        return os.fstat(fd).st_ctime_ns < confirmation.wall_s * 1e9

    def _want(self, folder: int) -> None:
        if folder not in self._wanted and self._not_before.get(folder, 0.0) <= self._clock.now():
            self._wanted[folder] = None
            self._wake.set()

    async def _confirm(self, folder: int) -> None:
        asked = Confirmation(time.time(), self._wall_minus_boot_s())
        self._not_before[folder] = self._clock.now() + RETRY_S
        try:
            await self._tree.ask("confirm", folder=folder)
        except FusecacheError as error:
            log.info("a folder's blocks are not confirmed", folder=folder, error=str(error))
            return
        self._confirmed[folder] = asked

    def _wall_minus_boot_s(self) -> float:
        return time.time() - self._clock.now()
