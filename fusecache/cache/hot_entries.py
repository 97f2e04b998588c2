"""Decoded entries that were used last, and the folders that they are as fresh as.

A hot entry counts while its folder is fresh and none of the folder's records changed since (`Folder.generation`), so
nothing has to be hunted down and removed when a listing lands. Whether it counts is `cache.known`'s to see.

Pure: no store, no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fusecache.cache.freshness import FolderRule
from fusecache.cache.record import Entry
from fusecache.cache.tables import FolderState


class Folder:
    """What is known about one folder's listing; mutable, so that hot entries see it age."""

    __slots__ = ("dead", "epoch", "fresh_until", "generation", "inode", "last_used", "rule", "state")

    def __init__(self, inode: int, rule: FolderRule) -> None:
        self.inode = inode
        self.rule = rule
        self.state: FolderState | None = None
        """None: never listed."""
        self.fresh_until = -math.inf
        self.generation = 0
        """Moves when a record of the folder changes."""
        self.epoch = 0
        """When the state was last compared with the store's (`cache.board`)."""
        self.last_used = -math.inf
        self.dead = False
        """No longer the one in `cache.known.Known`: a hint for tasks that hold it."""


class Hot(NamedTuple):
    """A decoded entry and what it depends on."""

    entry: Entry
    folder: Folder
    generation: int


class HotEntries:
    """The most recently used entries, between half of `max_entries` and all of it.

    Two generations of plain dicts: what is used moves to the younger one; when that holds half, it becomes the
    older one, and what was not used since is gone. A cachetools.LRUCache costs 3.1 us for a miss, an insertion and
    an eviction, this 1.0 us (measured side by side); a walk over a million files pays that for each file, on top
    of about 6 us for LMDB and decoding.
    """

    def __init__(self, max_entries: int) -> None:
        self._half = max(1, max_entries // 2)
        self.names: dict[tuple[int, bytes], Hot] = {}
        self.inodes: dict[int, Hot] = {}
        self._older_names: dict[tuple[int, bytes], Hot] = {}
        self._older_inodes: dict[int, Hot] = {}

    def __len__(self) -> int:
        return max(len(self.names) + len(self._older_names), len(self.inodes) + len(self._older_inodes))

    def add(self, hot: Hot) -> None:
        """Insert, or make young again."""
        entry = hot.entry
        self.names[entry.parent, entry.name] = self.inodes[entry.inode] = hot
        if len(self.names) >= self._half or len(self.inodes) >= self._half:
            self._older_names, self.names = self.names, {}
            self._older_inodes, self.inodes = self.inodes, {}

    def older_name(self, key: tuple[int, bytes]) -> Hot | None:
        """What `names` does not have, from the older generation."""
        hot = self._older_names.get(key)
        if hot is not None:
            self.add(hot)
        return hot

    def older_inode(self, inode: int) -> Hot | None:
        """What `inodes` does not have, from the older generation."""
        hot = self._older_inodes.get(inode)
        if hot is not None:
            self.add(hot)
        return hot
