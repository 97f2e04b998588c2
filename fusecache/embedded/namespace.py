"""What the master remembers of the source folder: names -> ids -> status, kept in LMDB over restarts.

A request's way: `get` and `children` walk the path through the database. Only where Alluxio would look at its
UFS is the source looked at: a name never seen with load type ONCE or ALWAYS, a folder never listed, and
whatever a sync interval calls too old. Everything else is answered from memory of the past, so a change
nobody synchronised goes unnoticed, as with Alluxio.

A file whose length or modification time changed gets a new id, and so new block ids; other attributes change
under the same id. Times of the last synchronisation are held in memory: after a restart everything counts as
never synchronised, as after a restart of an Alluxio master.

Scans of large folders are streamed: a few thousand entries are looked at, then written in one transaction.
Locks: `_folder_lock` (striped by folder id) orders scans and single loads within one folder; LMDB allows one
writer at a time; readers are never blocked. Not here: protobuf, block files.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path

import cachetools
import lmdb

from fusecache.clock import Clock
from fusecache.embedded import inode as inodes
from fusecache.embedded.inode import ROOT_ID, Inode
from fusecache.embedded.source import Found, SourceFolder
from fusecache.errors import InvalidRequest, NotFound, StateError

MAP_SIZE_BYTES = 64 << 30
"""Sparse map: 1,000,000 files take about 250 MB of it."""
SCAN_BATCH = 4096
"""Entries per write transaction: 1,000,000 files are 245 transactions, and a writer waits at most some 50 ms."""
FORMAT = b"1"
_ID = struct.Struct(">Q")
_SYNC_TIMES_KEPT = 200_000
_LOCK_STRIPES = 64


class Load(Enum):
    """Whether names are looked up in the source (wire: LoadMetadataPType)."""

    NEVER = 0
    ONCE = 1
    ALWAYS = 2


class Namespace:
    """The embedded master's inode tree. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        source: SourceFolder,
        *,
        block_size: int,
        clock: Clock,
        default_sync_interval_ms: int = -1,
        on_gone: Callable[[Inode], None] | None = None,
    ) -> None:
        """Open or create the database in `folder`.

        `on_gone` gets the old inode of each file that vanished or whose content was replaced, after the change
        is committed. StateError when the database can't be used or belongs to another source folder.
        """
        self._source = source
        self._block_size = block_size
        self._clock = clock
        self._default_sync_interval_ms = default_sync_interval_ms
        self._on_gone = on_gone
        self._synced: cachetools.LRUCache[int, float] = cachetools.LRUCache(_SYNC_TIMES_KEPT)
        self._children_synced: cachetools.LRUCache[int, float] = cachetools.LRUCache(_SYNC_TIMES_KEPT)
        self._absent: cachetools.LRUCache[tuple[int, bytes], float] = cachetools.LRUCache(_SYNC_TIMES_KEPT)
        self._times_lock = threading.Lock()
        self._folder_locks = [threading.RLock() for _ in range(_LOCK_STRIPES)]
        try:
            self._env = lmdb.open(str(folder), map_size=MAP_SIZE_BYTES, max_dbs=3, max_readers=2048)
            self._inodes = self._env.open_db(b"inodes")
            self._names = self._env.open_db(b"names")
            self._meta = self._env.open_db(b"meta")
        except lmdb.Error as exc:
            raise StateError(f"database {str(folder)!r} can't be opened: {exc}") from exc
        self.cluster_id = self._prepare()

    def close(self) -> None:
        """Close the database; no call may be under way."""
        self._env.close()

    # -- questions -----------------------------------------------------------------------------------------

    def get(self, path: bytes, load: Load, sync_interval_ms: int | None) -> Inode:
        """Status of a path, synchronised first when it is older than the interval.

        `sync_interval_ms`: None = this server's default, -1 never, 0 always, N when the last look is older.
        NotFound when the path does not exist, InvalidRequest when it is no path.
        """
        names = split_path(path)
        inode = self._root()
        sync_interval_ms = self._default_sync_interval_ms if sync_interval_ms is None else sync_interval_ms
        for depth, name in enumerate(names):
            parent = inode
            if not parent.folder:
                raise InvalidRequest(
                    f"Traversal failed for path {path.decode(errors='replace')}."
                    f" Component {depth + 1}({parent.name.decode(errors='replace')}) is a file, not a directory."
                )
            child = self._child(parent.id, name)
            if child is None:
                if self._look_for_missing(parent.id, name, load, sync_interval_ms):
                    child = self._load_one(parent, name, b"/" + b"/".join(names[: depth + 1]))
            elif depth == len(names) - 1 and self._due(child.id, parent.id, sync_interval_ms):
                child = self._load_one(parent, name, b"/" + b"/".join(names))
            if child is None:
                raise NotFound(f'Path "{path.decode(errors="replace")}" does not exist.')
            inode = child
        if not names and self._due(ROOT_ID, None, sync_interval_ms):
            inode = self._refresh_root()
        return inode

    def list_folder(
        self, path: bytes, load: Load, sync_interval_ms: int | None, batch: int
    ) -> Iterator[tuple[bytes, list[Inode]]]:
        """Children of a folder in batches, each with the folder's path; a file lists itself.

        The folder is scanned first when it was never listed (unless `load` is NEVER) or is older than the
        interval. Not a snapshot: every batch is its own transaction, ordered by name, so that a slow reader
        holds nothing; a name present throughout is listed exactly once.
        """
        inode = self.get(path, load, sync_interval_ms)
        parent_path = b"/" + b"/".join(split_path(path))
        if not inode.folder:
            yield parent_path.rpartition(b"/")[0] or b"/", [inode]
            return
        interval = self._default_sync_interval_ms if sync_interval_ms is None else sync_interval_ms
        never_listed = not inode.loaded and load is not Load.NEVER
        if never_listed or load is Load.ALWAYS or self._children_due(inode.id, interval):
            self._scan(inode, parent_path)
        yield from ((parent_path, found) for found in self._batches(inode.id, batch))

    def by_id(self, inode_id: int) -> Inode:
        """The inode of an id, without any look at the source. NotFound when unknown."""
        with self._env.begin() as txn:
            value = txn.get(_ID.pack(inode_id), db=self._inodes) if inode_id >= 0 else None
        if value is None:
            raise NotFound(f"fileId {inode_id} does not exist")
        return inodes.decode(inode_id, bytes(value))

    def path_of(self, inode_id: int) -> bytes:
        """Path of an id. NotFound when unknown."""
        parts: list[bytes] = []
        inode = self.by_id(inode_id)
        while inode.id != ROOT_ID:
            parts.append(inode.name)
            inode = self.by_id(inode.parent)
        return b"/" + b"/".join(reversed(parts))

    def files_below(self, inode: Inode, *, recursive: bool) -> Iterator[Inode]:
        """Known files of a folder (with all folders below when `recursive`), or the file itself."""
        if not inode.folder:
            yield inode
            return
        for batch in self._batches(inode.id, SCAN_BATCH):
            for child in batch:
                if not child.folder:
                    yield child
                elif recursive:
                    yield from self.files_below(child, recursive=True)

    # -- looks at the source -------------------------------------------------------------------------------

    def _load_one(self, parent: Inode, name: bytes, path: bytes) -> Inode | None:
        """Look at one name in the source and remember the answer; None when it is not there."""
        with self._folder_lock(parent.id):
            found = self._source.look(path)
            gone: list[Inode] = []
            with self._env.begin(write=True) as txn:
                before = self._child_in(txn, parent.id, name)
                after = self._merge(txn, parent.id, name, before, found, gone)
                self._count_children(txn, parent.id, (after is not None) - (before is not None))
            with self._times_lock:
                if after is None:
                    self._absent[parent.id, name] = self._clock.now()
                else:
                    self._synced[after.id] = self._clock.now()
        self._report(gone)
        return after

    def _refresh_root(self) -> Inode:
        """Attributes of the root; its id never changes."""
        found = self._source.look(b"/")
        if found is None:
            raise NotFound("the served folder is gone")
        with self._folder_lock(ROOT_ID), self._env.begin(write=True) as txn:
            root = self._with_attributes(self._inode_in(txn, ROOT_ID), found)
            self._put(txn, root)
        self._mark(self._synced, ROOT_ID)
        return root

    def _scan(self, folder: Inode, path: bytes) -> None:
        """Merge the folder's content in the source into the database, `SCAN_BATCH` names a transaction."""
        with self._folder_lock(folder.id):
            known_before = self._inode(folder.id).children
            entries = self._source.scan(path)
            seen_again = 0
            while batch := list(islice(entries, SCAN_BATCH)):
                gone: list[Inode] = []
                batch.sort()  # B-tree inserts in order touch each page once
                with self._env.begin(write=True) as txn:
                    added = 0
                    for name, found in batch:
                        before = self._child_in(txn, folder.id, name)
                        self._merge(txn, folder.id, name, before, found, gone)
                        added += before is None
                    seen_again += len(batch) - added
                    self._count_children(txn, folder.id, added)
                self._report(gone)
            if seen_again < known_before:
                self._drop_vanished(folder.id, path)
            with self._env.begin(write=True) as txn:
                self._put(txn, self._inode_in(txn, folder.id)._replace(loaded=True))
            self._mark(self._synced, folder.id)
            self._mark(self._children_synced, folder.id)

    def _drop_vanished(self, folder_id: int, path: bytes) -> None:
        """Forget children that the source has no longer.

        Each is looked for again rather than kept in a set of all names seen: no memory, and a name that was
        added meanwhile is not dropped.
        """
        prefix = path.rstrip(b"/") + b"/"
        for batch in self._batches(folder_id, SCAN_BATCH):
            vanished = [child for child in batch if not self._source.exists(prefix + child.name)]
            if not vanished:
                continue
            gone: list[Inode] = []
            with self._env.begin(write=True) as txn:
                for child in vanished:
                    self._remove(txn, child, gone)
                self._count_children(txn, folder_id, -len(vanished))
            self._report(gone)

    def _merge(
        self,
        txn: lmdb.Transaction,
        parent_id: int,
        name: bytes,
        before: Inode | None,
        found: Found | None,
        gone: list[Inode],
    ) -> Inode | None:
        """Bring one name up to date within a transaction; the inode it has afterwards."""
        if found is None:
            if before is not None:
                self._remove(txn, before, gone)
            return None
        if before is not None and before.folder == found.folder:
            same_content = found.folder or (before.length == found.length and before.mtime_ns == found.mtime_ns)
            if same_content:
                after = self._with_attributes(before, found)
                if after != before:
                    self._put(txn, after)
                return after
        if before is not None:
            if before.folder:
                self._remove(txn, before, gone)
            else:
                txn.delete(_ID.pack(before.id), db=self._inodes)
                gone.append(before)
        return self._add(txn, parent_id, name, found)

    def _add(self, txn: lmdb.Transaction, parent_id: int, name: bytes, found: Found) -> Inode:
        new_id = self._new_folder_id(txn) if found.folder else inodes.file_id(self._new_container(txn))
        inode = Inode(
            id=new_id,
            parent=parent_id,
            name=name,
            folder=found.folder,
            length=found.length,
            mtime_ns=found.mtime_ns,
            mode=found.mode,
            uid=found.uid,
            gid=found.gid,
            block_size=0 if found.folder else self._block_size,
            created_ms=time.time_ns() // 1_000_000,
            loaded=False,
            children=0,
        )
        self._put(txn, inode)
        txn.put(_ID.pack(parent_id) + name, _ID.pack(new_id), db=self._names)
        with self._times_lock:
            self._absent.pop((parent_id, name), None)
        return inode

    def _remove(self, txn: lmdb.Transaction, inode: Inode, gone: list[Inode]) -> None:
        """Forget an inode and, for a folder, everything below it."""
        if inode.folder:
            for child in list(self._children_in(txn, inode.id, b"", None)):
                self._remove(txn, child, gone)
        else:
            gone.append(inode)
        txn.delete(_ID.pack(inode.id), db=self._inodes)
        txn.delete(_ID.pack(inode.parent) + inode.name, db=self._names)

    def _report(self, gone: list[Inode]) -> None:
        if self._on_gone is not None:
            for inode in gone:
                self._on_gone(inode)

    # -- sync times ----------------------------------------------------------------------------------------

    def _due(self, inode_id: int | None, parent_id: int | None, interval_ms: int) -> bool:
        """Whether one name must be looked at again; a listing of its parent counts as a look at it."""
        with self._times_lock:
            own = self._synced.get(inode_id, None) if inode_id is not None else None
            listed = self._children_synced.get(parent_id, None) if parent_id is not None else None
        return self._older(max((t for t in (own, listed) if t is not None), default=None), interval_ms)

    def _look_for_missing(self, parent_id: int, name: bytes, load: Load, interval_ms: int) -> bool:
        """Whether a name that is not known is looked for in the source.

        As Alluxio's absent cache: a name that was looked for and missing stays missing for load type ONCE until
        it is synchronised, or its folder is.
        """
        with self._times_lock:
            absent_since = self._absent.get((parent_id, name), None)
        known_absent = absent_since is not None
        if load is Load.ALWAYS or (load is Load.ONCE and not known_absent):
            return True
        return self._older(absent_since, interval_ms) if known_absent else self._due(None, parent_id, interval_ms)

    def _children_due(self, folder_id: int, interval_ms: int) -> bool:
        with self._times_lock:
            listed = self._children_synced.get(folder_id, None)
        return self._older(listed, interval_ms)

    def _older(self, last: float | None, interval_ms: int) -> bool:
        if interval_ms < 0:
            return False
        return interval_ms == 0 or last is None or (self._clock.now() - last) * 1000 > interval_ms

    def _mark(self, times: cachetools.LRUCache[int, float], inode_id: int) -> None:
        with self._times_lock:
            times[inode_id] = self._clock.now()

    # -- database ------------------------------------------------------------------------------------------

    def _prepare(self) -> str:
        """Create what a new database needs, check an old one; its cluster id."""
        found = self._source.look(b"/")
        if found is None:
            raise NotFound("the served folder is gone")
        with self._env.begin(write=True) as txn:
            version = txn.get(b"format", db=self._meta)
            if version is not None and bytes(version) != FORMAT:
                raise StateError(f"database format {bytes(version)!r} is not {FORMAT!r}; remove the state folder")
            if version is None:
                txn.put(b"format", FORMAT, db=self._meta)
                txn.put(b"cluster_id", str(uuid.uuid4()).encode(), db=self._meta)
                txn.put(b"source", self._source.root, db=self._meta)
                txn.put(b"next_container", _ID.pack(1), db=self._meta)
                txn.put(b"next_folder", _ID.pack(ROOT_ID + 1), db=self._meta)
                root = Inode(ROOT_ID, ROOT_ID, b"", True, 0, found.mtime_ns, found.mode, found.uid, found.gid, 0,
                             time.time_ns() // 1_000_000, False, 0)  # fmt: skip
                self._put(txn, root)
            source = bytes(txn.get(b"source", db=self._meta) or b"")
            if source != self._source.root:
                raise StateError(f"the state folder belongs to source {source!r}, not to {self._source.root!r}")
            return bytes(txn.get(b"cluster_id", db=self._meta) or b"").decode()

    def _new_container(self, txn: lmdb.Transaction) -> int:
        container: int = _ID.unpack(txn.get(b"next_container", db=self._meta) or b"")[0]
        if container > inodes.MAX_CONTAINER:
            raise StateError("no container ids left; remove the state folder")
        txn.put(b"next_container", _ID.pack(container + 1), db=self._meta)
        return container

    def _new_folder_id(self, txn: lmdb.Transaction) -> int:
        new_id: int = _ID.unpack(txn.get(b"next_folder", db=self._meta) or b"")[0]
        following = new_id + 1
        if following & inodes.LAST_SEQUENCE == inodes.LAST_SEQUENCE:
            following = self._new_container(txn) << 24
        txn.put(b"next_folder", _ID.pack(following), db=self._meta)
        return new_id

    def _put(self, txn: lmdb.Transaction, inode: Inode) -> None:
        txn.put(_ID.pack(inode.id), inodes.encode(inode), db=self._inodes)

    def _root(self) -> Inode:
        return self._inode(ROOT_ID)

    def _inode(self, inode_id: int) -> Inode:
        with self._env.begin() as txn:
            return self._inode_in(txn, inode_id)

    def _inode_in(self, txn: lmdb.Transaction, inode_id: int) -> Inode:
        value = txn.get(_ID.pack(inode_id), db=self._inodes)
        if value is None:
            raise NotFound(f"id {inode_id} is gone")
        return inodes.decode(inode_id, bytes(value))

    def _child(self, parent_id: int, name: bytes) -> Inode | None:
        with self._env.begin() as txn:
            return self._child_in(txn, parent_id, name)

    def _child_in(self, txn: lmdb.Transaction, parent_id: int, name: bytes) -> Inode | None:
        key = txn.get(_ID.pack(parent_id) + name, db=self._names)
        if key is None:
            return None
        return self._inode_in(txn, _ID.unpack(key)[0])

    def _children_in(self, txn: lmdb.Transaction, folder_id: int, after: bytes, limit: int | None) -> Iterable[Inode]:
        """Children with names greater than `after`, in order of their bytes."""
        prefix = _ID.pack(folder_id)
        cursor = txn.cursor(db=self._names)
        # b"" sorts before every name; the zero byte makes the start exclusive, since no name holds one.
        if not cursor.set_range(prefix + after + b"\0" if after else prefix):
            return
        for key, value in islice(cursor.iternext(), limit):
            if not bytes(key).startswith(prefix):
                return
            yield self._inode_in(txn, _ID.unpack(value)[0])

    def _batches(self, folder_id: int, batch: int) -> Iterator[list[Inode]]:
        after = b""
        while True:
            with self._env.begin() as txn:
                found = list(self._children_in(txn, folder_id, after, batch))
            if found:
                yield found
            if len(found) < batch:
                return
            after = found[-1].name

    def _count_children(self, txn: lmdb.Transaction, folder_id: int, change: int) -> None:
        if change:
            folder = self._inode_in(txn, folder_id)
            self._put(txn, folder._replace(children=folder.children + change))

    def _folder_lock(self, folder_id: int) -> threading.RLock:
        return self._folder_locks[folder_id % _LOCK_STRIPES]

    @staticmethod
    def _with_attributes(inode: Inode, found: Found) -> Inode:
        """The inode with what may change under one id taken from the source.

        Not the modification time: a file with another one is another file, a folder keeps its first one.
        """
        return inode._replace(mode=found.mode, uid=found.uid, gid=found.gid)


def split_path(path: bytes) -> list[bytes]:
    """Components of an absolute path; inner doubled slashes, `.` and `..` are resolved, as Alluxio does.

    InvalidRequest when it is not absolute, begins with two slashes (to Alluxio a host follows), has a zero byte
    or leads above the root.
    """
    names: list[bytes] = []
    valid = path.startswith(b"/") and not path.startswith(b"//") and b"\0" not in path
    for name in path.split(b"/"):
        if name == b"..":
            valid = valid and bool(names)
            names = names[:-1]
        elif name not in (b"", b"."):
            names.append(name)
    if not valid:
        raise InvalidRequest(f'Path "{path.decode(errors="replace")}" is invalid.')
    return names
