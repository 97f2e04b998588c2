"""What workers offer to the gate: open descriptors of files that hold an inode's bytes, one to one.

A worker that wants an inode read without workers sends the descriptor (SCM_RIGHTS) on its offers socket *before*
it answers the OPEN (without OPEN: before it answers a READ). The gate takes all offers out of that socket before it
looks at the answer, so that the offer is there in time; one that no such answer follows is closed when there are too
many.

Offers are a wish: the gate checks the descriptor (`kernel.learned`), and goes on asking workers when anything is wrong.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections import OrderedDict
from typing import Final

_OFFER = struct.Struct("<QII")
"""inode, flags (0), padding."""
MOST_PENDING: Final = 256
"""Offers whose OPEN is not answered yet; a worker answers at most as many OPENs at once as it has credits."""


class OfferSender:
    """The worker's half. One thread at a time."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a connected SEQPACKET socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)

    def offer(self, inode: int, descriptor: int) -> bool:
        """Offer an open file (O_RDONLY) for the inode's next OPEN answer; the caller keeps its descriptor.

        False when the gate's queue is full or the gate is gone: answer an ordinary OPEN, nothing else to be done.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._socket.sendmsg([_OFFER.pack(inode, 0, 0)], rights)
        except OSError:
            # Full (EAGAIN), too many descriptors on the way (ETOOMANYREFS), or the gate ended (EPIPE).
            return False
        return True

    def close(self) -> None:
        """No more offers."""
        self._socket.close()


class OfferReceiver:
    """The gate's half, for one worker."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a connected SEQPACKET socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._pending: OrderedDict[int, int] = OrderedDict()
        self.refused = 0
        """Messages that are no offers."""

    def is_waiting(self) -> bool:
        """Whether the socket holds something (0.4 us; to try to receive costs an exception, 2 us)."""
        return bool(self._poll.poll(0))

    def take(self, inode: int) -> int | None:
        """The descriptor offered last for an inode, now the caller's; None: no offer."""
        self._drain()
        return self._pending.pop(inode, None)

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        for descriptor in self._pending.values():
            os.close(descriptor)
        self._pending.clear()
        self._socket.close()

    def _drain(self) -> None:
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        with contextlib.suppress(OSError):  # EAGAIN: all taken; ECONNRESET: the worker died
            while True:
                # Rights that do not fit are closed by the kernel; those that fit are close-on-exec (Python's recvmsg).
                message, ancillary, _, _ = self._socket.recvmsg(_OFFER.size + 1, space, socket.MSG_CMSG_CLOEXEC)
                descriptors = array.array("i")
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                if not message and not descriptors:
                    return
                if len(message) != _OFFER.size or len(descriptors) != 1:
                    self.refused += 1
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                self._remember(_OFFER.unpack(message)[0], descriptors[0])

    def _remember(self, inode: int, descriptor: int) -> None:
        older = self._pending.pop(inode, None)
        if older is not None:
            os.close(older)
        self._pending[inode] = descriptor
        if len(self._pending) > MOST_PENDING:
            os.close(self._pending.popitem(last=False)[1])
