"""The embedded master's database: inodes by id, ids by parent and name, and the ids still free.

LMDB, three tables: `inodes` (id -> record), `names` (parent id + name -> id, so that the children of a folder lie
side by side in the order of their names), `meta` (cluster id, source, counters). One writer at a time, readers are
never blocked. Every commit is synced: an id that a client has seen is never given to another file, not even after
a crash of the machine.

Does not know the source, sync rules or blocks.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import lmdb

from fusecache.embedded import inode as inodes
from fusecache.embedded.inode import ROOT_ID, Inode
from fusecache.errors import NotFound, StateError

MAP_SIZE_BYTES = 64 << 30
"""Sparse map: 1,000,000 files take about 170 MB of it."""
MAX_READERS = 2048
FORMAT = b"1"
_ID = struct.Struct(">Q")


class InodeTable:
    """The database of one source folder. Thread-safe."""

    def __init__(self, folder: Path, source: bytes) -> None:
        """Open it, or create it without a root. StateError when it can't be used or is another source folder's."""
        try:
            self._env = lmdb.open(str(folder), map_size=MAP_SIZE_BYTES, max_dbs=3, max_readers=MAX_READERS)
            self._inodes = self._env.open_db(b"inodes")
            self._names = self._env.open_db(b"names")
            self._meta = self._env.open_db(b"meta")
        except lmdb.Error as exc:
            raise StateError(f"database {str(folder)!r} can't be opened: {exc}") from exc
        self.cluster_id = self._prepare(source)

    def close(self) -> None:
        """Close it; no call may be under way."""
        self._env.close()

    def get(self, inode_id: int) -> Inode | None:
        """The inode of an id."""
        with self._env.begin() as txn:
            return self._get(txn, inode_id)

    def child(self, parent_id: int, name: bytes) -> Inode | None:
        """The inode of a name in a folder."""
        with self._env.begin() as txn:
            return self._child(txn, parent_id, name)

    def batches(self, folder_id: int, size: int) -> Iterator[list[Inode]]:
        """Children of a folder in the order of their names, each batch a transaction of its own."""
        after = b""
        while True:
            with self._env.begin() as txn:
                found = list(self._children(txn, folder_id, after, size))
            if found:
                yield found
            if len(found) < size:
                return
            after = found[-1].name

    @contextmanager
    def writing(self) -> Iterator[InodeWrite]:
        """A transaction, committed at the end of the block, dropped when it raises."""
        with self._env.begin(write=True) as txn:
            write = InodeWrite(self, txn)
            yield write
            write.save_counters()

    def _prepare(self, source: bytes) -> str:
        with self._env.begin(write=True) as txn:
            version = txn.get(b"format", db=self._meta)
            if version is None:
                for key, value in (
                    (b"format", FORMAT),
                    (b"cluster_id", str(uuid.uuid4()).encode()),
                    (b"source", source),
                    (b"next_container", _ID.pack(1)),
                    (b"next_folder", _ID.pack(ROOT_ID + 1)),
                ):
                    txn.put(key, value, db=self._meta)
            elif bytes(version) != FORMAT:
                raise StateError(f"database format {bytes(version)!r} is not {FORMAT!r}; remove the state folder")
            owner = bytes(txn.get(b"source", db=self._meta) or b"")
            if owner != source:
                raise StateError(f"the state folder belongs to source {owner!r}, not to {source!r}")
            return bytes(txn.get(b"cluster_id", db=self._meta) or b"").decode()

    def _get(self, txn: lmdb.Transaction, inode_id: int) -> Inode | None:
        value = txn.get(_ID.pack(inode_id), db=self._inodes) if inode_id >= 0 else None
        return None if value is None else inodes.decode(inode_id, bytes(value))

    def _child(self, txn: lmdb.Transaction, parent_id: int, name: bytes) -> Inode | None:
        key = txn.get(_ID.pack(parent_id) + name, db=self._names)
        return None if key is None else self._get(txn, _ID.unpack(key)[0])

    def _children(self, txn: lmdb.Transaction, folder_id: int, after: bytes, limit: int) -> Iterator[Inode]:
        prefix = _ID.pack(folder_id)
        cursor = txn.cursor(db=self._names)
        # b"" sorts before every name; the zero byte makes the start exclusive, since no name holds one.
        if not cursor.set_range(prefix + after + b"\0" if after else prefix):
            return
        for key, value in islice(cursor.iternext(), limit):
            if not bytes(key).startswith(prefix):
                return
            inode = self._get(txn, _ID.unpack(value)[0])
            if inode is not None:
                yield inode


class InodeWrite:
    """One write transaction. Made by `InodeTable.writing`."""

    def __init__(self, table: InodeTable, txn: lmdb.Transaction) -> None:
        self._table = table
        self._txn = txn
        # Read once and saved once: ids of a batch cost no database access.
        self._next_container: int = _ID.unpack(txn.get(b"next_container", db=table._meta) or b"")[0]
        self._next_folder: int = _ID.unpack(txn.get(b"next_folder", db=table._meta) or b"")[0]
        self._saved = (self._next_container, self._next_folder)

    def get(self, inode_id: int) -> Inode:
        """The inode of an id. NotFound when it went meanwhile."""
        found = self._table._get(self._txn, inode_id)
        if found is None:
            raise NotFound(f"id {inode_id} is gone")
        return found

    def child(self, parent_id: int, name: bytes) -> Inode | None:
        """The inode of a name in a folder."""
        return self._table._child(self._txn, parent_id, name)

    def first_children(self, folder_id: int, limit: int) -> list[Inode]:
        """Some children of a folder."""
        return list(self._table._children(self._txn, folder_id, b"", limit))

    def put(self, inode: Inode) -> None:
        """Store an inode under its id."""
        self._txn.put(_ID.pack(inode.id), inodes.encode(inode), db=self._table._inodes)

    def name(self, inode: Inode) -> None:
        """Let the inode's parent and name lead to it."""
        self._txn.put(_ID.pack(inode.parent) + inode.name, _ID.pack(inode.id), db=self._table._names)

    def forget_id(self, inode: Inode) -> None:
        """Forget the inode, not its name."""
        self._txn.delete(_ID.pack(inode.id), db=self._table._inodes)

    def forget_name(self, inode: Inode) -> None:
        """Forget the inode's name."""
        self._txn.delete(_ID.pack(inode.parent) + inode.name, db=self._table._names)

    def count_children(self, folder_id: int, change: int) -> None:
        """Correct the number of children of a folder. NotFound when it went meanwhile."""
        if change:
            folder = self.get(folder_id)
            self.put(folder._replace(children=folder.children + change))

    def new_file_id(self) -> int:
        """The id of the next file. StateError when all are used."""
        return inodes.file_id(self._new_container())

    def new_folder_id(self) -> int:
        """The id of the next folder."""
        new_id = self._next_folder
        self._next_folder = new_id + 1
        if self._next_folder & inodes.LAST_SEQUENCE == inodes.LAST_SEQUENCE:
            self._next_folder = self._new_container() << 24
        return new_id

    def save_counters(self) -> None:
        """Write the counters back if ids were taken."""
        if (self._next_container, self._next_folder) != self._saved:
            self._txn.put(b"next_container", _ID.pack(self._next_container), db=self._table._meta)
            self._txn.put(b"next_folder", _ID.pack(self._next_folder), db=self._table._meta)

    def _new_container(self) -> int:
        container = self._next_container
        if container > inodes.MAX_CONTAINER:
            raise StateError("no container ids left; remove the state folder")
        self._next_container = container + 1
        return container
