"""The gate's end of the link to the agent: notifications to the kernel, in threads of their own.

A notification blocks in write(2) for as long as a READ of that inode or a LOOKUP in that folder is in flight, and that
one is answered by the gate's loop, so it is never written there. One thread receives and answers what needs no
kernel; a second one writes the notifications, one after the other. It waits for what is in flight before it writes: a
thread that hangs in the kernel can't be killed, and keeps the connection, with everybody who waits for it, when all
processes are killed at that moment.

Of the gate's loop they touch nothing but counters and what is made for any thread in `learned`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from fusecache.kernel import gate_link, wire
from fusecache.kernel.gate.learned import LearnedFiles
from fusecache.kernel.gate.store_room import StoreRoom
from fusecache.kernel.log import Log

MOST_QUEUED: Final = 256
"""Notifications that wait; the agent's next message is then not received (its calls take longer)."""

_READS: Final = frozenset((wire.READ,))
_IN_FOLDER: Final = frozenset((wire.LOOKUP, wire.READDIR, wire.READDIRPLUS))
END_S: Final = 1.0


class Notifications:
    """Serves one link to the agent at a time."""

    def __init__(
        self,
        device: int,
        status: Callable[[], dict[str, Any]],
        learned: LearnedFiles,
        room: StoreRoom | None,
        wait_answered: Callable[[frozenset[int], int], None],
        log: Log,
    ) -> None:
        """`status` is called in the receiving thread; of `learned` only what any thread may call.

        `room`: whether there is memory for pages; None: pages are not pushed (the feature is masked or missing).
        """
        self._room = room
        self._wait_answered = wait_answered
        self._device = device
        self._status = status
        self._learned = learned
        self._log = log
        self._link: socket.socket | None = None
        self._receiver: threading.Thread | None = None
        self._queue: queue.Queue[tuple[socket.socket, gate_link.LinkRequest] | None] = queue.Queue(MOST_QUEUED)
        self.counts: Counter[str] = Counter()
        self._writer = threading.Thread(target=self._write_all, name="notifications", daemon=True)
        self._writer.start()

    def serve(self, descriptor: int, *, again: bool) -> None:
        """Take over a link; the one before it is closed. `again`: a gate that died had it.

        RuntimeError when there is no thread to be had. The link is closed then.
        """
        link = socket.socket(fileno=descriptor)
        link.setblocking(True)
        receiver = threading.Thread(target=self._receive, args=(link,), name="agent-link", daemon=True)
        try:
            receiver.start()
        except RuntimeError:
            link.close()
            raise
        self._end_link()
        self._link, self._receiver = link, receiver
        if again:
            self._answer(link, gate_link.AGAIN, 0)

    def close(self) -> None:
        """End the link and the writing; a notification that waits in the kernel is not waited for."""
        self._end_link()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
            self._writer.join(END_S)
        if self._receiver is not None:
            self._receiver.join(END_S)

    def _receive(self, link: socket.socket) -> None:
        while True:
            try:
                message = link.recv(gate_link.MOST_MESSAGE_BYTES + 1)
            except OSError:
                message = b""
            if not message:
                break
            try:
                request = gate_link.decode(message)
            except gate_link.BadLinkMessage as exc:
                # No id to answer to: the agent's call ends with its time-out.
                self._log.error("message of the agent refused", why=str(exc))
                continue
            if request.kind == gate_link.STATUS:
                self._answer(link, request.id, 0, json.dumps(self._status()).encode())
            elif request.kind == gate_link.TAKE_OPENED:
                most = min(request.length, gate_link.MOST_OPENED)
                blocks = self._learned.take_unseen(most)
                self._answer(link, request.id, 0, b"".join(gate_link.OPENED.pack(*block) for block in blocks))
            else:
                self._queue.put((link, request))
        link.close()

    def _write_all(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            link, request = entry
            number = self.notify(request)
            self.counts["pushes" if not number else "pushes_refused"] += 1
            if request.kind == gate_link.STORE and not number:
                self.counts["stored_bytes"] += len(request.payload)
            self._answer(link, request.id, number)

    def notify(self, request: gate_link.LinkRequest) -> int:
        """Write one notification; the errno: 0 taken, ENOSPC or EOPNOTSUPP for pages that are not pushed."""
        parts: list[bytes]
        if request.kind == gate_link.INVALIDATE_INODE:
            if request.offset >= 0:
                self._learned.forget(request.inode)
            parts = [wire.inval_inode(request.inode, request.offset, request.length)]
        elif request.kind == gate_link.INVALIDATE_ENTRY:
            parts = [wire.inval_entry(request.inode, request.payload)]
        elif self._room is None:
            return errno.EOPNOTSUPP
        elif not self._room.has_room():
            return errno.ENOSPC
        else:
            parts = [wire.store_header(request.inode, request.offset, len(request.payload)), request.payload]
        if request.kind == gate_link.INVALIDATE_ENTRY:
            self._wait_answered(_IN_FOLDER, request.inode)
        elif request.offset >= 0:
            self._wait_answered(_READS, request.inode)
        try:
            os.writev(self._device, parts)
        except OSError as exc:
            return exc.errno or errno.EIO
        return 0

    def _answer(self, link: socket.socket, number: int, refusal: int, payload: bytes = b"") -> None:
        try:
            link.sendmsg([gate_link.ANSWER.pack(number, refusal), payload])
        except OSError as exc:
            self._log.warning("the agent gets no answer", why=exc.strerror)

    def _end_link(self) -> None:
        """Its thread closes it."""
        if self._link is not None:
            with contextlib.suppress(OSError):  # the agent was first
                self._link.shutdown(socket.SHUT_RDWR)
