"""What lies in the folders of this node's block worker: from names of block files to bytes of each data set.

The folders are read again only when they changed, and of their names only new ones are looked up in the metadata: the
file of a block, its folder, the data sets above that. The arithmetic is `locality.measure`. Runs in a thread, in slices
(`daemon.slices`).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import structlog

from fusecache.cache.known import MAX_DEPTH, ROOT
from fusecache.cache.store import MetadataStore
from fusecache.clock import Clock
from fusecache.daemon.slices import SLICE, every, pause
from fusecache.locality.measure import HeldBlocks, Place, block_length, inode_of_block

log = structlog.get_logger(__name__)

NAMES = 256
"""Names of block files between two pauses; nearly all were placed by an earlier measurement."""

RECHECK_S = 60.0
"""When listings changed, blocks that were placed before are placed anew, not more often than this: their file may be
another one's now."""

SETTLED_NS = 2_000_000_000
"""A folder whose modification time is younger than this may change again within the same tick of the clock."""

Tops = tuple[int | None, ...]
"""Inode of each data set's folder; None = there is none."""


class BlockFiles:
    """See the module. One thread at a time."""

    def __init__(self, store: MetadataStore, datasets: int, clock: Clock) -> None:
        """`datasets`: how many there are."""
        self._store = store
        self._clock = clock
        self._held = HeldBlocks(datasets)
        self._held_bytes: tuple[int, ...] = (0,) * datasets
        self._folder_times: dict[bytes, int] = {}
        """Block folder -> its modification time when it was read last; missing when it may have changed since."""
        self._placed_by: object = None
        """State of the listings by which blocks were placed last, and by which all were."""
        self._all_placed_by: object = None
        self._all_placed_at_s = -RECHECK_S

    def weigh(self, folders: list[bytes], tops: Tops, listings: object) -> tuple[int, ...]:
        """Bytes of each data set in the block files of `folders` (each with a slash at its end). In a thread.

        `listings` is another value when a listing has changed anything since.
        """
        now, listings = self._clock.now(), (listings, tops)
        again = listings != self._placed_by
        everything = listings != self._all_placed_by and now - self._all_placed_at_s >= RECHECK_S
        times = {folder: _modified_ns(folder) for folder in folders}
        if not again and not everything and times == self._folder_times:
            return self._held_bytes
        placer = _Placer(self._store, tops, pause=every(SLICE, pause))
        self._held.begin(again=again, everything=everything)
        for folder in folders:
            for names in _names_in(folder):
                self._held.add(names, placer.place, partial(_file_size, folder))
                pause()
        self._held_bytes = self._held.finish()
        self._placed_by = listings
        if everything:
            self._all_placed_by, self._all_placed_at_s = listings, now
        settled_ns = time.time_ns() - SETTLED_NS
        self._folder_times = {
            folder: at_ns for folder, at_ns in times.items() if at_ns is not None and at_ns < settled_ns
        }
        return self._held_bytes


class _Placer:
    """From a block id to data sets, by the metadata store. For one measurement: it remembers folders."""

    def __init__(self, store: MetadataStore, tops: Tops, *, pause: Callable[[], None]) -> None:
        self._store = store
        self._pause = pause
        self._bits: dict[int, int] = {}
        """Folder -> data sets that begin there."""
        for number, top in enumerate(tops):
            if top is not None:
                self._bits[top] = self._bits.get(top, 0) | 1 << number
        self._folders: dict[int, int] = {}
        """Folder -> data sets that it belongs to."""

    def place(self, block_id: int) -> Place | None:
        """Where the block belongs; None when its file is not listed."""
        self._pause()
        with self._store.read() as txn:
            entry = self._store.entry(txn, inode_of_block(block_id))
        if entry is None or entry.folder:
            return None
        return Place(self._datasets_of(entry.parent), block_length(block_id, entry.length, entry.block_size))

    def _datasets_of(self, folder: int) -> int:
        above: list[int] = []
        found: int | None = None
        while found is None:
            found = self._folders.get(folder)
            if found is not None:
                break
            above.append(folder)
            if folder == ROOT or len(above) > MAX_DEPTH:
                found = 0
                break
            with self._store.read() as txn:
                entry = self._store.entry(txn, folder)
            if entry is None:
                return 0  # a folder on the way is gone
            folder = entry.parent
        for inode in reversed(above):
            found |= self._bits.get(inode, 0)
            self._folders[inode] = found
        return found


def _names_in(folder: bytes) -> Iterator[list[bytes]]:
    """Names in a folder, NAMES at a time; none when it can't be read."""
    try:
        with os.scandir(folder) as entries:
            while names := [entry.name for entry in islice(entries, NAMES)]:
                yield names
    except OSError as error:
        log.info("block files not seen", folder=os.fsdecode(folder), error=str(error))


def _file_size(folder: bytes, name: bytes) -> int | None:
    """Bytes of the regular file `name` in `folder`, None when there is none."""
    try:
        found = os.lstat(folder + name)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _modified_ns(folder: bytes) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
