"""The kernel's requests and their answers: pyfuse3's `Operations` over the metadata tree and the open files.

    LOOKUP, GETATTR   the tree's hot level or LMDB, inline; a master only for what is not known or no longer fresh
    OPENDIR, READDIR  pages of the folder's listing, ordered by inode; the cookie is the inode, so any process agrees
    OPEN, RELEASE     one `FileReader` per inode; fh = inode; the kernel keeps the pages of a version for ever,
                      because another version has another inode
    READ              `hot_read` inline when the bytes are local and in memory, else `read` in threads
    everything else that would change something: EROFS

Every handler goes through `served`: whatever it raises becomes an errno (`errno_map`), an unexpected exception EIO
with one logged traceback. pyfuse3 ends its loop, and with it the mount, on any other exception.

Does not mount, talk to Alluxio or decide what is fresh.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, NoReturn, Protocol, TypeVar

import pyfuse3
import structlog
from pyfuse3 import FileHandleT, FileInfo, FileNameT, FUSEError, InodeT, RequestContext

from fusecache.alluxio.model import Capacity
from fusecache.cache.record import MAX_NAME_BYTES, Entry
from fusecache.errors import FusecacheError, NotFound, StaleId
from fusecache.fs import extended_attributes
from fusecache.fs.attributes import Attributes, missing
from fusecache.fs.errno_map import errno_name, errno_of
from fusecache.fs.hidden_folder import FOLDER_INODE, HiddenFolder
from fusecache.fs.hidden_folder import NAME as HIDDEN_NAME
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers

log = structlog.get_logger(__name__)

ROOT = 1
"""Inode of the mounted folder."""

DIRECTORY_PAGE = 128
"""Entries asked from the tree at a time: a 32 KiB READDIRPLUS reply holds about 170 short names."""

STATFS_BLOCK_BYTES = 4096

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


class Tree(Protocol):
    """What is used of `cache.tree.MetadataTree`."""

    def hot(self, inode: int) -> Entry | None: ...
    def hot_child(self, parent: int, name: bytes) -> Entry | None: ...
    async def lookup(self, parent: int, name: bytes) -> Entry: ...
    async def getattr(self, inode: int) -> Entry: ...
    async def children(self, inode: int, after: int, limit: int) -> list[Entry]: ...
    def kernel_timeout_s(self, entry: Entry) -> float: ...
    def negative_timeout_s(self, parent: int) -> float: ...
    def superseded(self, inode: int) -> bool: ...


def served(handler: _Handler) -> _Handler:
    """Count, time and guard one handler: FUSEError or a value leaves it, never anything else."""
    op = handler.__name__

    @functools.wraps(handler)
    async def guarded(self: Operations, *args: Any) -> Any:
        started = perf_counter()
        self._in_flight.value += 1
        try:
            return await handler(self, *args)
        except FUSEError as error:
            self._count_error(op, error.errno)
            raise
        except FusecacheError as error:
            raise self._failed(op, error) from None
        except Exception:
            # pyfuse3 ends the mount on anything but FUSEError; the traceback goes to the log once per kind
            log.exception("unexpected exception in a handler", op=op, inode=args[0] if args else None)
            self._count_error(op, errno.EIO)
            raise FUSEError(errno.EIO) from None
        finally:
            self._in_flight.value -= 1
            self._durations[op].observe(perf_counter() - started)
            self._requests[op].value += 1

    return guarded  # type: ignore[return-value]  # functools.wraps keeps the handler's shape


class Operations(pyfuse3.Operations):
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
        capacity: Callable[[], Capacity],
        on_stale_read: Callable[[int], None],
    ) -> None:
        """`capacity` gives the last known cluster capacity; `on_stale_read` is told of a READ on a dead inode."""
        super().__init__()
        self._tree = tree
        self._readers = readers
        self._attributes = attributes
        self._hidden = hidden
        self._metrics = metrics
        self._capacity = capacity
        self._on_stale_read = on_stale_read
        self._entries = metrics.gauge("fusecache_metadata_entries")
        self._in_flight = metrics.gauge("fusecache_requests_in_flight")
        self._requests = {op: metrics.counter("fusecache_requests_total", op=op) for op in OPERATIONS}
        self._durations = {op: metrics.histogram("fusecache_request_duration_seconds", op=op) for op in OPERATIONS}

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
                entry = await self._tree.lookup(parent_inode, name)
            except NotFound:
                return missing(self._tree.negative_timeout_s(parent_inode))
        return self._attributes.of(entry, self._tree.kernel_timeout_s(entry))

    @served
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> pyfuse3.EntryAttributes:
        """GETATTR."""
        if inode >= FOLDER_INODE:
            return self._hidden.attributes(inode)
        entry = self._tree.hot(inode) or await self._tree.getattr(inode)
        return self._attributes.of(entry, self._tree.kernel_timeout_s(entry))

    @served
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """OPENDIR: nothing is held; the handle is the inode."""
        if inode < FOLDER_INODE:
            entry = self._tree.hot(inode) or await self._tree.getattr(inode)
            if not entry.folder:
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
        after = start_id
        while page := await self._tree.children(fh, after, DIRECTORY_PAGE):
            for entry in page:
                attributes = self._attributes.of(entry, self._tree.kernel_timeout_s(entry))
                if not pyfuse3.readdir_reply(token, FileNameT(entry.name), attributes, entry.inode):
                    return
                after = entry.inode

    @served
    async def releasedir(self, fh: FileHandleT) -> None:
        """RELEASEDIR: nothing was held."""

    @served
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        """OPEN for reading; the pages of a version stay valid, so the kernel may keep them."""
        if inode >= FOLDER_INODE:
            return self._hidden.open(inode)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EROFS)
        entry = self._tree.hot(inode) or await self._tree.getattr(inode)
        if entry.folder:
            raise FUSEError(errno.EISDIR)
        self._readers.open(entry)
        return FileInfo(fh=FileHandleT(inode), keep_cache=True)

    @served
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes | memoryview:
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
                self._on_stale_read(fh)
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
        entry = self._tree.hot(inode) or await self._tree.getattr(inode)
        value = extended_attributes.value_of(entry, name, lambda: self._local_bytes(entry))
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @served
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[pyfuse3.XAttrNameT]:
        """LISTXATTR."""
        if inode >= FOLDER_INODE:
            return ()
        entry = self._tree.hot(inode) or await self._tree.getattr(inode)
        return [pyfuse3.XAttrNameT(name) for name in extended_attributes.names_of(entry)]

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """FORGET: look-up counts are not kept; inodes are names of versions, found again in the store."""

    @served
    async def setattr(self, *_: Any) -> NoReturn:
        """Read-only: EROFS. The same holds for every handler below."""
        raise FUSEError(errno.EROFS)

    mknod = mkdir = unlink = rmdir = symlink = rename = link = create = setattr
    write = setxattr = removexattr = setattr

    def _local_bytes(self, entry: Entry) -> int:
        if not entry.completed or not entry.length:
            return 0
        reader = self._readers.open(entry)
        try:
            return reader.local_bytes()
        finally:
            self._readers.release(entry.inode)

    def _failed(self, op: str, error: FusecacheError) -> FUSEError:
        number = errno_of(error)
        if number == errno.EIO:
            log.warning("request failed", op=op, error=str(error), kind=type(error).__name__)
        self._count_error(op, number)
        return FUSEError(number)

    def _count_error(self, op: str, number: int) -> None:
        self._metrics.counter("fusecache_request_errors_total", op=op, errno=errno_name(number)).inc()


OPERATIONS = tuple(
    sorted({getattr(Operations, name).__name__ for name in vars(Operations) if hasattr(vars(Operations)[name], "__wrapped__")})
)
"""Names of the guarded handlers: the label `op` of the metrics."""
