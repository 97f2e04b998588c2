"""What the master remembers of the source folder: names -> ids -> status, kept over restarts (`inode_table`).

A request's way: `get` and `list_folder` walk the path through the database. Only where Alluxio would look at its
UFS is the source looked at: a name never seen with load type ONCE or ALWAYS, a folder never listed, and
whatever a sync interval calls too old. Everything else is answered from memory of the past, so a change
nobody synchronised goes unnoticed, as with Alluxio.

A file whose length or modification time changed gets a new id, and so new block ids; other attributes change
under the same id. `sync_times` remembers when what was looked at.

Scans of large folders are streamed: a few thousand entries are looked at, then written in one transaction, and
single names can be loaded meanwhile. One scan of a folder at a time (`_scan_lock`, striped by folder id). What a
transaction writes is looked at within it, or, when it differs from what is known, looked at again, so that a newer
look is never undone by an older one. Not here: protobuf, block files.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path

from fusecache.clock import Clock
from fusecache.embedded.inode import ROOT_ID, Inode
from fusecache.embedded.inode_table import InodeTable, InodeWrite
from fusecache.embedded.source import Found, SourceFolder
from fusecache.embedded.sync_times import SyncTimes
from fusecache.errors import InvalidRequest, NotFound

SCAN_BATCH = 4096
"""Entries per write transaction: 1,000,000 files are 245 transactions, and a writer waits at most some 50 ms."""
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
        self._default_sync_interval_ms = default_sync_interval_ms
        self._on_gone = on_gone
        self._times = SyncTimes(clock)
        self._added_while_scanned: Counter[int] = Counter()
        self._added_lock = threading.Lock()
        self._scan_locks = [threading.Lock() for _ in range(_LOCK_STRIPES)]
        self._table = InodeTable(folder, source.root)
        self.cluster_id = self._table.cluster_id
        if self._table.get(ROOT_ID) is None:
            self._make_root()

    def close(self) -> None:
        """Close the database; no call may be under way."""
        self._table.close()

    # -- questions -----------------------------------------------------------------------------------------

    def get(self, path: bytes, load: Load, sync_interval_ms: int | None) -> Inode:
        """Status of a path, synchronised first when it is older than the interval.

        `sync_interval_ms`: None = this server's default, -1 never, 0 always, N when the last look is older.
        NotFound when the path does not exist, InvalidRequest when it is no path.
        """
        names = split_path(path)
        inode = self.by_id(ROOT_ID)
        sync_interval_ms = self._default_sync_interval_ms if sync_interval_ms is None else sync_interval_ms
        for depth, name in enumerate(names):
            parent = inode
            if not parent.folder:
                raise InvalidRequest(
                    f"Traversal failed for path {path.decode(errors='replace')}."
                    f" Component {depth + 1}({parent.name.decode(errors='replace')}) is a file, not a directory."
                )
            child = self._table.child(parent.id, name)
            if child is None:
                if self._look_for(parent.id, name, load, sync_interval_ms):
                    child = self._load_one(parent, name, b"/" + b"/".join(names[: depth + 1]))
            elif depth == len(names) - 1 and self._times.due(child.id, parent.id, sync_interval_ms):
                child = self._load_one(parent, name, b"/" + b"/".join(names))
            if child is None:
                raise NotFound(f'Path "{path.decode(errors="replace")}" does not exist.')
            inode = child
        if not names and self._times.due(ROOT_ID, None, sync_interval_ms):
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
        if never_listed or load is Load.ALWAYS or self._times.children_due(inode.id, interval):
            self._scan(inode, parent_path)
        yield from ((parent_path, found) for found in self._table.batches(inode.id, batch))

    def by_id(self, inode_id: int) -> Inode:
        """The inode of an id, without any look at the source. NotFound when unknown."""
        found = self._table.get(inode_id)
        if found is None:
            raise NotFound(f"inodeId {inode_id} does not exist")
        return found

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
        for batch in self._table.batches(inode.id, SCAN_BATCH):
            for child in batch:
                if not child.folder:
                    yield child
                elif recursive:
                    yield from self.files_below(child, recursive=True)

    def _look_for(self, parent_id: int, name: bytes, load: Load, interval_ms: int) -> bool:
        """Whether a name that is not known is looked for in the source."""
        if load is Load.ALWAYS:
            return True
        return self._times.look_for(parent_id, name, load=load is Load.ONCE, interval_ms=interval_ms)

    # -- looks at the source -------------------------------------------------------------------------------

    def _load_one(self, parent: Inode, name: bytes, path: bytes) -> Inode | None:
        """Look at one name in the source and remember the answer; None when it is not there."""
        gone: list[Inode] = []
        with self._table.writing() as write:
            before = write.child(parent.id, name)
            after = self._merge(write, parent.id, name, before, self._source.look(path), gone)
            write.count_children(parent.id, (after is not None) - (before is not None))
        if after is None:
            self._times.missed(parent.id, name)
        else:
            self._times.looked_at(after.id)
        if before is None and after is not None:
            with self._added_lock:
                if parent.id in self._added_while_scanned:
                    self._added_while_scanned[parent.id] += 1
        self._report(gone)
        return after

    def _make_root(self) -> None:
        found = self._source.look(b"/")
        if found is None:
            raise NotFound("the served folder is gone")
        with self._table.writing() as write:
            write.put(self._new_inode(ROOT_ID, ROOT_ID, b"", found))

    def _refresh_root(self) -> Inode:
        """Attributes of the root; its id never changes."""
        found = self._source.look(b"/")
        if found is None:
            raise NotFound("the served folder is gone")
        with self._table.writing() as write:
            root = self._with_attributes(write.get(ROOT_ID), found)
            write.put(root)
        self._times.looked_at(ROOT_ID)
        return root

    def _scan(self, folder: Inode, path: bytes) -> None:
        """Merge the folder's content in the source into the database, `SCAN_BATCH` names a transaction."""
        with self._scan_lock(folder.id):
            with self._added_lock:
                self._added_while_scanned[folder.id] = 0
            try:
                known = self.by_id(folder.id).children
                entries = self._source.scan(path)
                seen_again = 0
                while batch := list(islice(entries, SCAN_BATCH)):
                    batch.sort()  # B-tree inserts in order touch each page once
                    added = self._merge_batch(folder.id, path.rstrip(b"/") + b"/", batch)
                    seen_again += len(batch) - added
            finally:
                with self._added_lock:
                    added_meanwhile = self._added_while_scanned.pop(folder.id)
            if seen_again < known + added_meanwhile:
                self._drop_vanished(folder.id, path)
            with self._table.writing() as write:
                write.put(write.get(folder.id)._replace(loaded=True))
            self._times.listed(folder.id)

    def _merge_batch(self, folder_id: int, prefix: bytes, batch: list[tuple[bytes, Found]]) -> int:
        """Merge some names of a scan in one transaction; how many were new."""
        gone: list[Inode] = []
        added = dropped = 0
        with self._table.writing() as write:
            for name, found in batch:
                before = write.child(folder_id, name)
                if before is None or _same(before, found):
                    self._merge(write, folder_id, name, before, found, gone)
                else:
                    # It was looked at some time ago; what is known may be newer than that.
                    now = self._source.look(prefix + name)
                    self._merge(write, folder_id, name, before, now, gone)
                    dropped += now is None
                added += before is None
            write.count_children(folder_id, added - dropped)
        self._report(gone)
        return added

    def _drop_vanished(self, folder_id: int, path: bytes) -> None:
        """Forget children that the source has no longer.

        Each is looked for again rather than kept in a set of all names seen: no memory, and a name that was
        added meanwhile is not dropped.
        """
        prefix = path.rstrip(b"/") + b"/"
        for batch in self._table.batches(folder_id, SCAN_BATCH):
            vanished = [child for child in batch if not self._source.exists(prefix + child.name)]
            if not vanished:
                continue
            gone: list[Inode] = []
            with self._table.writing() as write:
                dropped = 0
                for child in vanished:
                    # Unless the name came back meanwhile, under another id.
                    if write.child(folder_id, child.name) == child:
                        self._remove(write, child, gone)
                        dropped += 1
                write.count_children(folder_id, -dropped)
            self._report(gone)

    def _merge(
        self,
        write: InodeWrite,
        parent_id: int,
        name: bytes,
        before: Inode | None,
        found: Found | None,
        gone: list[Inode],
    ) -> Inode | None:
        """Bring one name up to date within a transaction; the inode it has afterwards."""
        if found is None:
            if before is not None:
                self._remove(write, before, gone)
            return None
        if before is not None and _same(before, found):
            after = self._with_attributes(before, found)
            if after != before:
                write.put(after)
            return after
        if before is not None:
            if before.folder:
                self._remove(write, before, gone)
            else:
                write.forget_id(before)
                gone.append(before)
        return self._add(write, parent_id, name, found)

    def _add(self, write: InodeWrite, parent_id: int, name: bytes, found: Found) -> Inode:
        new_id = write.new_folder_id() if found.folder else write.new_file_id()
        inode = self._new_inode(new_id, parent_id, name, found)
        write.put(inode)
        write.name(inode)
        self._times.appeared(parent_id, name)
        return inode

    def _new_inode(self, new_id: int, parent_id: int, name: bytes, found: Found) -> Inode:
        return Inode(
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

    def _remove(self, write: InodeWrite, inode: Inode, gone: list[Inode]) -> None:
        """Forget an inode and, for a folder, everything below it."""
        if inode.folder:
            while children := write.first_children(inode.id, SCAN_BATCH):
                for child in children:
                    self._remove(write, child, gone)
        else:
            gone.append(inode)
        write.forget_id(inode)
        write.forget_name(inode)

    def _report(self, gone: list[Inode]) -> None:
        if self._on_gone is not None:
            for inode in gone:
                self._on_gone(inode)

    def _scan_lock(self, folder_id: int) -> threading.Lock:
        return self._scan_locks[folder_id % _LOCK_STRIPES]

    @staticmethod
    def _with_attributes(inode: Inode, found: Found) -> Inode:
        """The inode with what may change under one id taken from the source.

        Not the modification time: a file with another one is another file, a folder keeps its first one.
        """
        return inode._replace(mode=found.mode, uid=found.uid, gid=found.gid)


def _same(inode: Inode, found: Found) -> bool:
    """Whether what is found is still the file or folder that is known."""
    if inode.folder or found.folder:
        return inode.folder == found.folder
    return inode.length == found.length and inode.mtime_ns == found.mtime_ns


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
