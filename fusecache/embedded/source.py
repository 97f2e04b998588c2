"""The served folder itself: the only module that looks at it. Names in, plain facts or descriptors out.

Paths are Alluxio paths (`b"/a/b"`) below the folder. Left out of every answer, as if they did not exist:
sockets, pipes, devices; symbolic links that are broken, lead out of the folder, or lead back to a folder
that contains them (an endless tree); the server's own state folder when it lies inside. Files that can't be
read are shown: opening them fails. Nothing is cached here and nothing is ever written here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fusecache.errors import NotFound, PermissionDenied, Unavailable, UsageError


class Found(NamedTuple):
    """One file or folder of the source, links followed."""

    folder: bool
    length: int
    """Bytes; 0 for a folder."""
    mtime_ns: int
    mode: int
    """Permission bits, 0 .. 0o777."""
    uid: int
    gid: int


class SourceFolder:
    """Read-only view of a folder, `root` being its real path."""

    def __init__(self, folder: Path, hidden: Path | None = None) -> None:
        """`hidden` (the state folder) is left out wherever it turns up."""
        try:
            found = folder.stat()
        except OSError as exc:
            raise UsageError(f"source folder {str(folder)!r} can't be used: {exc.strerror}") from exc
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"source {str(folder)!r} is not a folder; name the folder that holds the data")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise UsageError(f"source folder {str(folder)!r} can't be read by uid {os.geteuid()}; change its mode")
        self.root = os.path.realpath(os.fsencode(folder))
        self._below = self.root if self.root.endswith(b"/") else self.root + b"/"
        self._hidden: tuple[int, int] | None = None
        if hidden is not None:
            private = hidden.stat()
            self._hidden = (private.st_dev, private.st_ino)

    def ufs_path(self, path: bytes) -> bytes:
        """Full path in the local file system of an Alluxio path."""
        return self._below + path[1:] if path != b"/" else self.root

    def look(self, path: bytes) -> Found | None:
        """What is at `path` now; None when nothing is, or when it is left out. Unavailable when it can't be told."""
        full = self.ufs_path(path)
        try:
            found = os.lstat(full)
            if stat.S_ISLNK(found.st_mode):
                if not self._link_allowed(full, path):
                    return None
                found = os.stat(full)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP):
                return None
            raise _as_upstream(exc, full) from exc
        return self._describe(found)

    def scan(self, path: bytes) -> Iterator[tuple[bytes, Found]]:
        """All children of a folder in the order of the file system, one at a time.

        NotFound when it is gone, PermissionDenied when it can't be read. A child that vanishes or can't be
        looked at while scanning is skipped.
        """
        full = self.ufs_path(path)
        try:
            entries = os.scandir(full)
        except OSError as exc:
            raise _as_upstream(exc, full) from exc
        with entries:
            for entry in entries:
                try:
                    if entry.is_symlink():
                        if not self._link_allowed(entry.path, path.rstrip(b"/") + b"/" + entry.name):
                            continue
                        found = entry.stat()
                    else:
                        found = entry.stat(follow_symlinks=False)
                except OSError:
                    # Vanished between readdir and stat, or its folder lost the x bit: not there for now.
                    continue
                described = self._describe(found)
                if described is not None:
                    yield entry.name, described

    def exists(self, path: bytes) -> bool:
        """True when `look` would find something."""
        return self.look(path) is not None

    def open(self, ufs_path: bytes) -> int:
        """A read descriptor of a regular file below the folder; the caller closes it.

        `ufs_path` comes from a client, as with a real block worker, so where it really leads is checked on
        the descriptor: NotFound outside the folder or when gone, PermissionDenied when it can't be read.
        """
        try:
            # O_NONBLOCK: a pipe of that name must not hold the thread until somebody writes to it.
            descriptor = os.open(ufs_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except ValueError as exc:
            raise NotFound(f"UFS path {ufs_path!r} is not a path") from exc
        except OSError as exc:
            raise _as_upstream(exc, ufs_path) from exc
        real = os.readlink(f"/proc/self/fd/{descriptor}".encode())
        if not real.startswith(self._below) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotFound(f"UFS path {ufs_path!r} is no file of the served folder")
        return descriptor

    def _describe(self, found: os.stat_result) -> Found | None:
        mode = found.st_mode
        if stat.S_ISREG(mode):
            return Found(False, found.st_size, found.st_mtime_ns, mode & 0o777, found.st_uid, found.st_gid)
        if stat.S_ISDIR(mode) and (found.st_dev, found.st_ino) != self._hidden:
            return Found(True, 0, found.st_mtime_ns, mode & 0o777, found.st_uid, found.st_gid)
        return None

    def _link_allowed(self, full: bytes, path: bytes) -> bool:
        """Whether a symbolic link is followed: it must lead below the root, and not to a folder it lies in."""
        real = os.path.realpath(full)
        if not real.startswith(self._below):
            return False
        # Every folder on the way is compared by its real place: links may point at each other's parents.
        ancestor = path
        while ancestor != b"/":
            ancestor = ancestor.rpartition(b"/")[0] or b"/"
            above = os.path.realpath(self.ufs_path(ancestor))
            if above == real or above.startswith(real + b"/"):
                return False
        return True


def _as_upstream(exc: OSError, full: bytes) -> NotFound | PermissionDenied | Unavailable:
    """The error a client gets for a failed look at the source."""
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return NotFound(f"{full!r} does not exist in the UFS")
    if isinstance(exc, PermissionError):
        return PermissionDenied(f"{full!r} can't be read from the UFS: {exc.strerror}")
    return Unavailable(f"Failed to read from UFS {full!r}: {exc.strerror}")
