"""Every handler that would change something: EROFS.

The mount is `ro`, so the kernel refuses nearly all of these before it asks; they answer the rest, and make the promise
hold for whoever calls the handlers without a kernel.
"""

from __future__ import annotations

import errno

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, ModeT, RequestContext

from fusecache.fs.guard import RequestMeter, served


class ReadOnlyOperations(pyfuse3.Operations):
    """The writing half of the handlers."""

    def __init__(self, meter: RequestMeter) -> None:
        super().__init__()
        self.meter = meter

    @served
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        """SETATTR: chmod, chown, truncate, utimens."""
        raise FUSEError(errno.EROFS)

    @served
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        """MKNOD."""
        raise FUSEError(errno.EROFS)

    @served
    async def mkdir(self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext) -> EntryAttributes:
        """MKDIR."""
        raise FUSEError(errno.EROFS)

    @served
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """UNLINK."""
        raise FUSEError(errno.EROFS)

    @served
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        """RMDIR."""
        raise FUSEError(errno.EROFS)

    @served
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """SYMLINK."""
        raise FUSEError(errno.EROFS)

    @served
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        """RENAME."""
        raise FUSEError(errno.EROFS)

    @served
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        """LINK."""
        raise FUSEError(errno.EROFS)

    @served
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """CREATE."""
        raise FUSEError(errno.EROFS)

    @served
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        """WRITE."""
        raise FUSEError(errno.EROFS)

    @served
    async def setxattr(self, inode: InodeT, name: pyfuse3.XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        """SETXATTR."""
        raise FUSEError(errno.EROFS)

    @served
    async def removexattr(self, inode: InodeT, name: pyfuse3.XAttrNameT, ctx: RequestContext) -> None:
        """REMOVEXATTR."""
        raise FUSEError(errno.EROFS)
