"""Files that the kernel may read by itself: what may be registered, registering, and what was learned from it.

An unprivileged worker hands in a descriptor, and the kernel reads it with the gate's rights from then on. So only what
the worker could read itself is accepted: a regular file, opened exactly O_RDONLY (an O_PATH descriptor let another uid
read a root 0600 file), without a second name (through which somebody might write to it), on a file system where caches
or tiers lie. Anything else is an ordinary open, counted by reason.

An accepted file is *learned*: its path and what fstat said. The inode's next first OPEN opens it again, without asking
a worker, when every one of these values is still the same; block files are written once, under a name of their own.

Does not decide how an inode is opened (`kernel.open_table`).
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import struct
from collections import Counter
from typing import Final, NamedTuple

from fusecache.kernel import wire

MOST_LEARNED: Final = 1 << 18
"""Inodes; about 400 bytes each. The oldest go first."""
_O_LARGEFILE: Final = 0o100000
"""Set in F_GETFL by open(2) on 64-bit machines; Python's os.O_LARGEFILE is 0 there."""
_HARMLESS_FLAGS: Final = _O_LARGEFILE | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_U32 = struct.Struct("<I")


class LearnedFile(NamedTuple):
    """What backs an inode, as it was when it was registered."""

    path: bytes
    device: int
    file_inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """With it, a new file that got the number of a deleted one can't be taken for it."""


def _identity(path: bytes, status: os.stat_result) -> LearnedFile:
    return LearnedFile(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Registry:
    """The kernel's table of backing files of one connection."""

    def __init__(self, device: int) -> None:
        """`device`: descriptor of /dev/fuse."""
        self._device = device

    def register(self, descriptor: int) -> int:
        """FUSE_DEV_IOC_BACKING_OPEN: the backing id (> 0). Raises OSError (no right, stacked or odd file system)."""
        # A bytearray: with bytes, fcntl.ioctl returns the argument instead of the result.
        mapping = bytearray(wire.BACKING_MAP.pack(descriptor, 0, 0))
        backing_id: int = fcntl.ioctl(self._device, wire.DEV_IOC_BACKING_OPEN, mapping)
        return backing_id

    def unregister(self, backing_id: int) -> None:
        """FUSE_DEV_IOC_BACKING_CLOSE: the kernel's reference goes; files that are open keep theirs. Raises OSError."""
        fcntl.ioctl(self._device, wire.DEV_IOC_BACKING_CLOSE, bytearray(_U32.pack(backing_id)))


class Backing:
    """Registers files for one connection, after checks."""

    def __init__(self, registry: Registry, allowed_devices: frozenset[int] | None) -> None:
        """`allowed_devices`: st_dev of cache and tier folders; None: any."""
        self._registry = registry
        self._allowed_devices = allowed_devices
        self._learned: dict[int, LearnedFile] = {}
        self.refusals: Counter[str] = Counter()
        """Reason -> how often it made an open ordinary, or a learned file be asked for again."""

    def refusal_of(self, descriptor: int, status: os.stat_result) -> str | None:
        """Why this descriptor may not be registered; None: it may."""
        if not stat.S_ISREG(status.st_mode):
            return "not_regular"
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_HARMLESS_FLAGS != os.O_RDONLY:
            return "not_read_only"
        if status.st_nlink != 1:
            # 0: evicted since. Its bytes are right, but its space could not be freed for as long as it is registered.
            return "not_one_name"
        if self._allowed_devices is not None and status.st_dev not in self._allowed_devices:
            return "elsewhere"
        return None

    def register_offer(self, inode: int, descriptor: int) -> int | None:
        """Check and register an offered descriptor; its backing id, and the file is learned. None: ordinary open."""
        try:
            status = os.fstat(descriptor)
            refusal = self.refusal_of(descriptor, status)
            if refusal is not None:
                self.refusals[refusal] += 1
                return None
            backing_id = self._registry.register(descriptor)
            path = os.readlink(b"/proc/self/fd/%d" % descriptor)
        except OSError as exc:
            self.refusals[_reason("offer", exc)] += 1
            return None
        self._learn(inode, _identity(path, status))
        return backing_id

    def register_learned(self, inode: int) -> int | None:
        """Open and register what backed the inode before, if it is still the same file; None: ask a worker."""
        learned = self._learned.get(inode)
        if learned is None:
            return None
        try:
            descriptor = os.open(learned.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            self._forget(inode, _reason("learned", exc))
            return None
        try:
            status = os.fstat(descriptor)
            if _identity(learned.path, status) != learned:
                self._forget(inode, "learned_changed")
                return None
            refusal = self.refusal_of(descriptor, status)
            if refusal is not None:
                self._forget(inode, refusal)
                return None
            return self._registry.register(descriptor)
        except OSError as exc:
            self._forget(inode, _reason("learned", exc))
            return None
        finally:
            os.close(descriptor)

    def unregister(self, backing_id: int) -> None:
        """Give a backing id back to the kernel."""
        try:
            self._registry.unregister(backing_id)
        except OSError as exc:
            self.refusals[_reason("close", exc)] += 1

    def forget(self, inode: int) -> None:
        """What backed an inode may be another version's now."""
        self._learned.pop(inode, None)

    @property
    def learned(self) -> int:
        """Inodes whose backing file is known."""
        return len(self._learned)

    def _learn(self, inode: int, file: LearnedFile) -> None:
        self._learned[inode] = file
        if len(self._learned) > MOST_LEARNED:
            for oldest in list(itertools.islice(self._learned, MOST_LEARNED // 16)):
                del self._learned[oldest]

    def _forget(self, inode: int, reason: str) -> None:
        del self._learned[inode]
        self.refusals[reason] += 1


def _reason(what: str, exc: OSError) -> str:
    return f"{what}_{errno.errorcode.get(exc.errno or 0, 'unknown').lower()}"
