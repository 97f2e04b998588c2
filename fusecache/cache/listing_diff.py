"""What changed between two listings of one folder, as the kernel has to be told.

Two sources feed it: `change_of` judges one name from its old and its new entry (a small change, applied in one
transaction), `diff_sorted` walks two whole listings in name order (a folder that was rebuilt beside the old
one). Only what an application can see counts as a change of attributes: block locations move all the time, and
telling the kernel would throw its pages away for nothing.

Pure: no database. It does not decide what the kernel is told about a change; the file system does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from fusecache.cache.record import Entry

MAX_KEPT_CHANGES: Final = 8192
"""A `Diff` counts every change but keeps at most so many."""


class Change(NamedTuple):
    """One thing the kernel may know that is no longer so."""

    kind: Literal["added", "removed", "replaced", "attributes", "folder"]
    """added: the name was missing (a negative entry may be kept); removed: the name is gone;
    replaced: another file has the name now; attributes: same file, other attributes;
    folder: the folder's own list of names is another one."""
    parent: int
    name: bytes
    inode: int
    """The new file's for `added`, the folder's own for `folder`; else the file the kernel may know
    (for `replaced` and `removed`: dead)."""


@dataclass
class Diff:
    """What a listing changed."""

    added: int = 0
    removed: int = 0
    replaced: int = 0
    attributes: int = 0
    changes: list[Change] = field(default_factory=list)
    """The changes themselves, at most MAX_KEPT_CHANGES; `complete` says whether that is all."""

    @property
    def names_changed(self) -> bool:
        """Whether the folder's list of names, or what a name stands for, is another one."""
        return bool(self.added or self.removed or self.replaced)

    @property
    def total(self) -> int:
        """Number of changes."""
        return self.added + self.removed + self.replaced + self.attributes

    @property
    def complete(self) -> bool:
        """Whether `changes` holds every change."""
        return self.total == sum(1 for change in self.changes if change.kind != "folder")

    def count(self, change: Change) -> None:
        """Add `change` to the counts, and keep it while there is room."""
        if change.kind == "added":
            self.added += 1
        elif change.kind == "removed":
            self.removed += 1
        elif change.kind == "replaced":
            self.replaced += 1
        elif change.kind == "attributes":
            self.attributes += 1
        if len(self.changes) < MAX_KEPT_CHANGES:
            self.changes.append(change)


def same_attributes(old: Entry, new: Entry) -> bool:
    """Whether an application sees the same file: everything but where blocks lie and what the UFS knows."""
    return (
        old.length == new.length
        and old.mtime_ms == new.mtime_ms
        and old.mode == new.mode
        and old.owner == new.owner
        and old.group == new.group
        and old.completed == new.completed
        and old.folder == new.folder
    )


def change_of(old: Entry | None, new: Entry | None) -> Change | None:
    """What happened to one name; None when nothing that can be seen."""
    if old is None:
        return None if new is None else Change("added", new.parent, new.name, new.inode)
    if new is None:
        return Change("removed", old.parent, old.name, old.inode)
    if old.inode != new.inode:
        return Change("replaced", old.parent, old.name, old.inode)
    if not same_attributes(old, new):
        return Change("attributes", old.parent, old.name, old.inode)
    return None


def diff_sorted(old: Iterable[Entry], new: Iterable[Entry]) -> Iterator[Change]:
    """Changes between two listings, each in strictly ascending order of names; memory for one entry of each."""
    old_entries, new_entries = iter(old), iter(new)
    left, right = next(old_entries, None), next(new_entries, None)
    while left is not None or right is not None:
        if right is None or (left is not None and left.name < right.name):
            change, left = change_of(left, None), next(old_entries, None)
        elif left is None or right.name < left.name:
            change, right = change_of(None, right), next(new_entries, None)
        else:
            change, left, right = change_of(left, right), next(old_entries, None), next(new_entries, None)
        if change is not None:
            yield change
