"""What the writer of the metadata tells its readers without a message: one small shared memory, the *board*.

One process (the agent) owns the tree and writes the store; others (the workers) read the same store and answer from
what they read until told that it changed. Telling them must cost a request nothing:

    epoch    a counter; moved after every change that a reader could see. Equal to last time = nothing happened
             (about 40 ns), else the reader looks at its folders again, each when it is used.
    notice   which store is in use now, and the mounted folder's entry, which lies in no listing.
    marks    a bit per hash for everything that is known in the writer's memory only (`cache.overlay`): the folder,
             (folder, name) and inode of each loose entry. A set bit means "ask"; a wrong one (two things with one
             hash) costs a question, never an answer.

The memory is a memfd whose first eight bytes are the epoch, and the next eight the number of marks. Of two slots the
epoch's lowest bit says which one holds the notice, so a writer that dies half-way leaves the last one whole. Marks are
set before the epoch moves.

It carries no listing and decides nothing about freshness.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import struct
import zlib
from contextlib import suppress
from typing import Final, NamedTuple

from fusecache.cache.record import Entry, RecordError, decode, encode
from fusecache.errors import StateError

_PAGE: Final = 4096
_SLOTS_AT: Final = _PAGE
_SLOT_BYTES: Final = 2 * _PAGE
_MARKS_AT: Final = _SLOTS_AT + 2 * _SLOT_BYTES
_MARK_BITS: Final = 1 << 19
"""With the 49,152 marks of a full overlay one question in eleven is asked in vain, with a hundred one in 5,000."""

BOARD_BYTES: Final = _MARKS_AT + _MARK_BITS // 8
"""Size of the memory (86,016)."""

_HEAD: Final = struct.Struct("<II")
"""Of a slot: bytes of the notice, and their CRC-32."""

_ID: Final = struct.Struct("<Q")
_ROOT: Final = 1
_READ_TRIES: Final = 64


class StoreIdentity(NamedTuple):
    """Which tables of which file a reader has to open."""

    folder: str
    namespace: str
    map_bytes: int
    device: int
    file_inode: int
    """Another number under the same name: the file was dropped and made anew."""


class Notice(NamedTuple):
    """What the writer says of itself."""

    store: StoreIdentity
    root: Entry | None
    """The mounted folder; None before it was resolved."""
    root_asked_at: float
    """CLOCK_BOOTTIME when it was asked for."""


def folder_mark(folder: int) -> int:
    """Mark of a folder of which something is in the writer's memory only."""
    return zlib.crc32(b"f" + _ID.pack(folder)) % _MARK_BITS


def name_mark(folder: int, name: bytes) -> int:
    """Mark of a name that the writer knows better than the store."""
    return zlib.crc32(name, zlib.crc32(b"n" + _ID.pack(folder))) % _MARK_BITS


def inode_mark(inode: int) -> int:
    """Mark of an inode that the writer knows better than the store."""
    return zlib.crc32(b"i" + _ID.pack(inode)) % _MARK_BITS


class _Mapped:
    """The memory, sized by whoever comes first."""

    def __init__(self, descriptor: int, *, write: bool) -> None:
        """`descriptor` stays the caller's. Raises StateError."""
        try:
            if os.fstat(descriptor).st_size < BOARD_BYTES:
                os.ftruncate(descriptor, BOARD_BYTES)
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            self._map = mmap.mmap(descriptor, BOARD_BYTES, access=access)
        except (OSError, ValueError) as exc:
            raise StateError(f"the shared memory for metadata can't be used: {exc}") from exc
        self._view = memoryview(self._map)
        self._last: tuple[bytes, Notice] | None = None
        """The last notice read, as text and understood."""
        self.epoch: Final[memoryview[int]] = self._view[:8].cast("Q")
        """One element: the counter. Machines that run this are little-endian, as the number is."""
        self.marks: Final[memoryview[int]] = self._view[8:16].cast("Q")
        """One element: how many bits are set. Nearly always none, and then nobody has to hash anything."""

    def close(self) -> None:
        """Unmap. Idempotent."""
        self.epoch.release()
        self.marks.release()
        self._view.release()
        self._map.close()

    def _slot_at(self, epoch: int) -> int:
        return _SLOTS_AT + (epoch & 1) * _SLOT_BYTES

    def _notice(self) -> Notice | None:
        for _ in range(_READ_TRIES):
            epoch = self.epoch[0]
            at = self._slot_at(epoch)
            size_bytes, checksum = _HEAD.unpack_from(self._map, at)
            if size_bytes == 0:
                return None
            text = bytes(self._view[at + _HEAD.size : at + _HEAD.size + min(size_bytes, _SLOT_BYTES - _HEAD.size)])
            if self._last is not None and self._last[0] == text:
                return self._last[1]  # nearly always: a listing moves the epoch and says nothing new
            if self.epoch[0] == epoch and zlib.crc32(text) == checksum:
                self._last = text, _unpacked(text)
                return self._last[1]
        raise StateError("the shared memory for metadata is written faster than it can be read, or is damaged")


class BoardWriter(_Mapped):
    """The writer's side: one process at a time, event loop only."""

    def __init__(self, descriptor: int) -> None:
        """Go on with the epoch and the notice of the writer before; its marks died with its memory."""
        super().__init__(descriptor, write=True)
        self._counts: dict[int, int] = {}
        self._view[_MARKS_AT:] = bytes(_MARK_BITS // 8)
        self.marks[0] = 0
        self.before: Notice | None = None
        """What the writer before said last."""
        with suppress(StateError):  # damaged: as if nothing had been said
            self.before = self._notice()
        at = self._slot_at(self.epoch[0])
        self._slot = bytes(self._view[at : at + _SLOT_BYTES])
        self.bump()

    def bump(self) -> None:
        """Something that a reader could see has changed."""
        epoch = self.epoch[0] + 1
        at = self._slot_at(epoch)
        self._view[at : at + len(self._slot)] = self._slot
        self.epoch[0] = epoch

    def publish(self, store: StoreIdentity, root: Entry | None, root_asked_at: float) -> None:
        """Say which store is in use, and what the mounted folder is; moves the epoch.

        A root that does not fit (a path of kilobytes) is left out: readers ask for it.
        """
        slot = _packed(store, root, root_asked_at)
        if len(slot) > _SLOT_BYTES:
            slot = _packed(store, None, root_asked_at)
        if len(slot) > _SLOT_BYTES:
            raise StateError("the path of the metadata store is too long to be told to readers")
        self._slot = slot
        self.bump()

    def mark(self, mark: int) -> None:
        """Set a bit; what is marked twice has to be unmarked twice."""
        count = self._counts[mark] = self._counts.get(mark, 0) + 1
        if count == 1:
            self._view[_MARKS_AT + (mark >> 3)] |= 1 << (mark & 7)
            self.marks[0] += 1

    def unmark(self, mark: int) -> None:
        """Clear a bit when nothing else has it."""
        count = self._counts[mark] - 1
        if count:
            self._counts[mark] = count
        else:
            del self._counts[mark]
            self._view[_MARKS_AT + (mark >> 3)] &= ~(1 << (mark & 7)) & 0xFF
            self.marks[0] -= 1


class BoardReader(_Mapped):
    """A reader's side."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, write=False)

    def read(self) -> Notice | None:
        """The notice; None before the first one. Raises StateError when there is no whole one."""
        return self._notice()

    def marked(self, mark: int) -> bool:
        """Whether the writer's memory may know better."""
        return bool(self._view[_MARKS_AT + (mark >> 3)] >> (mark & 7) & 1)


def _packed(store: StoreIdentity, root: Entry | None, root_asked_at: float) -> bytes:
    record = None
    if root is not None:
        try:
            record = base64.b64encode(encode(root)).decode()
        except RecordError:
            record = None  # readers ask for it, and are told what is wrong with it
    text = json.dumps({"store": store, "root": record, "root_asked_at": root_asked_at}).encode()
    return _HEAD.pack(len(text), zlib.crc32(text)) + text


def _unpacked(text: bytes) -> Notice:
    """The CRC says that the writer wrote it, so it has the writer's form."""
    told = json.loads(text)
    record = told["root"]
    root = None if record is None else decode(_ROOT, _ROOT, base64.b64decode(record))
    return Notice(StoreIdentity(*told["store"]), root, told["root_asked_at"])
