"""The stand-in worker with files that no worker of ours would show, or offer.

`setuid` has the bytes of the file `program` in the folder, belongs to root and has mode 04755. `device` is the
character device 1:5, /dev/zero. `mirror` is offered for direct reading as a file of the very mount, of which the kernel
keeps no attribute. Who is asked to read `leave` closes its socket, and lives on. They answer by name only.
"""

from __future__ import annotations

import os
import signal
import stat
import struct
import sys

from tests.support import stand_in_worker
from tests.support.stand_in_worker import ATTRIBUTES, CONTENT, GETATTR, IN_HEADER, LOOKUP, READ, VALID_S

SETUID, DEVICE, MIRROR, LEAVE = 100, 101, 102, 103
NAMES = {b"setuid": SETUID, b"device": DEVICE, b"mirror": MIRROR, b"leave": LEAVE}
ZERO = os.makedev(1, 5)


class HostileWorker(stand_in_worker.StandIn):
    """See the module."""

    def _handle(self, message: bytes) -> None:
        _, opcode, unique, inode, *_ = IN_HEADER.unpack_from(message)
        body = message[IN_HEADER.size :]
        if opcode == LOOKUP and (found := NAMES.get(body.rstrip(b"\0"))):
            valid_s = 0 if found == MIRROR else VALID_S
            self._answer(unique, struct.pack("<QQQQII", found, 0, valid_s, valid_s, 0, 0) + self._attributes(found))
        elif opcode == GETATTR and inode in NAMES.values():
            valid_s = 0 if inode == MIRROR else VALID_S
            self._answer(unique, struct.pack("<QII", valid_s, 0, 0) + self._attributes(inode))
        elif opcode == READ and inode == SETUID:
            _, offset, size = struct.unpack_from("<QQI", body)
            content = (self._folder / "program").read_bytes()[offset : offset + size]
            slot = self._slots.take(size)
            assert slot is not None
            slot.view[: len(content)] = content
            self._answer(unique, self._slots.token(slot, len(content)))
        elif opcode == READ and inode == MIRROR:
            with (self._folder.parent / "mnt" / "mirror").open("rb") as file:  # the other worker answers that
                assert self._offers.offer(MIRROR, file.fileno())
            _, offset, size = struct.unpack_from("<QQI", body)
            self._read(unique, inode, offset, size)
        elif opcode == READ and inode == LEAVE:
            os.close(self._requests)
            while True:
                signal.pause()
        else:
            super()._handle(message)

    def _attributes(self, inode: int) -> bytes:
        """struct fuse_attr of root's file."""
        if inode == DEVICE:
            mode, size, device = stat.S_IFCHR | 0o666, 0, ZERO
        elif inode in (MIRROR, LEAVE):
            mode, size, device = stat.S_IFREG | 0o644, len(CONTENT), 0
        else:
            mode, size, device = stat.S_IFREG | 0o4755, (self._folder / "program").stat().st_size, 0
        return ATTRIBUTES.pack(inode, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, device, 4096, 0)


if __name__ == "__main__":
    sys.exit(stand_in_worker.main(HostileWorker))
