"""When the source was last looked at, and whether a request's sync interval calls that too old.

Held in memory and bounded, as an Alluxio master does: after a restart, and for what was pushed out, everything
counts as never looked at. Thread-safe.
"""

from __future__ import annotations

import threading

import cachetools

from fusecache.clock import Clock

KEPT = 200_000
"""Entries of each kind; an entry takes about 200 bytes."""


class SyncTimes:
    """Times of the last looks at files and folders by id, at the children of folders, and at missing names."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._itself: cachetools.LRUCache[int, float] = cachetools.LRUCache(KEPT)
        self._children: cachetools.LRUCache[int, float] = cachetools.LRUCache(KEPT)
        self._absent: cachetools.LRUCache[tuple[int, bytes], float] = cachetools.LRUCache(KEPT)
        self._lock = threading.Lock()

    def looked_at(self, inode_id: int) -> None:
        """A file or folder was looked at."""
        with self._lock:
            self._itself[inode_id] = self._clock.now()

    def listed(self, folder_id: int) -> None:
        """A folder and all its children were looked at."""
        with self._lock:
            self._itself[folder_id] = self._children[folder_id] = self._clock.now()

    def missed(self, parent_id: int, name: bytes) -> None:
        """A name was looked for and not there."""
        with self._lock:
            self._absent[parent_id, name] = self._clock.now()

    def appeared(self, parent_id: int, name: bytes) -> None:
        """A name exists now."""
        with self._lock:
            self._absent.pop((parent_id, name), None)

    def due(self, inode_id: int, parent_id: int | None, interval_ms: int) -> bool:
        """Whether a known file or folder must be looked at; a listing of its parent counts as a look at it."""
        with self._lock:
            own = self._itself.get(inode_id, None)
            listed = self._children.get(parent_id, None) if parent_id is not None else None
        return self._older(max((time for time in (own, listed) if time is not None), default=None), interval_ms)

    def children_due(self, folder_id: int, interval_ms: int) -> bool:
        """Whether a folder must be listed again."""
        with self._lock:
            listed = self._children.get(folder_id, None)
        return self._older(listed, interval_ms)

    def look_for(self, parent_id: int, name: bytes, *, load: bool, interval_ms: int) -> bool:
        """Whether a name that is not known must be looked for; `load`: by load type ONCE.

        As Alluxio's absent cache: a name that was looked for and missing stays missing for ONCE until it is
        synchronised, or its folder is.
        """
        with self._lock:
            absent = self._absent.get((parent_id, name), None)
        if absent is not None:
            return self._older(absent, interval_ms)
        return load or self.children_due(parent_id, interval_ms)

    def _older(self, last: float | None, interval_ms: int) -> bool:
        if interval_ms < 0:
            return False
        return interval_ms == 0 or last is None or (self._clock.now() - last) * 1000 > interval_ms
