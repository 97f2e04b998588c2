"""READ data on its way from a worker to the kernel: shared memory instead of the socket.

A worker takes a free slot of its memfd, lets the file's bytes be read into it (`os.preadv` into the view: no copy in
Python) and answers the READ with a 16-byte token. The gate finds the slot by the token, writes header and slot bytes
to the kernel in one `writev`, and frees the slot. A 1 MiB message through the socket would be a 1 MiB kernel
allocation that fails on fragmented nodes, and would need CAP_NET_ADMIN for its buffer.

The memfd: one page of head (magic, slots, bytes a slot; then one state byte a slot, then one use byte a slot), then the
slots. The worker marks a slot as its own, the gate marks it as the gate's when it has found it by a token, and frees
it; whoever holds the slot may touch its bytes. Sealed against resizing, so that no worker can make the gate fault on a
mapping that ended. A dead worker's memfd dies with it: the next one gets a fresh one. A dead gate's slots are freed by
the next gate.

A gate that dies between taking an answer from the socket and marking its slot takes the slot along. So a worker that
has none left takes back what it told LOST_S ago, if the gate has left nothing in its socket: a gate that lives marks
within microseconds. Should it have been stopped just there, it finds another use of the slot than the token names, and
reads nothing: the worker counts a use each time it takes a slot.

A worker never has more requests than slots (`kernel.gate.in_flight` counts), so that one always finds a free slot;
after a gate's death it may have those of two gates, and has to wait for a moment.

Does not send or receive anything.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

HEAD_BYTES = mmap.PAGESIZE
MOST_SLOTS = 1024
"""States and uses lie in the head page."""
MOST_SLOT_BYTES = 16 << 20

_HEAD = struct.Struct("<QII")
_MAGIC = 0x31544F4C53434623
_BUSY_AT = 64
_USES_AT = _BUSY_AT + MOST_SLOTS
_FREE, _WORKERS, _GATES = 0, 1, 2
"""States of a slot."""
_TOKEN = struct.Struct("<QHHI")
"""magic, slot, use, length."""
_TOKEN_MAGIC = 0x324E454B4F544623
TOKEN_BYTES = _TOKEN.size
LOST_S = 5.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class BadSlots(Exception):
    """The memfd is not what `create_slots` makes."""


class BadToken(Exception):
    """A worker's token names no slot that it may name, or more bytes than were asked for."""


class Slot(NamedTuple):
    """A slot taken by a worker."""

    number: int
    view: memoryview
    """Writable; exactly as long as was asked for."""


def create_slots(count: int, slot_bytes: int, name: str = "fusecache slots") -> int:
    """A new memfd (close-on-exec) for one worker and the gate; pages are only allocated when first written. OSError."""
    if not 0 < count <= MOST_SLOTS or not 0 < slot_bytes <= MOST_SLOT_BYTES or slot_bytes % mmap.PAGESIZE:
        raise ValueError(f"{count} slots of {slot_bytes} bytes")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, HEAD_BYTES + count * slot_bytes)
        os.pwrite(descriptor, _HEAD.pack(_MAGIC, count, slot_bytes), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:  # no memory left: it is tried again and again
        os.close(descriptor)
        raise
    return descriptor


class _SharedSlots:
    """The mapping, as both sides see it. The head is read once: what a worker writes there later changes nothing."""

    def __init__(self, descriptor: int) -> None:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise BadSlots(f"no memfd: {exc.strerror}") from exc
        if seals & _SEALS != _SEALS:
            raise BadSlots("can still be resized")
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _HEAD.size, 0)
        magic, count, slot_bytes = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)
        if magic != _MAGIC or not 0 < count <= MOST_SLOTS or size != HEAD_BYTES + count * slot_bytes:
            raise BadSlots(f"{size} bytes with a head of {count} slots of {slot_bytes} bytes")
        self.count: int = count
        self.slot_bytes: int = slot_bytes
        self._mapping = mmap.mmap(descriptor, size)
        whole = memoryview(self._mapping)
        self._busy = whole[_BUSY_AT : _BUSY_AT + count]
        self._uses = whole[_USES_AT : _USES_AT + count]
        starts = range(HEAD_BYTES, size, slot_bytes)
        self._views = [whole[start : start + slot_bytes] for start in starts]
        self._whole = whole

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return self.count - bytes(self._busy).count(0)

    def close(self) -> None:
        """Unmap. Views handed out must be gone: raises BufferError otherwise."""
        for view in (*self._views, self._busy, self._uses, self._whole):
            view.release()
        self._mapping.close()


class WorkerSlots(_SharedSlots):
    """The worker's side. One thread at a time."""

    def __init__(
        self,
        descriptor: int,
        is_all_taken: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_all_taken`: whether the gate has taken every answer that was sent out of the socket."""
        super().__init__(descriptor)
        self._is_all_taken = is_all_taken
        self._clock = clock
        self._told_at_s: dict[int, float] = {}
        """Slots that a token names -> since when."""

    def take(self, size: int) -> Slot | None:
        """A free slot to be filled with at most `size` bytes; None when all are busy.

        The lowest free one, so that a quiet worker writes the same, cached pages again and again.
        Raises ValueError when `size` is more than a slot has: the mount's max_read forbids such a READ.
        """
        if size > self.slot_bytes:
            raise ValueError(f"a READ of {size} bytes, slots have {self.slot_bytes}")
        found = self._find_free()
        if found < 0 and self._take_lost_back():
            found = self._find_free()
        if found < 0:
            return None
        index = found - _BUSY_AT
        self._told_at_s.pop(index, None)
        self._uses[index] = (self._uses[index] + 1) & 0xFF
        self._busy[index] = _WORKERS
        return Slot(index, self._views[index][:size])

    def token(self, slot: Slot, length: int) -> bytes:
        """What the READ is answered with: the first `length` bytes of the slot, which is the gate's from now on."""
        if length > len(slot.view):
            raise ValueError(f"{length} bytes in a slot of {len(slot.view)}")
        self._told_at_s[slot.number] = self._clock()
        return _TOKEN.pack(_TOKEN_MAGIC, slot.number, self._uses[slot.number], length)

    def give_back(self, slot: Slot) -> None:
        """The READ failed: no token of this slot will be sent."""
        self._busy[slot.number] = _FREE

    def _find_free(self) -> int:
        return self._mapping.find(b"\0", _BUSY_AT, _BUSY_AT + self.count)

    def _take_lost_back(self) -> bool:
        """Free what gates that died had not marked; whether there was any."""
        before_s = self._clock() - LOST_S
        lost = [
            number
            for number, told_at_s in self._told_at_s.items()
            if told_at_s <= before_s and self._busy[number] == _WORKERS
        ]
        if not lost or not self._is_all_taken():
            return False
        for number in lost:
            self._busy[number] = _FREE
        return True


class GateSlots(_SharedSlots):
    """The gate's side of one worker's slots."""

    def bytes_of(self, token: bytes | memoryview, requested: int) -> tuple[int, memoryview]:
        """(slot, its bytes) for a READ of `requested` bytes. Raises BadToken for anything a worker may not answer.

        A slot that is not marked busy, or busy with another use, is refused: its bytes belong to another answer.
        """
        if len(token) != TOKEN_BYTES:
            raise BadToken(f"{len(token)} bytes instead of a token")
        magic, index, use, length = _TOKEN.unpack(token)
        if magic != _TOKEN_MAGIC or index >= self.count:
            raise BadToken(f"slot {index} of {self.count}")
        if length > requested or length > self.slot_bytes:
            raise BadToken(f"{length} bytes for a READ of {requested}")
        if not self._busy[index]:
            raise BadToken(f"slot {index} is free")
        self._busy[index] = _GATES
        if self._uses[index] != use:  # asked now: before it is the gate's, the worker may still take it back
            raise BadToken(f"slot {index} has another answer by now")
        return index, self._views[index][:length]

    def slot_of(self, token: bytes | memoryview) -> int | None:
        """The slot that a token names, whatever else is wrong with it; None when it names none, or another use."""
        if len(token) != TOKEN_BYTES:
            return None
        magic, index, use, _ = _TOKEN.unpack(token)
        return index if magic == _TOKEN_MAGIC and index < self.count and self._uses[index] == use else None

    def free(self, index: int) -> None:
        """The kernel has the bytes, or nobody wants them any more."""
        self._busy[index] = _FREE

    def free_taken(self) -> None:
        """Free what a gate that died had taken."""
        for index, state in enumerate(bytes(self._busy)):
            if state == _GATES:
                self._busy[index] = _FREE
