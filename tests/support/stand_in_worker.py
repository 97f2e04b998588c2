"""A worker that is not ours: speaks FUSE on its requests socket with the standard library alone.

It serves one root folder with five files of fixed content:
  file    answered at once
  slow    answered once the file `go` is in the folder FUSECACHE_STAND_IN (the test decides when)
  poison  kills the worker that is asked to read it
  endless the first worker that is asked to read it loops for ever (`looping` is there then); others answer
  huge    content of 64 MiB that is a function of the offset
Its part of the gate's protocol is what ours does: INIT is answered on the socket, READ data goes through slots.
In `passthrough` mode the file `backing` in the folder, where it is there, is offered for `file`.
The INIT that it was shown lies in the folder as `init`, and `asked` is there once `slow` was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import os
import select
import signal
import stat
import struct
import sys
from pathlib import Path

from fusecache.kernel.offers import OfferSender
from fusecache.kernel.reply_slots import WorkerSlots

LOOKUP, GETATTR, OPEN, READ, STATFS, INIT, OPENDIR, READDIR = 1, 3, 14, 15, 17, 26, 27, 28
NEVER_ANSWERED = (2, 42)
"""FORGET, BATCH_FORGET."""
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
ROOT = 1
NAMES = {b"file": 2, b"slow": 3, b"poison": 4, b"huge": 5, b"endless": 6}
CONTENT = bytes(range(256)) * 1024
HUGE_BYTES = 64 << 20
VALID_S = 3600
SLOW_POLL_MS = 20


def content_of(inode: int, offset: int, size: int) -> bytes:
    """Bytes of a file; what a test compares with."""
    whole = HUGE_BYTES if inode == NAMES[b"huge"] else len(CONTENT)
    size = max(0, min(size, whole - offset))
    begin = offset % len(CONTENT)
    return (CONTENT * (2 + size // len(CONTENT)))[begin : begin + size]


def attributes(inode: int) -> bytes:
    """struct fuse_attr."""
    if inode == ROOT:
        mode, size = stat.S_IFDIR | 0o755, 0
    else:
        mode, size = stat.S_IFREG | 0o644, HUGE_BYTES if inode == NAMES[b"huge"] else len(CONTENT)
    return ATTRIBUTES.pack(inode, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class StandIn:
    """One worker."""

    def __init__(self, requests: int, slots: int, offers: int, folder: Path) -> None:
        self._requests = requests
        self._offers = OfferSender(offers)
        self._slots = WorkerSlots(slots)
        self._folder = folder
        self._slow: list[tuple[int, int, int]] = []

    def serve(self) -> None:
        """Until the gate is gone."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while True:
            if poll.poll(SLOW_POLL_MS if self._slow else None):
                try:
                    message = os.read(self._requests, 1 << 20)
                except ConnectionResetError:
                    return  # the gate ended with answers unread
                if not message:
                    return
                self._handle(message)
            if self._slow and (self._folder / "go").exists():
                for unique, offset, size in self._slow:
                    self._read(unique, NAMES[b"slow"], offset, size)
                self._slow.clear()

    def _handle(self, message: bytes) -> None:
        _, opcode, unique, inode, *_ = IN_HEADER.unpack_from(message)
        body = message[IN_HEADER.size :]
        if opcode == INIT:
            (self._folder / "init").write_bytes(message)
            major, minor, readahead, flags = struct.unpack_from("<IIII", body)
            kept = flags & ((1 << 0) | (1 << 5) | (1 << 18) | (1 << 22))
            answer = struct.pack(
                "<IIIIHHIIHHII", major, min(minor, 38), readahead, kept, 12, 9, 1 << 20, 1, 256, 0, 0, 0
            )
            self._answer(unique, answer.ljust(64, b"\0"))
        elif opcode == GETATTR:
            self._answer(unique, struct.pack("<QII", VALID_S, 0, 0) + attributes(inode))
        elif opcode == LOOKUP:
            found = NAMES.get(body.rstrip(b"\0"))
            if found is None:
                self._answer(unique, error=errno.ENOENT)
            else:
                entry = struct.pack("<QQQQII", found, 0, VALID_S, VALID_S, 0, 0)
                self._answer(unique, entry + attributes(found))
        elif opcode == OPEN:
            backing = self._folder / "backing"
            if inode == NAMES[b"file"] and backing.exists():
                with backing.open("rb") as file:
                    self._offers.offer(inode, file.fileno())
            self._answer(unique, struct.pack("<QII", 0, 1 << 1, 0))
        elif opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            if inode == NAMES[b"poison"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if inode == NAMES[b"endless"]:
                with contextlib.suppress(FileExistsError):
                    (self._folder / "looping").touch(exist_ok=False)
                    while True:
                        pass
            if inode == NAMES[b"slow"]:
                (self._folder / "asked").touch()
                self._slow.append((unique, offset, size))
            else:
                self._read(unique, inode, offset, size)
        elif opcode in NEVER_ANSWERED:
            pass
        elif opcode == READDIR:
            self._answer(unique, self._listing(struct.unpack_from("<QQI", body)[1]))
        elif opcode == STATFS:
            self._answer(unique, struct.pack("<QQQQQIIII", 0, 0, 0, 0, 0, 4096, 255, 4096, 0).ljust(80, b"\0"))
        else:
            self._answer(unique, error=errno.ENOSYS)

    @staticmethod
    def _listing(after: int) -> bytes:
        listing = b""
        for number, (name, inode) in enumerate(NAMES.items(), start=1):
            if number > after:
                entry = struct.pack("<QQII", inode, number, len(name), stat.S_IFREG >> 12) + name
                listing += entry.ljust(-(-len(entry) // 8) * 8, b"\0")
        return listing

    def _read(self, unique: int, inode: int, offset: int, size: int) -> None:
        slot = self._slots.take(size)
        assert slot is not None, "the gate sent more READs than there are slots"
        content = content_of(inode, offset, size)
        slot.view[: len(content)] = content
        self._answer(unique, self._slots.token(slot, len(content)))

    def _answer(self, unique: int, body: bytes = b"", *, error: int = 0) -> None:
        with contextlib.suppress(ConnectionError):  # the gate is gone: the next read says so
            os.write(self._requests, OUT_HEADER.pack(OUT_HEADER.size + len(body), -error, unique) + body)


def main(kind: type[StandIn] = StandIn) -> int:
    """One worker, until the gate is gone, with flags as the supervisor gives them."""
    parser = argparse.ArgumentParser()
    for flag in ("index", "requests-fd", "slots-fd", "offers-fd", "plan-fd", "epoch-fd"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    for flag in ("agent-socket", "open-mode", "device-number"):
        parser.add_argument(f"--{flag}", required=True)
    flags = parser.parse_args()
    faulthandler.enable()
    folder = Path(os.environ["FUSECACHE_STAND_IN"])
    assert os.pread(flags.plan_fd, 4, 0) == b"plan"
    assert len(os.pread(flags.epoch_fd, 8192, 0)) == 4096
    kind(flags.requests_fd, flags.slots_fd, flags.offers_fd, folder).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
