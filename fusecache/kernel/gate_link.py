"""What the agent asks of the gate: notifications to the kernel, counters, inodes opened past the workers.

One SEQPACKET socket; a message is a head (kind, id, inode, offset, length) and, by kind, a name or bytes. The answer
carries the id and an errno (0: the kernel took it), then by kind JSON or inode numbers. Several requests may be on
their way; answers come in any order.

A push returns when the kernel took it, which can last as long as a READ of that inode or a LOOKUP in that folder is
in flight (1.7 s were seen): call from a thread that nobody waits for. The gate carries pushes out one after the other
in a thread of its own; `status` and `take_opened` are answered in between.

A gate that goes on after one that died says so on the link (an answer to AGAIN). What that one was asked is then asked
again: it may have died with a question in its hands, and an invalidation must not be lost.

`GateLink` is the agent's half. The gate's is `kernel.gate.notifications`; the layouts below are both's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import threading
from typing import Any, NamedTuple

HEAD = struct.Struct("<IIQqq")
"""kind, id, inode, offset, length."""
ANSWER = struct.Struct("<II")
"""id, errno."""

INVALIDATE_ENTRY = 1
INVALIDATE_INODE = 2
STORE = 3
STATUS = 4
TAKE_OPENED = 5
AGAIN = 0
"""Id of the answer that no question has: another gate has begun."""
PUSHES = frozenset((INVALIDATE_ENTRY, INVALIDATE_INODE, STORE))

MOST_STORE_BYTES = 128 << 10
"""Bytes of one STORE message: fits an unprivileged socket buffer (208 KiB) with room for another message."""
MOST_MESSAGE_BYTES = HEAD.size + MOST_STORE_BYTES
MOST_ANSWER_BYTES = 128 << 10
OPENED = struct.Struct("<QQ")
"""inode, index of the block."""
MOST_OPENED = (MOST_ANSWER_BYTES - ANSWER.size) // OPENED.size
MOST_NAME_BYTES = 1024
"""FUSE_NAME_MAX of fs/fuse/fuse_i.h; longer names never reach the kernel."""
ANSWER_TIMEOUT_S = 60.0
"""A push waits for a READ in flight; reads that last longer are met by the next push or the kernel's timeout."""
HIGHEST = (1 << 63) - 1


class LinkRequest(NamedTuple):
    """A message as the gate understands it."""

    kind: int
    id: int
    inode: int
    offset: int
    length: int
    payload: bytes


class BadLinkMessage(Exception):
    """Not a message of this protocol."""


def decode(message: bytes) -> LinkRequest:
    """Check and take apart one message of the agent. Raises BadLinkMessage."""
    if not HEAD.size <= len(message) <= MOST_MESSAGE_BYTES:
        raise BadLinkMessage(f"{len(message)} bytes")
    kind, number, inode, offset, length = HEAD.unpack_from(message)
    payload = message[HEAD.size :]
    if kind == INVALIDATE_ENTRY:
        if not 0 < len(payload) <= MOST_NAME_BYTES or b"\0" in payload or b"/" in payload:
            raise BadLinkMessage("no file name")
    elif kind == STORE:
        if not payload or offset < 0 or offset > HIGHEST - len(payload):
            raise BadLinkMessage(f"{len(payload)} bytes at {offset}")
    elif kind not in (INVALIDATE_INODE, STATUS, TAKE_OPENED) or payload or length < 0:
        raise BadLinkMessage(f"kind {kind} with {len(payload)} bytes")
    return LinkRequest(kind, number, inode, offset, length, payload)


class _Waiter:
    __slots__ = ("arrived", "payload", "question", "refusal")

    def __init__(self, question: tuple[int, int, int, int, bytes | memoryview]) -> None:
        """`question`: kind, inode, offset, length, payload."""
        self.question = question
        self.arrived = threading.Event()
        self.refusal = 0
        self.payload = b""


class GateLink:
    """The agent's half; every method may be called from several threads at once and blocks its thread.

    Every method raises OSError: with the kernel's errno (ENOENT: the kernel does not know that inode or name, nothing
    to be done), ETIMEDOUT when no answer came in `timeout_s`, or ECONNRESET when the gate's end is closed.
    """

    def __init__(self, descriptor: int, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Takes over a connected SEQPACKET socket and starts a (daemon) thread that receives the answers."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._waiters: dict[int, _Waiter] = {}
        self._last_id = 0
        self._closed = False
        self._receiver = threading.Thread(target=self._receive, name="gate-link", daemon=True)
        self._receiver.start()

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Forget the entry `name` of a folder, a negative one too (FUSE_NOTIFY_INVAL_ENTRY)."""
        self._ask(INVALIDATE_ENTRY, parent, 0, 0, name)

    def invalidate_inode(self, inode: int, offset: int = 0, length: int = 0, *, attr_only: bool = False) -> None:
        """Forget an inode's attributes and its pages from `offset` on (`length` 0: all), or the attributes alone.

        FUSE_NOTIFY_INVAL_INODE. What the gate learned to back the inode is forgotten too, so that its next first
        open asks a worker.
        """
        self._ask(INVALIDATE_INODE, inode, -1 if attr_only else offset, 0 if attr_only else length)

    def store(self, inode: int, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the page cache (FUSE_NOTIFY_STORE). The pages are charged to the gate's cgroup.

        Also raises OSError with ENOSPC when that has no memory to spare (`kernel.gate.store_room`: pause, then go on),
        and with EOPNOTSUPP when pages are not pushed at all.
        """
        rest = memoryview(data)
        while rest:
            piece = rest[:MOST_STORE_BYTES]
            self._ask(STORE, inode, offset, 0, piece)
            offset += len(piece)
            rest = rest[len(piece) :]

    def status(self) -> dict[str, Any]:
        """The gate's counters and gauges, see `kernel.gate.main`."""
        answer = json.loads(self._ask(STATUS, 0, 0, 0))
        if not isinstance(answer, dict):
            raise OSError(errno.EPROTO, "the gate's status is no object")
        return answer

    def take_opened(self, most: int = MOST_OPENED) -> list[tuple[int, int]]:
        """Blocks (inode, index) opened by the gate alone since the last call: no worker saw it. At most `most`."""
        payload = self._ask(TAKE_OPENED, 0, 0, min(most, MOST_OPENED))
        return list(OPENED.iter_unpack(payload))

    def close(self) -> None:
        """End: whoever waits gets ECONNRESET."""
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._receiver.join()
        self._socket.close()

    def _ask(self, kind: int, inode: int, offset: int, length: int, payload: bytes | memoryview = b"") -> bytes:
        waiter = _Waiter((kind, inode, offset, length, payload))
        with self._lock:
            if self._closed:
                raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            self._last_id = number = self._last_id % 0xFFFFFFFF + 1
            self._waiters[number] = waiter
        try:
            self._send(number, waiter)
            if not waiter.arrived.wait(self._timeout_s):
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        finally:
            with self._lock:
                self._waiters.pop(number, None)
        if waiter.refusal:
            raise OSError(waiter.refusal, os.strerror(waiter.refusal))
        return waiter.payload

    def _send(self, number: int, waiter: _Waiter) -> None:
        kind, inode, offset, length, payload = waiter.question
        # SEQPACKET messages are whole: threads need no lock to send.
        self._socket.sendmsg([HEAD.pack(kind, number, inode, offset, length), payload])

    def _ask_again(self) -> None:
        """Twice is no harm: to forget, and to take the same bytes; `take_opened` may lose some inodes' touch."""
        with self._lock:
            waiting = list(self._waiters.items())
        for number, waiter in waiting:
            with contextlib.suppress(OSError):  # the end is noticed by the next receive
                self._send(number, waiter)

    def _receive(self) -> None:
        while True:
            try:
                message = self._socket.recv(MOST_ANSWER_BYTES)
            except OSError:
                message = b""
            if not message:
                break
            if len(message) < ANSWER.size:
                continue
            number, refusal = ANSWER.unpack_from(message)
            if number == AGAIN:
                self._ask_again()
                continue
            with self._lock:
                waiter = self._waiters.get(number)
            if waiter is not None:  # None: its caller stopped waiting
                waiter.refusal = refusal
                waiter.payload = message[ANSWER.size :]
                waiter.arrived.set()
        with self._lock:
            self._closed = True
            waiting = list(self._waiters.values())
        for waiter in waiting:
            waiter.refusal = errno.ECONNRESET
            waiter.arrived.set()
