"""The tables of the metadata store, and reading them: the same for the process that writes and those that only read.

    folders   folder inode     -> FolderState: the shelf its entries lie on, when it was listed
    children  (shelf, inode)   -> record                  ordered by inode: pages of readdir
    names     (shelf, name)    -> inode                   look-ups
    parents   inode            -> folder inode            from an inode to its record, and to its path
    retired   shelf            -> folder inode            shelves to sweep
    meta      format, next shelf

What a shelf is and why: `cache.store`. Every call takes a transaction, so that one request sees one state.

Opens no file, and writes nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import lmdb

from fusecache.cache import record
from fusecache.cache.record import Entry
from fusecache.cache.transaction import Transaction

TABLES: Final = ("folders", "children", "names", "parents", "retired", "meta")

FILE_NAME: Final = "metadata.lmdb"
"""Of the database in the store's folder."""

MAX_TABLES: Final = 6 * 64
MAX_READERS: Final = 510

_ID: Final = struct.Struct(">Q")  # big-endian: keys sort as numbers
_PAIR: Final = struct.Struct(">QQ")
_STATE: Final = struct.Struct("<Q8sdIQ")


class FolderState(NamedTuple):
    """What the store knows about a listed folder."""

    shelf: int
    boot: bytes
    """Which boot `asked_at` belongs to (`TableReader.boot`)."""
    asked_at: float
    """CLOCK_BOOTTIME when its listing was asked for."""
    incomplete: int
    """Files of the listing that were incomplete and therefore are not on the shelf."""
    entries: int
    """Complete entries on the shelf."""


class Tables(NamedTuple):
    """Database handles of one namespace."""

    folders: lmdb._Database
    children: lmdb._Database
    names: lmdb._Database
    parents: lmdb._Database
    retired: lmdb._Database
    meta: lmdb._Database


def id_key(number: int) -> bytes:
    """Key of an inode or shelf."""
    return _ID.pack(number)


def child_key(shelf: int, inode: int) -> bytes:
    """Key in `children`."""
    return _PAIR.pack(shelf, inode)


def name_key(shelf: int, name: bytes) -> bytes:
    """Key in `names`."""
    return _ID.pack(shelf) + name


def id_of(key: bytes) -> int:
    """The number in an 8-byte key or value."""
    number: int = _ID.unpack(key)[0]
    return number


def pack_state(state: FolderState) -> bytes:
    """Value in `folders`."""
    return _STATE.pack(*state)


def boot_hash(boot: str) -> bytes:
    """A boot's id as it is kept in `FolderState.boot`."""
    return hashlib.blake2b(boot.encode(), digest_size=8).digest()


class TableReader:
    """Reads the tables of one namespace; from any thread."""

    tables: Tables
    boot: bytes
    """Hash of this boot's id, as in `FolderState.boot`."""
    read: Callable[[], Transaction]
    """Starts a read transaction (a context manager); keep it short, LMDB can't reuse pages it sees."""

    def folder_state(self, txn: Transaction, inode: int) -> FolderState | None:
        """State of a listed folder, None when it was never listed (or is gone)."""
        packed = txn.get(_ID.pack(inode), db=self.tables.folders)
        return None if packed is None else FolderState(*_STATE.unpack(packed))

    def parent_of(self, txn: Transaction, inode: int) -> int | None:
        """The folder whose listing named `inode` last."""
        packed = txn.get(_ID.pack(inode), db=self.tables.parents)
        return None if packed is None else id_of(packed)

    def child(self, txn: Transaction, folder: int, shelf: int, name: bytes) -> Entry | None:
        """The entry called `name` on a folder's shelf."""
        prefix = _ID.pack(shelf)
        packed = txn.get(prefix + name, db=self.tables.names)
        if packed is None:
            return None
        found = txn.get(prefix + packed, db=self.tables.children)
        return None if found is None else record.decode(id_of(packed), folder, found)

    def on_shelf(self, txn: Transaction, folder: int, shelf: int, inode: int) -> Entry | None:
        """The entry with `inode` on a folder's shelf."""
        found = txn.get(_PAIR.pack(shelf, inode), db=self.tables.children)
        return None if found is None else record.decode(inode, folder, found)

    def entry(self, txn: Transaction, inode: int) -> Entry | None:
        """The entry with `inode`, wherever it lies; None when no current listing has it."""
        key = _ID.pack(inode)
        parent = txn.get(key, db=self.tables.parents)
        if parent is None:
            return None
        state = txn.get(parent, db=self.tables.folders)
        if state is None:
            return None
        found = txn.get(_ID.pack(_STATE.unpack(state)[0]) + key, db=self.tables.children)
        return None if found is None else record.decode(inode, id_of(parent), found)

    def page(self, txn: Transaction, folder: int, shelf: int, after: int, limit: int) -> list[Entry]:
        """Up to `limit` entries of a shelf with inode > `after`, ordered by inode."""
        entries: list[Entry] = []
        for inode, found in self.records(txn, shelf, after):
            entries.append(record.decode(inode, folder, found))
            if len(entries) >= limit:
                break
        return entries

    def records(self, txn: Transaction, shelf: int, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """(inode, record) of a shelf with inode > `after`, ordered by inode."""
        prefix = _ID.pack(shelf)
        with txn.cursor(db=self.tables.children) as cursor:
            if cursor.set_range(_PAIR.pack(shelf, after + 1)):
                for key, found in cursor:
                    if not key.startswith(prefix):
                        return
                    yield id_of(key[8:]), found

    def by_name(self, txn: Transaction, folder: int, shelf: int) -> Iterator[Entry]:
        """Every entry of a shelf, ordered by name."""
        prefix = _ID.pack(shelf)
        with txn.cursor(db=self.tables.names) as cursor:
            if cursor.set_range(prefix):
                for key, packed in cursor:
                    if not key.startswith(prefix):
                        return
                    entry = self.on_shelf(txn, folder, shelf, id_of(packed))
                    if entry is not None:
                        yield entry

    def entry_count(self) -> int:
        """Entries remembered, over all folders."""
        with self.read() as txn:
            return txn.stat(self.tables.parents)["entries"]
