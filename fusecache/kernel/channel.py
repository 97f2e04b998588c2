"""One JSON object a message, with descriptors, between the supervisor and a part: a SOCK_SEQPACKET pair.

Never blocks. What does not fit into the socket yet waits here with duplicates of its descriptors; a part that takes
nothing for MAX_WAITING messages is not listening, and loses the oldest. A message whose descriptors can't be duplicated
(none left) is lost too. What comes in is checked to be a JSON object with a text `kind`; anything else is dropped and
counted, because a part that is gone wrong must not take others along.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_DESCRIPTORS: Final = 4
MAX_WAITING: Final = 1024
MAX_AT_ONCE: Final = 256
"""Messages that are read in one go: a part that never stops talking must not keep the loop from others."""

Message = dict[str, Any]


def socket_pair(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """A SEQPACKET pair, close-on-exec. With `buffer_bytes` each direction gets that much, where it is allowed.

    SO_SNDBUFFORCE and SO_RCVBUFFORCE need CAP_NET_ADMIN; without it the system's limit (net.core.wmem_max) holds.
    """
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if buffer_bytes is not None:
        for end in pair:
            for forced, plain in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
                try:
                    end.setsockopt(socket.SOL_SOCKET, forced, buffer_bytes)
                except PermissionError:
                    end.setsockopt(socket.SOL_SOCKET, plain, buffer_bytes)
    return pair


_SO_SNDBUFFORCE: Final = 32
_SO_RCVBUFFORCE: Final = 33
"""include/uapi/asm-generic/socket.h."""


_FULL: Final = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
"""The socket takes no more, or the machine has no more (memory, descriptors on their way) just now."""


class Channel:
    """The supervisor's end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.bad_messages = 0
        self.closed = False

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    @property
    def has_waiting(self) -> bool:
        """Whether `flush` has something to do once the socket takes more."""
        return bool(self._waiting)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send now or as soon as the part takes it. The caller keeps (and closes) its own descriptors."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes, {MAX_MESSAGE_BYTES} are the most")
        if self._waiting or not self._send(data, descriptors):
            if len(self._waiting) >= MAX_WAITING:
                _close_all(self._waiting.popleft()[1])
            copies: list[int] = []
            try:
                copies.extend(map(os.dup, descriptors))
            except OSError:  # no descriptors left: the message is lost, as when too many wait
                _close_all(copies)
            else:
                self._waiting.append((data, tuple(copies)))

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._waiting:
            data, descriptors = self._waiting[0]
            if not self._send(data, descriptors):
                return
            self._waiting.popleft()
            _close_all(descriptors)

    def receive(self) -> list[Message]:
        """The messages that are there, MAX_AT_ONCE at most. `closed` is true once the part has closed its end."""
        messages: list[Message] = []
        for _ in range(MAX_AT_ONCE):
            if self.closed:
                break
            try:
                data = self._socket.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # it ended with messages of ours unread: said once, before what it has sent and the end
            if not data:
                self.closed = True
                break
            message = parsed(data)
            if message is None:
                self.bad_messages += 1
            else:
                messages.append(message)
        return messages

    def close(self) -> None:
        """Close, and forget what waits."""
        for _, descriptors in self._waiting:
            _close_all(descriptors)
        self._waiting.clear()
        self._socket.close()
        self.closed = True

    def _send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """False when the socket is full. A part that is gone takes everything."""
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except ConnectionError:
            pass  # its end is told by waitpid
        except OSError as failure:
            if failure.errno in _FULL:
                return False
            raise
        return True


def parsed(data: bytes, most_bytes: int = MAX_MESSAGE_BYTES) -> Message | None:
    """A message, None when it is none."""
    if len(data) > most_bytes:
        return None
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
