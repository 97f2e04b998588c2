"""The kernel's requests and their answers: pyfuse3's `Operations` over the metadata tree and the open files.

    LOOKUP, GETATTR   the tree's hot level or LMDB, inline; a master only for what is not known or no longer fresh
    OPENDIR, READDIR  pages of the folder's listing, ordered by inode; the cookie is the inode, so any process agrees
    OPEN, RELEASE     one `FileReader` per inode; fh = inode; the kernel keeps the pages of a version for ever,
                      because another version has another inode
    READ              `hot_read` inline when the bytes are local and in memory, else `read` in threads

What would change something is `read_only`'s; what a handler raises becomes an errno in `guard`.

Does not mount, talk to Alluxio or decide what is fresh.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileInfo, FileNameT, FUSEError, InodeT, RequestContext

from fusecache.alluxio.model import Capacity
from fusecache.cache.record import MAX_NAME_BYTES, Entry
from fusecache.errors import FusecacheError, NotFound, StaleId, Unavailable
from fusecache.fs import extended_attributes
from fusecache.fs.attributes import Attributes, missing
from fusecache.fs.guard import RequestMeter, served
from fusecache.fs.hidden_folder import FOLDER_INODE, HiddenFolder
from fusecache.fs.hidden_folder import NAME as HIDDEN_NAME
from fusecache.fs.read_only import ReadOnlyOperations
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers

ROOT = 1
"""Inode of the mounted folder."""

DIRECTORY_PAGE = 24
"""Entries asked from the tree at first: a 4 KiB READDIRPLUS reply holds about as many. Later the number that fitted
into the last reply is the guess: what does not fit is decoded for nothing."""

DIRECTORY_PAGE_LIMITS = (8, 1024)

STATFS_BLOCK_BYTES = 4096

_T = TypeVar("_T")


class Tree(Protocol):
    """What is used of `cache.tree.MetadataTree`."""

    def hot(self, inode: int) -> Entry | None:
        """A fresh entry, without waiting."""
        ...

    def hot_child(self, parent: int, name: bytes) -> Entry | None:
        """A fresh entry by name, without waiting."""
        ...

    async def lookup(self, parent: int, name: bytes) -> Entry:
        """The entry; NotFound, StaleId."""
        ...

    async def getattr(self, inode: int) -> Entry:
        """The entry; StaleId."""
        ...

    async def children(self, inode: int, after: int, limit: int) -> list[Entry]:
        """A page of a folder, ordered by inode."""
        ...

    def kernel_timeout_s(self, entry: Entry) -> float:
        """How long the kernel may keep an entry."""
        ...

    def negative_timeout_s(self, parent: int) -> float:
        """How long the kernel may remember that a name is missing."""
        ...

    def superseded(self, inode: int) -> bool:
        """True for a dead id."""
        ...


class Operations(ReadOnlyOperations):
    """One mount's handlers."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        tree: Tree,
        readers: Readers,
        attributes: Attributes,
        hidden: HiddenFolder,
        *,
        metrics: Metrics,
        metadata_budget_s: float,
        capacity: Callable[[], Capacity],
        on_stale_read: Callable[[int], Awaitable[None]],
    ) -> None:
        """No request but READ waits longer than `metadata_budget_s`.

        `capacity` gives the last known cluster capacity; `on_stale_read` is told of a READ on a dead inode, which
        is answered when it returns: whoever opens the path again then gets the new version.
        """
        super().__init__(RequestMeter(metrics))
        self._tree = tree
        self._readers = readers
        self._attributes = attributes
        self._hidden = hidden
        self._metadata_budget_s = metadata_budget_s
        self._directory_page = DIRECTORY_PAGE
        self._capacity = capacity
        self._on_stale_read = on_stale_read
        self._entries = metrics.gauge("fusecache_metadata_entries")

    @served
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> pyfuse3.EntryAttributes:
        """LOOKUP: attributes, or "missing" with a time the kernel may remember that."""
        if len(name) > MAX_NAME_BYTES:
            raise FUSEError(errno.ENAMETOOLONG)
        if parent_inode == ROOT and name == HIDDEN_NAME:
            return self._hidden.attributes(FOLDER_INODE)
        if parent_inode >= FOLDER_INODE:
            inode = self._hidden.child(name) if parent_inode == FOLDER_INODE else None
            return missing(1.0) if inode is None else self._hidden.attributes(inode)
        entry = self._tree.hot_child(parent_inode, name)
        if entry is None:
            try:
                entry = await self._within_budget(self._tree.lookup(parent_inode, name))
            except NotFound:
                return missing(self._tree.negative_timeout_s(parent_inode))
        return self._attributes.of(entry, self._tree.kernel_timeout_s(entry))

    @served
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> pyfuse3.EntryAttributes:
        """GETATTR."""
        if inode >= FOLDER_INODE:
            return self._hidden.attributes(inode)
        entry = await self._entry(inode)
        return self._attributes.of(entry, self._tree.kernel_timeout_s(entry))

    @served
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """OPENDIR: nothing is held; the handle is the inode."""
        if inode < FOLDER_INODE:
            entry = await self._entry(inode)
            if not entry.folder:
                raise FUSEError(errno.ENOTDIR)
        elif inode > FOLDER_INODE:
            raise FUSEError(errno.ENOTDIR)
        return FileHandleT(inode)

    @served
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """READDIRPLUS from the entry behind cookie `start_id` (an inode; 0 = the first)."""
        if fh >= FOLDER_INODE:
            for index, (name, inode) in enumerate(self._hidden.entries()):
                attributes = self._hidden.attributes(inode)
                if index >= start_id and not pyfuse3.readdir_reply(token, FileNameT(name), attributes, index + 1):
                    return
            return
        after, fitted = start_id, 0
        while page := await self._within_budget(self._tree.children(fh, after, self._directory_page)):
            for entry in page:
                attributes = self._attributes.of(entry, self._tree.kernel_timeout_s(entry))
                if not pyfuse3.readdir_reply(token, FileNameT(entry.name), attributes, entry.inode):
                    low, high = DIRECTORY_PAGE_LIMITS
                    self._directory_page = min(max(fitted + 1, low), high)
                    return
                fitted += 1
            after = page[-1].inode

    @served
    async def releasedir(self, fh: FileHandleT) -> None:
        """RELEASEDIR: nothing was held."""

    @served
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        """OPEN for reading; the pages of a version stay valid, so the kernel may keep them."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EROFS)
        if inode >= FOLDER_INODE:
            return self._hidden.open(inode)
        entry = await self._entry(inode)
        if entry.folder:
            raise FUSEError(errno.EISDIR)
        self._readers.open(entry)
        return FileInfo(fh=FileHandleT(inode), keep_cache=True)

    @served
    async def read(  # type: ignore[override]  # pyfuse3 takes any buffer; its stub says bytes
        self, fh: FileHandleT, off: int, size: int
    ) -> bytes | memoryview:
        """READ: exactly the bytes asked for, fewer only at the end of the file."""
        reader = self._readers.get(fh)
        if reader is None:
            return self._hidden.read(fh, off, size)
        data = reader.hot_read(off, size)
        if data is not None:
            return data
        try:
            return await reader.read(off, size)
        except FusecacheError as error:
            if isinstance(error, StaleId) or self._tree.superseded(fh):
                await self._on_stale_read(fh)
                raise StaleId(f"file id {fh - 1} was replaced") from error
            raise

    @served
    async def release(self, fh: FileHandleT) -> None:
        """RELEASE."""
        if fh >= FOLDER_INODE:
            self._hidden.release(fh)
        else:
            self._readers.release(fh)

    async def flush(self, fh: FileHandleT) -> None:
        """FLUSH at close(2): ENOSYS once, after which the kernel never sends it again; close(2) succeeds all the same.

        Saves one of the four round trips of a small file (OPEN, READ, FLUSH, RELEASE). Not `served`: no error.
        """
        raise FUSEError(errno.ENOSYS)

    @served
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """FSYNC: nothing was written."""

    @served
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        """FSYNCDIR: nothing was written."""

    @served
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        """STATFS: capacity and use of the cluster's cache, as last heard; entries known here as inodes."""
        capacity = self._capacity()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = STATFS_BLOCK_BYTES
        data.f_blocks = capacity.capacity_bytes // STATFS_BLOCK_BYTES
        free = max(0, capacity.capacity_bytes - capacity.used_bytes) // STATFS_BLOCK_BYTES
        data.f_bfree = data.f_bavail = free
        data.f_files = max(1, int(self._entries.value))
        data.f_ffree = data.f_favail = 0
        data.f_namemax = MAX_NAME_BYTES
        return data

    @served
    async def access(self, inode: InodeT, mode: int, ctx: RequestContext) -> bool:
        """ACCESS: the kernel checks modes itself (default_permissions); only writing is refused here."""
        if mode & os.W_OK:
            raise FUSEError(errno.EROFS)
        return True

    @served
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        """READLINK: Alluxio has no symbolic links."""
        raise FUSEError(errno.EINVAL)

    @served
    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        """GETXATTR: `user.fusecache.*` on files; ENODATA for everything else."""
        if inode >= FOLDER_INODE or not name.startswith(extended_attributes.PREFIX):
            raise FUSEError(pyfuse3.ENOATTR)
        entry = await self._entry(inode)
        value = extended_attributes.value_of(entry, name, lambda: self._local_bytes(entry))
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @served
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[pyfuse3.XAttrNameT]:
        """LISTXATTR."""
        if inode >= FOLDER_INODE:
            return ()
        entry = await self._entry(inode)
        return [pyfuse3.XAttrNameT(name) for name in extended_attributes.names_of(entry)]

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """FORGET: look-up counts are not kept; inodes are names of versions, found again in the store."""

    async def _entry(self, inode: int) -> Entry:
        entry = self._tree.hot(inode)
        return await self._within_budget(self._tree.getattr(inode)) if entry is None else entry

    async def _within_budget(self, answer: Awaitable[_T]) -> _T:
        """Wait for the tree, but not longer than the budget: a listing may go on for longer than a request may."""
        with trio.move_on_after(self._metadata_budget_s):
            return await answer
        raise Unavailable(f"no answer within {self._metadata_budget_s:g} s")

    def _local_bytes(self, entry: Entry) -> int:
        if not entry.completed or not entry.length:
            return 0
        reader = self._readers.open(entry)
        try:
            return reader.local_bytes()
        finally:
            self._readers.release(entry.inode)
