"""Whether what was sent into a socket still lies there, not taken by the other end."""

from __future__ import annotations

import contextlib
import fcntl
import struct
import termios
from typing import Final

_INT: Final = struct.Struct("i")


def has_unread(descriptor: int) -> bool:
    """SIOCOUTQ: bytes sent and not yet taken. False for one that is closed."""
    answer = bytearray(_INT.size)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCOUTQ, answer)
    return bool(_INT.unpack(answer)[0])
