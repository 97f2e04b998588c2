"""`.fusecache/` in the root of a mount: `cat` is the first debugger.

It answers look-ups and can be listed by name, but the root's listing never shows it, because data loaders take every
listed folder for a class. Its files are made when they are opened, from callables, and read with direct I/O; inodes
are 2**63 and up, where no Alluxio file can be. Nothing here can be written: changes go through the control socket,
whose path `config` names.

    stats    every metric, as Prometheus would scrape it
    config   the settings of the mount and the control socket, as JSON
    version  the version of the daemon
"""

from __future__ import annotations

import errno
import itertools
import stat
import time
from collections.abc import Callable, Iterator, Mapping

import pyfuse3

NAME = b".fusecache"
FOLDER_INODE = 1 << 63
"""Inode of the folder; its files follow. Alluxio inodes are below."""

Content = Callable[[], bytes]


class HiddenFolder:
    """The folder's tree and its open files."""

    MAX_OPEN = 1024
    """Open files at once; each holds its content."""

    def __init__(self, files: Mapping[bytes, Content], *, shown_bytes: int = 0) -> None:
        """`shown_bytes`: size shown of each file where the kernel reads without an OPEN, and so without direct I/O; it
        then also looks at the files anew each time, and their pages end with their changing time."""
        self._shown_bytes = shown_bytes
        self._names = list(files)
        self._contents = list(files.values())
        self._handles: dict[int, bytes] = {}
        self._next_handle = itertools.count(FOLDER_INODE + (1 << 32))

    def child(self, name: bytes) -> int | None:
        """Inode of a file of the folder."""
        return FOLDER_INODE + 1 + self._names.index(name) if name in self._names else None

    def attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        """Attributes of the folder or one of its files; ESTALE for an inode that is neither."""
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = pyfuse3.InodeT(inode)
        if inode == FOLDER_INODE:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o555)
            attributes.st_nlink = 2
        elif FOLDER_INODE < inode <= FOLDER_INODE + len(self._names):
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444)
        else:
            raise pyfuse3.FUSEError(errno.ESTALE)
        if not self._shown_bytes:
            # Sizes are unknown until a file is opened (direct I/O reads to the end all the same), as in /proc.
            attributes.entry_timeout = attributes.attr_timeout = 1.0
        else:
            attributes.entry_timeout = attributes.attr_timeout = 0.0
            attributes.st_mtime_ns = time.time_ns()
            attributes.st_size = 0 if inode == FOLDER_INODE else self._shown_bytes
        return attributes

    def name_of(self, inode: int) -> bytes | None:
        """Name of a file of the folder; None for any other inode."""
        index = inode - FOLDER_INODE - 1
        return self._names[index] if 0 <= index < len(self._names) else None

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """(name, inode) of every file."""
        for index, name in enumerate(self._names):
            yield name, FOLDER_INODE + 1 + index

    def open(self, inode: int) -> pyfuse3.FileInfo:
        """Open a file: its content is made now and does not change under the reader."""
        if inode == FOLDER_INODE:
            raise pyfuse3.FUSEError(errno.EISDIR)
        index = inode - FOLDER_INODE - 1
        if not 0 <= index < len(self._contents):
            raise pyfuse3.FUSEError(errno.ESTALE)
        if len(self._handles) >= self.MAX_OPEN:
            raise pyfuse3.FUSEError(errno.EMFILE)
        handle = next(self._next_handle)
        self._handles[handle] = self._contents[index]()
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=True, keep_cache=False)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Bytes of an open file."""
        content = self._handles.get(handle)
        if content is None:
            raise pyfuse3.FUSEError(errno.EBADF)
        return content[offset : offset + size]

    def release(self, handle: int) -> None:
        """Forget an open file."""
        self._handles.pop(handle, None)
