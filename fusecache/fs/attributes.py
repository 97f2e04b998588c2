"""An `Entry` as the attributes the kernel wants.

st_ino is the inode (file id + 1), or 1 for the mounted folder; st_blocks counts 512-byte units of the length, so
that du(1) shows what the data set would take; mtime, ctime and atime are Alluxio's modification time; the mode never
has more bits than `mode_mask` allows, but a folder that may be read may be entered (`x` follows `r`), because Alluxio
folders of object stores often come without it.

A file that is still being written can't be read. Where the kernel opens files without asking (`no-open`), the error can
only come with a READ, and the kernel sends none for an empty file: such a file shows at least one byte.
"""

from __future__ import annotations

import stat

import pyfuse3

from fusecache.cache.record import Entry
from fusecache.config.settings import Settings
from fusecache.fs.ownership import Ownership

IO_BLOCK_BYTES = 128 << 10
"""st_blksize: what cp(1) and Python's open() read at a time."""


class Attributes:
    """Makes EntryAttributes for one mount."""

    def __init__(self, settings: Settings, *, opened_unasked: bool = False) -> None:
        """`opened_unasked`: the kernel sends no OPEN."""
        self._least_incomplete_bytes = int(opened_unasked)
        self._mask = settings.mode_mask
        self._ownership = Ownership(settings)

    def of(self, entry: Entry, timeout_s: float) -> pyfuse3.EntryAttributes:
        """Attributes of `entry`, which the kernel may keep for `timeout_s` seconds."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = entry.inode
        mode = entry.mode & self._mask
        if entry.folder:
            attributes.st_mode = stat.S_IFDIR | mode | ((mode & 0o444) >> 2)
            attributes.st_nlink = 2
            attributes.st_size = 0
            attributes.st_blocks = 0
        else:
            attributes.st_mode = stat.S_IFREG | mode
            attributes.st_nlink = 1
            attributes.st_size = entry.length if entry.completed else max(entry.length, self._least_incomplete_bytes)
            attributes.st_blocks = (entry.length + 511) >> 9
        attributes.st_uid = self._ownership.uid(entry.owner)
        attributes.st_gid = self._ownership.gid(entry.group)
        attributes.st_blksize = IO_BLOCK_BYTES
        mtime_ns = entry.mtime_ms * 1_000_000
        attributes.st_mtime_ns = mtime_ns
        attributes.st_ctime_ns = mtime_ns
        attributes.st_atime_ns = mtime_ns
        attributes.entry_timeout = timeout_s
        attributes.attr_timeout = timeout_s
        return attributes


def missing(timeout_s: float) -> pyfuse3.EntryAttributes:
    """The answer to a look-up of a name that does not exist: the kernel remembers that for `timeout_s`."""
    attributes = pyfuse3.EntryAttributes()
    attributes.st_ino = pyfuse3.InodeT(0)
    attributes.entry_timeout = timeout_s
    return attributes
