"""The line between two supervisors: one JSON object a SEQPACKET message, with descriptors (SCM_RIGHTS).

What is said on it is `messages`, who connects where is `private_socket`. Unlike in a channel to a part
(`kernel.channel`) nothing waits here: a message that is not taken at once means that the other side is lost.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, Self

from fusecache.kernel.channel import Message, parsed

CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid, gid of SO_PEERCRED (unix(7)). The pid is 0 in another PID namespace."""

MOST_BYTES: Final = 64 << 10
MOST_DESCRIPTORS: Final = 4


class LineLost(Exception):
    """The other side is gone (`is_gone`), or does not take or send what it should; the text says which."""

    def __init__(self, text: str, *, is_gone: bool = False) -> None:
        super().__init__(text)
        self.is_gone = is_gone


class Line:
    """One side's end. Never blocks, but in `receive_within`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @classmethod
    def of_descriptor(cls, descriptor: int) -> Self:
        """One that came over exec."""
        return cls(socket.socket(fileno=descriptor))

    def keep_over_exec(self) -> int:
        """Its descriptor, which the program that replaces this one goes on with."""
        self._socket.set_inheritable(True)
        return self._socket.fileno()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Of the process that connected (SO_PEERCRED); 0: its PID namespace is another one."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid: int = CREDENTIALS.unpack(credentials)[0]
        return pid

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message. LineLost when it is not taken at once: a handful of messages fit into any socket."""
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as failure:
            gone = isinstance(failure, ConnectionError)
            raise LineLost(f"it does not take {message['kind']!r}: {failure.strerror}", is_gone=gone) from None

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, which are the caller's then; None: nothing is there yet. LineLost."""
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(MOST_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as failure:
            gone = isinstance(failure, ConnectionError)
            raise LineLost(f"its line can't be read: {failure.strerror}", is_gone=gone) from None
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        message = None if flags & socket.MSG_CTRUNC else parsed(data, MOST_BYTES)
        if message is None:
            close_all(descriptors)
            if not data:
                raise LineLost("it is gone", is_gone=True)
            raise LineLost("it said something that is no message")
        return message, list(descriptors)

    def receive_within(self, within_s: float) -> tuple[Message, list[int]]:
        """The next message. LineLost, also after `within_s` seconds."""
        end_s = time.monotonic() + within_s
        while True:
            if (received := self.receive()) is not None:
                return received
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                raise LineLost(f"it did not answer within {within_s:g} s")

    def close(self) -> None:
        """The other side is told by that."""
        self._socket.close()


def close_all(descriptors: Sequence[int] | array.array[int]) -> None:
    """Close what came with a message that is not used."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
