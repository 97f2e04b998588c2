"""What workers offer to the gate: open descriptors of files that hold an inode's bytes, one to one, or one block's.

A worker that wants an inode read without workers sends the descriptor (SCM_RIGHTS) on its offers socket *before*
it answers the OPEN (without OPEN: before it answers a READ). The gate takes all offers out of that socket before it
looks at the answer, so that the offer is there in time; one that no such answer follows is closed when there are too
many.

Offers are a wish: the gate checks the descriptor (`kernel.gate.learned`), and goes on asking workers when anything is
wrong.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections import OrderedDict
from typing import Final, NamedTuple

_OFFER = struct.Struct("<QIIQ")
"""inode, index of the block, padding, bytes of a block (0: the file is the whole inode)."""
MOST_PENDING: Final = 256
"""Offers whose OPEN or READ is not answered yet; a worker answers at most as many at once as it has credits. Each is an
open descriptor of the gate's, so a worker that offers without end must not take them all (1,024 is a common limit)."""
MOST_BLOCKS: Final = 64
"""Pending offers of one inode."""
MOST_AT_ONCE: Final = 1024
"""Messages taken out of a socket in one go, several times what it holds: a worker that never stops offering must not
keep the gate from everybody else."""


class Offered(NamedTuple):
    """One open file, to be checked by whoever takes it, and closed."""

    descriptor: int
    block_index: int = 0
    block_bytes: int = 0
    """Size of every block but the last; 0: the file is the whole inode."""


class OfferSender:
    """The worker's half. One thread at a time."""

    def __init__(self, descriptor: int) -> None:
        """Takes over a connected SEQPACKET socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)

    def offer(self, inode: int, descriptor: int, index: int = 0, block_bytes: int = 0) -> bool:
        """Offer an open file (O_RDONLY) with the inode's next answer; the caller keeps its descriptor.

        The file is the whole inode, or with `block_bytes` its block `index`. False when the gate's queue is full or the
        gate is gone: answer as ever, nothing else to be done.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._socket.sendmsg([_OFFER.pack(inode, index, 0, block_bytes)], rights)
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
        self._pending: OrderedDict[int, list[Offered]] = OrderedDict()
        self._count = 0
        """Pending descriptors of all inodes."""
        self.refused = 0
        """Messages that are no offers, or whose descriptor this process had no number left for."""

    def is_waiting(self) -> bool:
        """Whether the socket holds something (0.4 us; to try to receive costs an exception, 2 us)."""
        return bool(self._poll.poll(0))

    def drop(self) -> None:
        """The gate before this one died. What was offered to it may be older than what it was told to forget."""
        self._drain()
        self._close_pending()

    def take(self, inode: int) -> list[Offered]:
        """What was offered for an inode, oldest first, now the caller's."""
        self._drain()
        taken = self._pending.pop(inode, [])
        self._count -= len(taken)
        return taken

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        self._close_pending()
        self._socket.close()

    def _close_pending(self) -> None:
        while self._pending:
            self._close(self._pending.popitem()[1])

    def _drain(self) -> None:
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        with contextlib.suppress(OSError):  # EAGAIN: all taken; ECONNRESET: the worker died
            for _ in range(MOST_AT_ONCE):
                # Rights that do not fit, here or into this process's table of descriptors, are closed by the kernel;
                # those that fit are close-on-exec.
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
                inode, index, _, block_bytes = _OFFER.unpack(message)
                self._remember(inode, Offered(descriptors[0], index, block_bytes))

    def _remember(self, inode: int, offered: Offered) -> None:
        offers = self._pending.pop(inode, [])
        offers.append(offered)
        self._count += 1
        if len(offers) > MOST_BLOCKS:
            self._close([offers.pop(0)])
        self._pending[inode] = offers
        while self._count > MOST_PENDING:
            self._close(self._pending.popitem(last=False)[1])

    def _close(self, offers: list[Offered]) -> None:
        self._count -= len(offers)
        close_all(offers)


def close_all(offers: list[Offered]) -> None:
    """Close descriptors that nobody wants."""
    for offered in offers:
        os.close(offered.descriptor)
