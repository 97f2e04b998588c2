"""The stand-in worker with block files: what the folder `blocks` holds under an inode's number is offered at its OPEN.

The file's bytes differ from what the worker answers to READ, so that a reader sees who read them.
"""

from __future__ import annotations

import os
import struct
import sys

from tests.support import stand_in_worker
from tests.support.stand_in_worker import IN_HEADER, OPEN


class PassthroughWorker(stand_in_worker.StandIn):
    """Offers, then answers an ordinary OPEN."""

    def _handle(self, message: bytes) -> None:
        _, opcode, _, inode, *_ = IN_HEADER.unpack_from(message)
        blocks = self._folder / "blocks"
        block = blocks / str(inode)
        if opcode == OPEN:
            with (blocks / "opens").open("ab") as log:
                log.write(struct.pack("<Q", inode))
            if block.exists():
                descriptor = os.open(block, os.O_RDONLY)
                assert self._offers.offer(inode, descriptor)
                os.close(descriptor)
        super()._handle(message)


if __name__ == "__main__":
    sys.exit(stand_in_worker.main(PassthroughWorker))
