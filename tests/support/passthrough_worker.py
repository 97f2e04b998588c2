"""The stand-in worker with block files: what the folder `blocks` holds under an inode's number is offered at its OPEN.

The file's bytes differ from what the worker answers to READ, so that a reader sees who read them.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

from fusecache.kernel.offers import OfferSender
from tests.support import stand_in_worker
from tests.support.stand_in_worker import IN_HEADER, OPEN


class PassthroughWorker(stand_in_worker.StandIn):
    """Offers, then answers an ordinary OPEN."""

    def __init__(self, requests: int, slots: int, folder: Path, offers: int) -> None:
        super().__init__(requests, slots, folder)
        self._offers = OfferSender(offers)
        self._blocks = folder / "blocks"

    def _handle(self, message: bytes) -> None:
        _, opcode, _, inode, *_ = IN_HEADER.unpack_from(message)
        block = self._blocks / str(inode)
        if opcode == OPEN:
            with (self._blocks / "opens").open("ab") as log:
                log.write(struct.pack("<Q", inode))
            if block.exists():
                descriptor = os.open(block, os.O_RDONLY)
                assert self._offers.offer(inode, descriptor)
                os.close(descriptor)
        super()._handle(message)


def main() -> int:
    """Flags as the supervisor gives them."""
    flags = stand_in_worker.parse_flags()
    folder = Path(os.environ["FUSECACHE_STAND_IN"])
    PassthroughWorker(flags.requests_fd, flags.slots_fd, folder, flags.offers_fd).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
