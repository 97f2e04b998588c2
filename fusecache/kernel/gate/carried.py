"""What a gate had read and not answered, on its way to the next gate: the kernel's own messages, in a memfd.

Each message begins with its length (struct fuse_in_header), so they lie one after the other. The next gate has the same
open file of the device, where their answers belong, and treats them as if it had read them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import Final

LEAST_BYTES: Final = 40
"""struct fuse_in_header."""

MOST_BYTES: Final = 64 << 20
"""A thousand times what 64 background requests and hundreds of readers have in flight."""

MOST_MESSAGE_BYTES: Final = 1 << 20
"""A gate's buffer has room for it."""

_LENGTH: Final = struct.Struct("<I")


class BadCarried(Exception):
    """Not a row of messages."""


def write(descriptor: int, messages: Iterable[bytes]) -> None:
    """Put the messages in, in order. OSError."""
    content = memoryview(b"".join(messages))
    while content:
        content = content[os.write(descriptor, content) :]


def read(descriptor: int) -> list[bytes]:
    """All messages, in order. BadCarried, OSError."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes > MOST_BYTES:
        raise BadCarried(f"{size_bytes} bytes of messages")
    content = os.pread(descriptor, size_bytes, 0)
    messages = []
    at = 0
    while at < len(content):
        if len(content) - at < LEAST_BYTES:
            raise BadCarried(f"{len(content) - at} bytes are left at {at}")
        (length,) = _LENGTH.unpack_from(content, at)
        if not LEAST_BYTES <= length <= min(len(content) - at, MOST_MESSAGE_BYTES):
            raise BadCarried(f"a message of {length} bytes at {at}, {len(content) - at} are left")
        messages.append(content[at : at + length])
        at += length
    return messages
