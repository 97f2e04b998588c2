"""The gate's end of one worker: its requests socket, its shared slots, its offers.

Nothing here waits: a socket that takes no more says so, and the request waits in the gate.
"""

from __future__ import annotations

import contextlib
import os
import socket

from fusecache.kernel import wire
from fusecache.kernel.gate.in_flight import Load
from fusecache.kernel.offers import OfferReceiver
from fusecache.kernel.reply_slots import GateSlots
from fusecache.kernel.unread import has_unread


class Worker:
    """One worker process as the gate knows it."""

    def __init__(
        self, index: int, pid: int, requests: int, slots: int, offers: int, *, taken_over: bool = False
    ) -> None:
        """Takes over the three descriptors. Raises BadSlots, OSError; the descriptors are then closed.

        `taken_over`: from a gate that died. What that one had in its hands is given back.
        """
        self.index = index
        self.pid = pid
        self.requests = requests
        try:
            self.slots = GateSlots(slots)
            os.set_blocking(requests, False)
            self.offers = OfferReceiver(offers)
            if taken_over:
                self.slots.free_taken()
                self.offers.drop()
        except BaseException:
            for descriptor in (requests, offers):
                os.close(descriptor)
            raise
        finally:
            os.close(slots)
        self.load = Load(index, self.slots.count)
        self.bytes_by_slots = 0

    def has_unread(self) -> bool:
        """Whether a message still lies in its socket."""
        return has_unread(self.requests)

    def nudge(self) -> None:
        """Give it something to take out of its socket."""
        with contextlib.suppress(OSError):  # full, or dead: both are noticed without this
            os.write(self.requests, wire.nothing_to_do())

    def end(self) -> None:
        """The worker gets EOF, if it still lives: closing is not enough, the supervisor holds this end too."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.requests)) as ended:
            ended.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Let it go, for another attempt or another gate."""
        self.offers.close()
        os.close(self.requests)
        self.slots.close()
