"""Registering files that the kernel then reads by itself (FUSE passthrough), and giving them back.

What may be registered is decided by `learned`, when by `opens`.
"""

from __future__ import annotations

import fcntl
import os
import struct

from fusecache.kernel import wire
from fusecache.kernel.gate.learned import LearnedFiles, reason_of
from fusecache.kernel.offers import Offered

_U32 = struct.Struct("<I")


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
    """Registers what was offered or learned."""

    def __init__(self, registry: Registry, learned: LearnedFiles) -> None:
        self._registry = registry
        self.learned = learned

    def register_offer(self, inode: int, offered: Offered, asked_at_s: float) -> int | None:
        """Learn and register an offered file that is the whole inode; its backing id. None: ordinary open."""
        if not self.learned.learn(inode, offered, asked_at_s):
            return None
        try:
            return self._registry.register(offered.descriptor)
        except OSError as exc:
            self.learned.drop(inode, reason_of("register", exc))
            return None

    def register_learned(self, inode: int) -> int | None:
        """Open and register what backed the inode before, if it is still the same file; None: ask a worker."""
        opened = self.learned.open(inode)
        if opened is None:
            return None
        try:
            return self._registry.register(opened.descriptor)
        except OSError as exc:
            self.learned.drop(inode, reason_of("register", exc))
            return None
        finally:
            os.close(opened.descriptor)

    def unregister(self, backing_id: int) -> None:
        """Give a backing id back to the kernel."""
        try:
            self._registry.unregister(backing_id)
        except OSError as exc:
            self.learned.refusals[reason_of("unregister", exc)] += 1
