"""How each open inode is read, from its first OPEN to its last RELEASE. Pure: works on a buffer, the time is given.

The kernel refuses (EIO) an ordinary open while a passthrough one lives, even if only a mapping is left of it, and the
other way round; so is another backing id for the same inode. So the first OPEN decides, every later one is answered
alike, and a file that is gone or incomplete meanwhile keeps its inode's mode.

Registering a backing file costs 24 us, so an inode's backing id is kept for CLOSED_S after its last RELEASE, and given
back then (an evicted block's space is not free before). At most MOST_CLOSED of them are kept.

The table lies in a memfd that the supervisor keeps: a gate that starts again goes on with it. Each change is written
before the kernel sees the answer. A request that was applied but not answered when the gate died comes again, with
bit 63 of its unique set (FUSE_NOTIFY_RESEND): the head of the table has the unique that was applied last, so that
nothing is counted twice. Without RESEND an open that was applied and not answered stays counted: one inode's file may
then stay registered until the mount ends.

    head   magic, rows ever used, unique applied last
    row    inode, backing id, mode (0 free, 1 ordinary, 2 passthrough), opens, superseded, time of the last RELEASE

What backs an inode that was invalidated is another version's: as long as it is open nothing can be done (see above),
but with its last RELEASE it goes at once.

Does not register anything and does not talk to the kernel.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Final

from fusecache.kernel import wire

HEAD_BYTES: Final = 64
MOST_ROWS: Final = 1 << 20
"""Inodes open at once; the memfd is sparse, only rows in use take memory (32 MiB when all are)."""
TABLE_BYTES: Final = HEAD_BYTES + MOST_ROWS * 32
CLOSED_S: Final = 60.0
MOST_CLOSED: Final = 16_384

FREE: Final = 0
ORDINARY: Final = 1
PASSTHROUGH: Final = 2

_MAGIC: Final = 0x31304E45504F4323
_HEAD = struct.Struct("<QQQ")
_ROW = struct.Struct("<QiIIId")
_UNIQUE_AT: Final = 16
_USED_AT: Final = 8
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_OPENS_AT: Final = 16
_SUPERSEDED_AT: Final = 20
_CLOSED_AT: Final = 24


class TableFull(Exception):
    """More inodes are open than the table has rows."""


class Row:
    """One inode of the table."""

    __slots__ = ("at", "backing_id", "inode", "mode", "opens", "superseded")

    def __init__(self, at: int, inode: int, mode: int, backing_id: int, opens: int, superseded: bool = False) -> None:
        self.at = at
        self.inode = inode
        self.mode = mode
        self.backing_id = backing_id
        self.opens = opens
        self.superseded = superseded


class OpenTable:
    """Inode -> how it is read. `buffer` is writable, zeroed or a table, a head and any number of rows long."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        """Raises ValueError for a buffer that is neither zeroed nor a table."""
        self._buffer = memoryview(buffer)
        self._capacity = (len(self._buffer) - HEAD_BYTES) // _ROW.size
        if self._capacity < 1:
            raise ValueError(f"an open table of {len(self._buffer)} bytes")
        self.rows: dict[int, Row] = {}
        self.closed: OrderedDict[int, float] = OrderedDict()
        """Inodes with a backing id and no open -> time of the last RELEASE; oldest first."""
        self._free: list[int] = []
        magic, self._used, self._applied = _HEAD.unpack_from(self._buffer)
        if not magic:
            _HEAD.pack_into(self._buffer, 0, _MAGIC, 0, 0)
            self._used = self._applied = 0
        elif magic != _MAGIC or self._used > self._capacity:
            raise ValueError(f"not an open table: magic {magic:#x}, {self._used} rows of {self._capacity}")
        else:
            self._load()

    def _load(self) -> None:
        closed = []
        for at in range(HEAD_BYTES, HEAD_BYTES + self._used * _ROW.size, _ROW.size):
            inode, backing_id, mode, opens, superseded, closed_at_s = _ROW.unpack_from(self._buffer, at)
            kept = mode == PASSTHROUGH or (mode == ORDINARY and opens)
            if not kept or inode in self.rows:
                self._free.append(at)
                continue
            self.rows[inode] = Row(at, inode, mode, backing_id, opens, bool(superseded))
            if not opens:
                closed.append((closed_at_s, inode))
        self._free.reverse()  # lowest first
        for closed_at_s, inode in sorted(closed):
            self.closed[inode] = closed_at_s

    def was_applied(self, unique: int) -> bool:
        """Whether a request that comes again has already been counted."""
        return bool(unique & wire.RESEND_BIT) and unique & ~wire.RESEND_BIT == self._applied

    def open(self, row: Row, unique: int) -> None:
        """One more open of a known inode."""
        if row.opens == 0:
            self.closed.pop(row.inode, None)
        row.opens += 1
        self._applied = unique & ~wire.RESEND_BIT
        _U64.pack_into(self._buffer, _UNIQUE_AT, self._applied)
        _U32.pack_into(self._buffer, row.at + _OPENS_AT, row.opens)

    def first_open(self, inode: int, mode: int, backing_id: int, unique: int) -> Row:
        """Decide how an inode is read. It must not be in the table. Raises TableFull."""
        if self._free:
            at = self._free.pop()
        elif self._used < self._capacity:
            at = HEAD_BYTES + self._used * _ROW.size
            self._used += 1
            _U64.pack_into(self._buffer, _USED_AT, self._used)
        else:
            raise TableFull(f"{self._capacity} inodes are open")
        row = self.rows[inode] = Row(at, inode, mode, backing_id, 1)
        self._applied = unique & ~wire.RESEND_BIT
        _U64.pack_into(self._buffer, _UNIQUE_AT, self._applied)
        _ROW.pack_into(self._buffer, at, inode, backing_id, mode, 1, 0, 0.0)
        return row

    def release(self, inode: int, unique: int, now_s: float) -> int | None:
        """One open less. A backing id to be given back to the kernel now: the last open of a superseded file.

        An inode that the table does not know is none of its business.
        """
        row = self.rows.get(inode)
        if row is None or not row.opens:
            return None
        row.opens -= 1
        self._applied = unique & ~wire.RESEND_BIT
        _U64.pack_into(self._buffer, _UNIQUE_AT, self._applied)
        if row.opens:
            _U32.pack_into(self._buffer, row.at + _OPENS_AT, row.opens)
        elif row.mode == PASSTHROUGH and not row.superseded:
            _U32.pack_into(self._buffer, row.at + _OPENS_AT, 0)
            _F64.pack_into(self._buffer, row.at + _CLOSED_AT, now_s)
            self.closed[inode] = now_s
        else:
            self._remove(row)
            return row.backing_id if row.mode == PASSTHROUGH else None
        return None

    def supersede(self, inode: int) -> int | None:
        """What backs the inode is another version's: a backing id to be given back to the kernel now, or None."""
        row = self.rows.get(inode)
        if row is None or row.mode != PASSTHROUGH:
            return None
        if row.opens:
            row.superseded = True
            _U32.pack_into(self._buffer, row.at + _SUPERSEDED_AT, 1)
            return None
        self._remove(row)
        return row.backing_id

    def expired(self, now_s: float) -> list[int]:
        """Backing ids to be given back to the kernel: closed for too long, or too many. They leave the table."""
        ids = []
        while self.closed:
            inode, closed_at_s = next(iter(self.closed.items()))
            if now_s - closed_at_s < CLOSED_S and len(self.closed) <= MOST_CLOSED:
                break
            row = self.rows[inode]
            self._remove(row)
            ids.append(row.backing_id)
        return ids

    def _remove(self, row: Row) -> None:
        del self.rows[row.inode]
        self.closed.pop(row.inode, None)
        _ROW.pack_into(self._buffer, row.at, 0, 0, FREE, 0, 0, 0.0)
        self._free.append(row.at)
