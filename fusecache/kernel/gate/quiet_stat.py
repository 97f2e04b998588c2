"""On which file system does an open file lie? Answered without asking that file system anything.

fstat(2) of a file of a network or FUSE file system may ask its server, and wait: in the gate, which is the server of
its own mount, for ever. statx(2) with AT_STATX_DONT_SYNC says what the kernel knows by itself.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_BYTES: Final = 256
_DEVICE: Final = struct.Struct("<II")
_DEVICE_AT: Final = 136
"""stx_dev_major, stx_dev_minor of struct statx (include/uapi/linux/stat.h)."""

_libc = ctypes.CDLL(None, use_errno=True)


def device_of(descriptor: int) -> int:
    """st_dev of an open file. OSError."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, 0, found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return os.makedev(*_DEVICE.unpack_from(found, _DEVICE_AT))
