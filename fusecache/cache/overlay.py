"""What is known about single names outside the folder listings: in memory, bounded, gone with the process.

Two kinds of entries lie here: *loose* ones, answered by GetStatus for a folder that is not listed (yet), and
*incomplete* files, whose attributes are true for a moment only and therefore never reach the disk. Both give
way to a listing that was asked for later. Missing names of folders that are not listed are remembered for
`negative_s`.

What is pushed out for lack of room is simply unknown again: the kernel is told ESTALE and walks down once more.
Used on the event loop only. No network, no disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from cachetools import TTLCache

from fusecache.cache.board import BoardWriter, folder_mark, inode_mark, name_mark
from fusecache.cache.record import Entry

MAX_ENTRIES: Final = 16384
MAX_NEGATIVE: Final = 16384


class Known(NamedTuple):
    """An entry and when Alluxio was asked for it."""

    entry: Entry
    asked_at: float


class Overlay:
    """Loose and incomplete entries by inode and by (folder, name), and missing names."""

    def __init__(
        self,
        now: Callable[[], float],
        negative_s: float,
        *,
        max_entries: int = MAX_ENTRIES,
        max_negative: int = MAX_NEGATIVE,
        board: BoardWriter | None = None,
    ) -> None:
        """`board`: where processes that read the store see that there is something to ask for."""
        self._board = board
        self._max_entries = max_entries
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._names: dict[tuple[int, bytes], int] = {}
        self._folders: dict[int, set[int]] = {}
        self._negative: TTLCache[tuple[int, bytes], None] = TTLCache(max_negative, negative_s, timer=now)
        self._negative_folders: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def put(self, entry: Entry, asked_at: float) -> None:
        """Remember `entry`; it replaces what had its inode or its name."""
        self.drop(entry.inode)
        previous = self._names.get((entry.parent, entry.name))
        if previous is not None:
            self.drop(previous)
        self._negative.pop((entry.parent, entry.name), None)
        self._known[entry.inode] = Known(entry, asked_at)
        self._names[entry.parent, entry.name] = entry.inode
        self._folders.setdefault(entry.parent, set()).add(entry.inode)
        if self._board is not None:
            for mark in _marks(entry):
                self._board.mark(mark)
        while len(self._known) > self._max_entries:
            self.drop(next(iter(self._known)))

    def get(self, inode: int) -> Known | None:
        """By inode; counts as use."""
        known = self._known.get(inode)
        if known is not None:
            self._known.move_to_end(inode)
        return known

    def child(self, folder: int, name: bytes) -> Known | None:
        """By name; counts as use."""
        inode = self._names.get((folder, name))
        return None if inode is None else self.get(inode)

    def of_folder(self, folder: int) -> list[Known]:
        """Everything known of one folder, in no order."""
        return [self._known[inode] for inode in self._folders.get(folder, ())]

    def drop(self, inode: int) -> None:
        """Forget an entry; unknown ones are fine."""
        known = self._known.pop(inode, None)
        if known is None:
            return
        entry = known.entry
        self._names.pop((entry.parent, entry.name), None)
        siblings = self._folders[entry.parent]
        siblings.discard(inode)
        if not siblings:
            del self._folders[entry.parent]
        if self._board is not None:
            for mark in _marks(entry):
                self._board.unmark(mark)

    def put_missing(self, folder: int, name: bytes) -> None:
        """Alluxio said that there is no such name."""
        if len(self._negative_folders) >= MAX_NEGATIVE:
            self._negative_folders = {parent for parent, _ in self._negative}
        self._negative_folders.add(folder)
        self._negative[folder, name] = None

    def missing(self, folder: int, name: bytes) -> bool:
        """Whether Alluxio said so less than `negative_s` ago."""
        return (folder, name) in self._negative

    def take_missing(self, folder: int) -> list[bytes]:
        """Names of a folder remembered as missing; they are forgotten (a listing says it better)."""
        if folder not in self._negative_folders:
            return []
        self._negative_folders.discard(folder)
        names = [name for parent, name in self._negative if parent == folder]
        for name in names:
            self._negative.pop((folder, name), None)
        return names


def _marks(entry: Entry) -> tuple[int, int, int]:
    return folder_mark(entry.parent), name_mark(entry.parent, entry.name), inode_mark(entry.inode)
