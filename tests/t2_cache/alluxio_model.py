"""An Alluxio namespace in memory: what "another client" changes, and the two calls the metadata tree makes.

`list_folder` and `get_status` are handed to a `MetadataTree`; they count calls, and can be told to fail, to
break off after some entries, or to wait. Ids follow Alluxio: a file keeps its id when renamed or chmodded and
gets a new one when it is written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fusecache.alluxio.model import FILE_SEQUENCE, FileStatus
from fusecache.errors import NotFound


@dataclass
class Node:
    """A file or folder of the model."""

    file_id: int
    folder: bool
    length: int = 0
    mode: int = 0o644
    mtime_ms: int = 1_000
    completed: bool = True
    locations: tuple[tuple[int, ...], ...] = ()
    children: dict[bytes, Node] = field(default_factory=dict)


class AlluxioModel:
    """Thread-safe; calls are counted in `listed` and `asked` by path."""

    def __init__(self, *, piece: int = 1000) -> None:
        self.lock = threading.RLock()
        self.piece = piece
        self._next = 0
        self.root = Node(0, folder=True, mode=0o755)
        self.listed: dict[bytes, int] = {}
        self.asked: dict[bytes, int] = {}
        self.sync_intervals: list[int] = []
        self.error: Exception | None = None
        """Raised by every call while set."""
        self.list_error: Exception | None = None
        """Raised by listings only."""
        self.break_after: int | None = None
        """Listings raise `list_error` after so many entries."""
        self.before_answer: Callable[[bytes], None] | None = None
        """Called in the calling thread before anything is looked at."""
        self.after_answer: Callable[[bytes], None] | None = None
        """Called in the calling thread when a listing was read, before it is handed over."""

    # ---- another client ----

    def new_id(self) -> int:
        self._next += 1
        return (self._next << 24) | FILE_SEQUENCE

    def node(self, path: bytes) -> Node:
        found = self.root
        for name in [part for part in path.split(b"/") if part]:
            if name not in found.children:
                raise NotFound(f"{path!r}")
            found = found.children[name]
        return found

    def parent(self, path: bytes) -> tuple[Node, bytes]:
        head, _, name = path.rstrip(b"/").rpartition(b"/")
        return self.node(head), name

    def mkdir(self, path: bytes) -> Node:
        with self.lock:
            parent, name = self.parent(path)
            return parent.children.setdefault(name, Node(self.new_id(), folder=True, mode=0o755))

    def write(self, path: bytes, length: int, *, completed: bool = True) -> Node:
        """Create or replace: a new id either way."""
        with self.lock:
            parent, name = self.parent(path)
            parent.children[name] = node = Node(self.new_id(), folder=False, length=length, completed=completed)
            return node

    def delete(self, path: bytes) -> None:
        with self.lock:
            parent, name = self.parent(path)
            del parent.children[name]

    def rename(self, old: bytes, new: bytes) -> None:
        with self.lock:
            old_parent, old_name = self.parent(old)
            new_parent, new_name = self.parent(new)
            new_parent.children[new_name] = old_parent.children.pop(old_name)

    # ---- the two calls ----

    def get_status(self, path: bytes, sync_interval_ms: int) -> FileStatus:
        if self.before_answer is not None:
            self.before_answer(path)
        with self.lock:
            self.asked[path] = self.asked.get(path, 0) + 1
            self.sync_intervals.append(sync_interval_ms)
            if self.error is not None:
                raise self.error
            return status_of(path, self.node(path))

    def list_folder(self, path: bytes, sync_interval_ms: int) -> Iterator[list[FileStatus]]:
        if self.before_answer is not None:
            self.before_answer(path)
        with self.lock:
            self.listed[path] = self.listed.get(path, 0) + 1
            self.sync_intervals.append(sync_interval_ms)
            if self.error is not None:
                raise self.error
            if self.list_error is not None and self.break_after is None:
                raise self.list_error
            node = self.node(path)
            if node.folder:
                prefix = path.rstrip(b"/") + b"/"
                statuses = [status_of(prefix + name, child) for name, child in node.children.items()]
            else:
                statuses = [status_of(path, node)]
        if self.after_answer is not None:
            self.after_answer(path)
        sent = 0
        for start in range(0, len(statuses), self.piece):
            piece = statuses[start : start + self.piece]
            if self.list_error is not None and self.break_after is not None and sent + len(piece) > self.break_after:
                yield piece[: self.break_after - sent]
                raise self.list_error
            sent += len(piece)
            yield piece

    @property
    def calls(self) -> int:
        return sum(self.listed.values()) + sum(self.asked.values())


def status_of(path: bytes, node: Node) -> FileStatus:
    """As the client decodes it."""
    return FileStatus(
        file_id=node.file_id,
        name=path.rsplit(b"/", 1)[1],
        path=path,
        folder=node.folder,
        completed=node.completed,
        persisted=True,
        in_ufs_tier=False,
        mount_point=False,
        length=node.length,
        block_size=0 if node.folder else 64 << 20,
        block_count=-(-node.length // (64 << 20)),
        locations=node.locations,
        mtime_ms=node.mtime_ms,
        mode=node.mode,
        owner=b"alluxio",
        group=b"staff",
        mount_id=1,
        ufs_path=b"s3://bucket" + path.rstrip(b"/"),
    )
