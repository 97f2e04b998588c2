"""One listing on its way into the store: all of it or nothing.

A listing thread feeds an `Intake` with the stream's pieces (`add`) and, only when the stream ended whole, calls
`commit`. Each entry is compared with what the folder's shelf holds; what is equal costs one look-up and eight
bytes. Two ways to commit, chosen by what differs (see `cache.store` for why):

* up to CHUNK differences: one transaction on the shelf itself;
* more: a new shelf is filled while the stream still runs, in transactions of CHUNK entries that no reader sees,
  and one transaction flips the folder over. A stream that breaks leaves a shelf nobody refers to; `Sweeper`
  removes it, as it does the old one after a flip and those of folders that are gone.

Memory is bounded by CHUNK records and 8 bytes an entry. Of names (or ids) that come twice in one listing the
first one counts. It does not talk to the network, and it does not push anything: it returns what changed.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Final, NamedTuple

from fusecache.cache import record
from fusecache.cache.listing_diff import Change, Diff, change_of, diff_sorted
from fusecache.cache.record import Entry
from fusecache.cache.store import MetadataStore
from fusecache.cache.tables import FolderState, child_key, id_key, id_of, name_key, pack_state
from fusecache.cache.transaction import Transaction, put_new
from fusecache.errors import StateError

CHUNK: Final = 8192
"""Entries per transaction."""


class ListingLost(StateError):
    """The store was emptied while the listing came in: list again."""


class Committed(NamedTuple):
    """A listing that is in the store."""

    state: FolderState
    diff: Diff | None
    """What changed, when it was applied in place; None after a flip: then compare the shelves."""
    old_shelf: int | None
    """After a flip: the shelf that was replaced (held for `shelf_changes` until released)."""
    dead_folders: tuple[int, ...]
    """Folders among what was removed in place."""
    first: bool
    """The folder was not listed before: nobody can have kept anything of an older listing."""
    touched: bool
    """Whether any record is another one than before (block locations included)."""


class Intake:
    """Takes one listing of one folder. Not thread-safe; used by one listing thread."""

    def __init__(self, store: MetadataStore, folder: int, asked_at: float, *, chunk: int = CHUNK) -> None:
        self._store = store
        self._folder = folder
        self._asked_at = asked_at
        self._chunk = chunk
        with store.read() as txn:
            self._old = store.folder_state(txn, folder)
        self._changed: dict[int, bytes] = {}
        self._unchanged: list[array[int]] = []
        self._build: _Build | None = None

    def add(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Take a piece of the listing: (inode, record). Raises StateError when the store can't be written."""
        pieces = iter(records)
        while piece := list(islice(pieces, self._chunk)):
            self._add(piece)

    def commit(self, *, incomplete: int) -> Committed:
        """The stream ended whole: make it the folder's listing. Waits for the transaction."""
        removed: list[int] = []
        if self._build is None and self._old is not None:
            removed = list(islice(self._missing(), self._chunk + 1))
            if len(removed) > self._chunk:
                self._start_building()
        if self._build is not None:
            return self._build.flip(self._changed, incomplete)
        return self._store.writer.run(lambda txn: self._apply(txn, removed, incomplete))

    def abandon(self) -> None:
        """The stream broke: nothing of it stays. Idempotent."""
        if self._build is not None:
            self._build.abandon()

    def _add(self, pieces: list[tuple[int, bytes]]) -> None:
        if self._old is None or self._build is not None:
            self._changed.update((inode, found) for inode, found in pieces if inode not in self._changed)
        else:
            same = array("Q")
            with self._store.read() as txn:
                children, parents = self._store.tables.children, self._store.tables.parents
                shelf, folder_key = self._old.shelf, id_key(self._folder)
                for inode, found in pieces:
                    # An equal record is not enough: another folder may have claimed the inode meanwhile.
                    if (
                        txn.get(child_key(shelf, inode), db=children) == found
                        and txn.get(id_key(inode), db=parents) == folder_key
                    ):
                        same.append(inode)
                    elif inode not in self._changed:
                        self._changed[inode] = found
            if same:
                self._unchanged.append(array("Q", sorted(same)))
        if len(self._changed) > self._chunk:
            if self._build is None:
                self._start_building()
            else:
                self._build.write(self._changed)
                self._changed = {}

    def _seen(self) -> Iterator[int]:
        return heapq.merge(*self._unchanged, sorted(self._changed))

    def _missing(self) -> Iterator[int]:
        """Inodes on the shelf that the listing did not have."""
        assert self._old is not None
        seen = self._seen()
        last = next(seen, None)
        with self._store.read() as txn:
            for inode, _ in self._store.records(txn, self._old.shelf):
                while last is not None and last < inode:
                    last = next(seen, None)
                if last != inode:
                    yield inode

    def _start_building(self) -> None:
        """Too many differences for one transaction: begin a new shelf with what came so far."""
        self._build = _Build(self._store, self._folder, self._asked_at, self._old)
        if self._old is not None:
            with self._store.read() as txn:
                unchanged = heapq.merge(*self._unchanged)
                while inodes := list(islice(unchanged, self._chunk)):
                    copied = {}
                    for inode in inodes:
                        found = txn.get(child_key(self._old.shelf, inode), db=self._store.tables.children)
                        if found is not None:
                            copied[inode] = found
                    self._build.write(copied)
            self._unchanged = []
        self._build.write(self._changed)
        self._changed = {}

    def _apply(self, txn: Transaction, removed: list[int], incomplete: int) -> Committed:
        """Writer job: the differences onto the folder's own shelf."""
        store, tables = self._store, self._store.tables
        old = store.folder_state(txn, self._folder)
        if (old and old.shelf) != (self._old and self._old.shelf):
            raise ListingLost("the metadata store was emptied during a listing")
        shelf = store.next_shelf(txn) if old is None else old.shelf
        before: dict[bytes, Entry | None] = {}
        gone = list(removed)
        for inode, found in self._changed.items():
            name = record.name_of(found)
            before.setdefault(name, store.child(txn, self._folder, shelf, name))
            gone.append(inode)  # its old name, when it had another one
        for inode in gone:
            entry = store.on_shelf(txn, self._folder, shelf, inode)
            if entry is not None:
                before.setdefault(entry.name, entry)
        count = 0 if old is None else old.entries
        for name, entry in before.items():
            if entry is not None:
                txn.delete(name_key(shelf, name), db=tables.names)
                count -= txn.delete(child_key(shelf, entry.inode), db=tables.children)
        for inode, found in self._changed.items():
            if txn.put(name_key(shelf, record.name_of(found)), id_key(inode), overwrite=False, db=tables.names):
                txn.put(child_key(shelf, inode), found, db=tables.children)
                txn.put(id_key(inode), id_key(self._folder), db=tables.parents)
                count += 1
        dead_folders: list[int] = []
        diff = Diff()
        for name, entry in before.items():
            if entry is not None and txn.get(child_key(shelf, entry.inode), db=tables.children) is None:
                forget(store, txn, self._folder, entry.inode, is_folder=entry.folder, dead_folders=dead_folders)
            change = change_of(entry, store.child(txn, self._folder, shelf, name))
            if change is not None:
                diff.count(change)
        state = FolderState(shelf, store.boot, self._asked_at, incomplete, count)
        txn.put(id_key(self._folder), pack_state(state), db=tables.folders)
        return Committed(state, diff, None, tuple(dead_folders), old is None, bool(before))


class _Build:
    """A shelf being filled beside the current one."""

    def __init__(self, store: MetadataStore, folder: int, asked_at: float, old: FolderState | None) -> None:
        self._store = store
        self._folder = folder
        self._asked_at = asked_at
        self._old = old
        self._count = 0
        self._moved: list[int] = []
        self._writes: list[Future[None]] = []
        self._shelf = store.writer.run(self._allocate)
        store.held_shelves.add(self._shelf)

    def write(self, records: dict[int, bytes]) -> None:
        """Queue a transaction with `records`; errors of earlier ones surface here or in `flip`."""
        while self._writes and self._writes[0].done():
            self._writes.pop(0).result()
        self._writes.append(self._store.writer.submit(lambda txn: self._put(txn, records)))

    def flip(self, records: dict[int, bytes], incomplete: int) -> Committed:
        """Write the rest and make this shelf the folder's."""
        self.write(records)
        for write in self._writes:
            write.result()
        committed = self._store.writer.run(lambda txn: self._flip(txn, incomplete))
        self._store.held_shelves.discard(self._shelf)
        return committed

    def abandon(self) -> None:
        """Leave the shelf to the sweeper."""
        self._store.held_shelves.discard(self._shelf)

    def _allocate(self, txn: Transaction) -> int:
        shelf = self._store.next_shelf(txn)
        # Registered as retired from the start: after a crash it is swept like any other.
        txn.put(id_key(shelf), id_key(self._folder), db=self._store.tables.retired)
        return shelf

    def _put(self, txn: Transaction, records: dict[int, bytes]) -> None:
        """Writer job. LMDB loops over sorted items itself (a third of the time of single puts) as long as no
        name or inode came before."""
        tables, ordered = self._store.tables, sorted(records.items())
        by_name = sorted((name_key(self._shelf, record.name_of(found)), id_key(inode)) for inode, found in ordered)
        children = [(child_key(self._shelf, inode), found) for inode, found in ordered]
        with self._store.nested(txn) as attempt:
            once = (
                put_new(attempt, by_name, tables.names) == put_new(attempt, children, tables.children) == len(ordered)
            )
            if not once:
                attempt.abort()
        if not once:
            ordered = [(inode, found) for inode, found in ordered if self._put_first(txn, inode, found)]
        self._count += len(ordered)
        # An inode that another folder still claims keeps that parent until the flip.
        folder_key = id_key(self._folder)
        claims = [(id_key(inode), folder_key) for inode, _ in ordered]
        if put_new(txn, claims, tables.parents) != len(claims):
            self._moved.extend(inode for inode, _ in ordered if txn.get(id_key(inode), db=tables.parents) != folder_key)

    def _put_first(self, txn: Transaction, inode: int, found: bytes) -> bool:
        """Put one entry unless its name or inode is on the shelf already."""
        tables = self._store.tables
        if txn.get(child_key(self._shelf, inode), db=tables.children) is not None:
            return False
        name = name_key(self._shelf, record.name_of(found))
        if not txn.put(name, id_key(inode), overwrite=False, db=tables.names):
            return False
        return txn.put(child_key(self._shelf, inode), found, db=tables.children)

    def _flip(self, txn: Transaction, incomplete: int) -> Committed:
        store, tables = self._store, self._store.tables
        old = store.folder_state(txn, self._folder)
        if (old and old.shelf) != (self._old and self._old.shelf) or not txn.delete(
            id_key(self._shelf), db=tables.retired
        ):
            raise ListingLost("the metadata store was emptied during a listing")
        for inode in self._moved:
            txn.put(id_key(inode), id_key(self._folder), db=tables.parents)
        state = FolderState(self._shelf, store.boot, self._asked_at, incomplete, self._count)
        txn.put(id_key(self._folder), pack_state(state), db=tables.folders)
        if old is None:
            return Committed(state, Diff(added=self._count), None, (), True, True)
        txn.put(id_key(old.shelf), id_key(self._folder), db=tables.retired)
        store.held_shelves.add(old.shelf)
        return Committed(state, None, old.shelf, (), False, True)


def shelf_changes(store: MetadataStore, folder: int, old_shelf: int, new_shelf: int) -> Iterator[Change]:
    """Changes between two shelves of a folder, in bounded memory; one long read transaction."""
    with store.read() as txn:
        yield from diff_sorted(store.by_name(txn, folder, old_shelf), store.by_name(txn, folder, new_shelf))


def forget(
    store: MetadataStore, txn: Transaction, folder: int, inode: int, *, is_folder: bool, dead_folders: list[int]
) -> None:
    """Writer job part: `inode` is no longer in `folder`. Unless another folder has it by now, it is dead, and a
    dead folder's shelf is retired."""
    tables = store.tables
    if txn.get(id_key(inode), db=tables.parents) != id_key(folder):
        return
    txn.delete(id_key(inode), db=tables.parents)
    if is_folder:
        dead_folders.append(inode)
        state = store.folder_state(txn, inode)
        if state is not None:
            txn.delete(id_key(inode), db=tables.folders)
            txn.put(id_key(state.shelf), id_key(inode), db=tables.retired)


def sweep(store: MetadataStore, *, limit: int = CHUNK) -> tuple[int, list[int]]:
    """Remove up to `limit` entries of retired shelves. Returns how many, and folders found dead by it.

    0 entries means nothing is left to sweep. Blocks for one transaction.
    """
    return store.writer.run(lambda txn: _sweep(store, txn, limit))


def _sweep(store: MetadataStore, txn: Transaction, limit: int) -> tuple[int, list[int]]:
    tables = store.tables
    dead_folders: list[int] = []
    swept = 0
    with txn.cursor(db=tables.retired) as cursor:
        retired = [(id_of(key), id_of(value)) for key, value in cursor]
    for shelf, folder in retired:
        if shelf in store.held_shelves or swept >= limit:
            continue
        state = store.folder_state(txn, folder)
        records = list(islice(store.records(txn, shelf), limit - swept))
        for inode, found in records:
            txn.delete(child_key(shelf, inode), db=tables.children)
            txn.delete(name_key(shelf, record.name_of(found)), db=tables.names)
            if state is None or txn.get(child_key(state.shelf, inode), db=tables.children) is None:
                forget(store, txn, folder, inode, is_folder=record.is_folder(found), dead_folders=dead_folders)
        swept += len(records)
        if not records or swept < limit:
            txn.delete(id_key(shelf), db=tables.retired)
            swept = max(swept, 1)
    return swept, dead_folders
