"""Opens block files of this node's own block worker, without asking it.

A committed block is the file `<tier folder>/alluxioworker/<block id>`; temporary ones live elsewhere and are moved in
by rename, so a regular file of exactly the block's length is complete. An open descriptor stays readable when the
block is evicted. Folders come from the configuration or from a block worker's answer to OpenLocalBlock (`learn`).

Such a read is invisible to the block worker's eviction: somebody has to touch the block now and then
(`AlluxioClient.touch`). Which *version* of a file a block holds is not decided here.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence

import structlog

from fusecache.alluxio.model import Block

log = structlog.get_logger(__name__)

BLOCK_FOLDER = b"alluxioworker"
"""alluxio.worker.data.folder: the name below each tier folder."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK: a FIFO planted under a block's name must not hang the reader (fstat then refuses it)."""


class LocalBlocks:
    """The folders in which block files were found, the last successful one first. Thread-safe."""

    def __init__(self, tier_folders: Sequence[str], *, enabled: bool) -> None:
        self._enabled = enabled
        folders: list[bytes] = []
        for folder in tier_folders:
            # People name the tier folder or the block folder in it; whichever has the block is the right one.
            encoded = os.fsencode(folder).rstrip(b"/")
            if encoded.rpartition(b"/")[2] != BLOCK_FOLDER:
                folders.append(encoded + b"/" + BLOCK_FOLDER + b"/")
            folders.append(encoded + b"/")
        self._folders: tuple[bytes, ...] = tuple(folders)
        self._change = threading.Lock()

    @property
    def folders(self) -> tuple[bytes, ...]:
        """Where blocks are looked for, in order."""
        return self._folders

    def open(self, block: Block) -> int | None:
        """A descriptor of the block's file, or None when this node has no complete one. The caller closes it."""
        if not self._enabled:
            return None
        folders = self._folders
        name = b"%d" % block.block_id
        for folder in folders:
            descriptor = open_complete(folder + name, block.length)
            if descriptor is not None:
                if folder is not folders[0]:
                    self._prefer(folder)
                return descriptor
        return None

    def learn(self, folder: bytes) -> None:
        """A block file was found in `folder` (without trailing slash): look there from now on."""
        self._prefer(folder + b"/")

    def _prefer(self, folder: bytes) -> None:
        with self._change:
            self._folders = (folder, *(other for other in self._folders if other != folder))


def open_complete(path: bytes, length: int) -> int | None:
    """A descriptor of the regular file at `path` when it has exactly `length` bytes, else None."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as failure:
        # Not there, not readable for this user, or too many open files: another source will serve.
        if failure.errno in (errno.EMFILE, errno.ENFILE):
            log.warning("block file not opened, reading elsewhere", reason=failure.strerror)
        return None
    try:
        found = os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if found.st_size == length and stat.S_ISREG(found.st_mode):
        return descriptor
    os.close(descriptor)
    return None
