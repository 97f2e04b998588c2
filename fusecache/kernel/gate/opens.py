"""OPEN and RELEASE in passthrough mode: what the gate answers by itself, and what it makes of a worker's answer.

An inode that is open, or was a moment ago, is opened again as it is. One that was learned is registered without a
worker. For the others a worker is asked: it may have offered a descriptor before it answers, which the kernel then
reads; without an offer that stands the checks, reads go to the workers (an ordinary open). RELEASE is always answered
here; workers never see one.

Wires the table (`open_table`), the registry (`backing`) and the offers (`kernel.offers`); sends nothing.
"""

from __future__ import annotations

import errno
from typing import Final

from fusecache.kernel import wire
from fusecache.kernel.gate import open_table
from fusecache.kernel.gate.backing import Backing
from fusecache.kernel.gate.in_flight import Request
from fusecache.kernel.gate.open_table import OpenTable, TableFull
from fusecache.kernel.offers import OfferReceiver, close_all

EXPIRE_EVERY_S: Final = 1.0


class Opens:
    """The opens of one connection."""

    def __init__(self, table: OpenTable, backing: Backing) -> None:
        self.table = table
        self.backing = backing
        self.learned = backing.learned
        self.learned.on_forgotten = self._supersede
        self.counts = {"passthrough_new": 0, "passthrough_learned": 0, "passthrough_known": 0, "ordinary": 0}
        self._expire_at_s = 0.0

    def answer_alone(self, unique: int, inode: int) -> bytes | None:
        """The answer to an OPEN; None when a worker must be asked."""
        if self.learned.has_forgotten:
            self.learned.settle_forgotten()
        table = self.table
        row = table.rows.get(inode)
        if row is not None:
            if row.mode != open_table.PASSTHROUGH:
                return None
            if not table.was_applied(unique):
                table.open(row, unique)
            self.counts["passthrough_known"] += 1
        else:
            backing_id = self.backing.register_learned(inode)
            if backing_id is None:
                return None
            try:
                row = table.first_open(inode, open_table.PASSTHROUGH, backing_id, unique)
            except TableFull:
                self.backing.unregister(backing_id)
                return wire.error_answer(unique, errno.ENFILE)
            self.counts["passthrough_learned"] += 1
        self.learned.note_unseen(inode)
        return wire.passthrough_answer(unique, row.backing_id)

    def answer_with(self, answer: bytes | memoryview, request: Request, offers: OfferReceiver) -> bytes:
        """What the kernel gets for a worker's (good) answer to an OPEN. Raises wire.BadMessage when it is none.

        An offer counts for nothing when the inode was invalidated after the worker was asked: it may be of the version
        before, and would be learned.
        """
        unique, inode = request.unique, request.inode
        ordinary = wire.ordinary_open_answer(answer)
        if self.learned.has_forgotten:
            self.learned.settle_forgotten()
        table = self.table
        taken = offers.take(inode)
        offered = next((offer for offer in reversed(taken) if not offer.block_bytes), None)
        try:
            row = table.rows.get(inode)
            if row is not None:
                if not table.was_applied(unique):
                    table.open(row, unique)
            else:
                backing_id = None
                if offered is not None:
                    backing_id = self.backing.register_offer(inode, offered, request.taken_at_s)
                mode = open_table.ORDINARY if backing_id is None else open_table.PASSTHROUGH
                try:
                    row = table.first_open(inode, mode, backing_id or 0, unique)
                except TableFull:
                    if backing_id is not None:
                        self.backing.unregister(backing_id)
                    return wire.error_answer(unique, errno.ENFILE)
        finally:
            close_all(taken)
        if row.mode == open_table.PASSTHROUGH:
            self.counts["passthrough_new"] += 1
            return wire.passthrough_answer(unique, row.backing_id)
        self.counts["ordinary"] += 1
        return ordinary

    def release(self, unique: int, inode: int, now_s: float) -> None:
        """A RELEASE; also an OPEN whose answer the kernel did not take, because no RELEASE follows that."""
        if self.learned.has_forgotten:
            self.learned.settle_forgotten()
        if not self.table.was_applied(unique):
            backing_id = self.table.release(inode, unique, now_s)
            if backing_id is not None:
                self.backing.unregister(backing_id)

    def look_around(self, now_s: float) -> None:
        """Give back the backing ids that are due."""
        if self.learned.has_forgotten:
            self.learned.settle_forgotten()
        if now_s >= self._expire_at_s:
            self._expire_at_s = now_s + EXPIRE_EVERY_S
            for backing_id in self.table.expired(now_s):
                self.backing.unregister(backing_id)

    @property
    def has_closed(self) -> bool:
        """Whether `look_around` will have something to do, without any message."""
        return bool(self.table.closed or self.learned.has_forgotten)

    def _supersede(self, inode: int) -> None:
        backing_id = self.table.supersede(inode)
        if backing_id is not None:
            self.backing.unregister(backing_id)
