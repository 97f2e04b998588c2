"""Whether a part of a file is in memory: cachestat(2), since Linux 6.5.

Asked before a file is mapped, which would wait for the disk where pages are missing. About 2 us.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

_SYS_CACHESTAT: Final = 451
"""The same on every architecture (include/uapi/asm-generic/unistd.h)."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Residency:
    """One thread's question, with its buffers."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._range = (ctypes.c_uint64 * 2)()
        self._counts = (ctypes.c_uint64 * 5)()
        """struct cachestat: cached, dirty, under write-back, evicted, recently evicted pages."""
        self._at = ctypes.byref(self._range)
        self._into = ctypes.byref(self._counts)
        self.is_known = True
        """False where the kernel can't tell."""

    def is_resident(self, descriptor: int, offset: int, size: int) -> bool:
        """Whether every page of the range is in memory, or on its way; False when the kernel can't tell."""
        self._range[0] = offset
        self._range[1] = size
        if self._syscall(_SYS_CACHESTAT, descriptor, self._at, self._into, 0):
            if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
                self.is_known = False
            return False
        first, last = offset // _PAGE_BYTES, (offset + size - 1) // _PAGE_BYTES
        return self._counts[0] >= last - first + 1
