"""The handlers of a worker behind the gate: what differs when nobody says that a file was opened or closed.

    OPEN      in `passthrough` mode only, and only the first one of an inode that the gate does not know: the handler
              offers the block file that is the whole file, and the gate answers the kernel
    READ      fh is the inode; the bytes go into a slot of shared memory, and the answer is the slot's token. A block
              file that is the whole file is offered as well: the gate then answers further READs from it by itself
    RELEASE   never comes: readers are kept in order of use (`Readers.keep`)

Everything else is `operations`'. `.fusecache` files have no handle either, so each READ makes their content anew; they
show a size (the kernel sends no READ past the size) and an answer that is shorter ends the file.

Sends no descriptor and knows no socket: slots and offers are given.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import trio
from pyfuse3 import FileHandleT, FileInfo, FUSEError, InodeT, RequestContext

from fusecache.cache.record import Entry
from fusecache.errors import FusecacheError, StaleId
from fusecache.fs.guard import served
from fusecache.fs.hidden_folder import FOLDER_INODE
from fusecache.fs.operations import Operations
from fusecache.prefetch.open_blocks import OpenBlock
from fusecache.prefetch.reader import FileReader

HIDDEN_FILE_BYTES = 128 << 10
"""Size shown of `.fusecache` files: the smallest request that the kernel may be told to keep to, so that one READ has
a file's whole content."""

SLOT_WAIT_S = 10.0
SLOT_POLL_S = 0.002


class Slot(Protocol):
    """Shared memory for one answer."""

    @property
    def view(self) -> memoryview:
        """Writable, as long as asked for."""
        ...


_S = TypeVar("_S", bound=Slot)


class ReplySlots(Protocol[_S]):
    """What is used of `kernel.reply_slots.WorkerSlots`."""

    def take(self, size: int) -> _S | None:
        """A free slot for `size` bytes; None when all are taken."""
        ...

    def token(self, slot: _S, length: int) -> bytes:
        """The answer that stands for the first `length` bytes of the slot."""
        ...

    def give_back(self, slot: _S) -> None:
        """No answer will name the slot."""
        ...


Offer = Callable[[Entry, int, OpenBlock], bool]
"""Offers the file of a block (index) as what backs it, when its version is confirmed; never waits. False: not yet."""

OFFER_AGAIN_S = 10.0
"""READs of a block that still come to a worker this long after it was offered have it offered again."""


class GatedOperations(Operations, Generic[_S]):
    """One worker's handlers."""

    def __init__(
        self,
        *arguments: Any,
        slots: ReplySlots[_S],
        offer: Offer,
        hidden_content: Callable[[bytes], Awaitable[bytes]],
        **keywords: Any,
    ) -> None:
        """As `Operations`; `hidden_content` gives the content of a `.fusecache` file by name."""
        super().__init__(*arguments, **keywords)
        self._slots = slots
        self._offer = offer
        self._hidden_content = hidden_content

    @served
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        """OPEN: checked as everywhere; the reader is kept for the READs that follow, or the block file is offered."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EROFS)
        if inode == FOLDER_INODE:
            raise FUSEError(errno.EISDIR)
        if inode > FOLDER_INODE:
            self._hidden.attributes(inode)  # ESTALE when it is none
            return FileInfo(fh=FileHandleT(inode), keep_cache=False)
        entry = await self._entry(inode)
        if entry.folder:
            raise FUSEError(errno.EISDIR)
        reader = self._readers.keep(entry)
        if entry.block_count == 1:
            reader.offer_again_s.clear()  # it came here, so the gate does not know the file (any more)
            self._offer_block(reader, 0)
        return FileInfo(fh=FileHandleT(inode), keep_cache=True)

    @served
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """READ: exactly the bytes asked for, fewer only at the end of the file, as a slot's token."""
        while True:
            reader = self._readers.kept(fh)
            if reader is None:
                if fh >= FOLDER_INODE:
                    return await self._answer(await self._hidden_bytes(fh, off, size), size)
                reader = await self._reader_of(fh)
            slot = self._slots.take(size)
            if slot is not None:
                break
            await self._wait_for_slot(size)  # the reader may be closed meanwhile
        self._readers.buffer = slot.view
        data = reader.hot_read(off, size)
        if data is not None:
            self._offer_block(reader, off)
            return self._slots.token(slot, len(data))
        self._slots.give_back(slot)  # the bytes may be long in coming
        try:
            found = await reader.read(off, size)
        except FusecacheError as error:
            if isinstance(error, StaleId) or self._tree.superseded(fh):
                await self._on_stale_read(fh)
                raise StaleId(f"file id {fh - 1} was replaced") from error
            raise
        return await self._answer(found, size)

    def _offer_block(self, reader: FileReader, offset: int) -> None:
        """Offer the block file that a READ was answered from, so that the next READ need not come here."""
        entry = reader.entry
        index = offset // entry.block_size
        now_s = time.monotonic()
        if index >= entry.block_count or reader.offer_again_s.get(index, 0.0) > now_s:
            return
        opened = reader.block_file(index)
        if opened is None:
            return
        if opened.written_ns is not None:
            reader.offer_again_s[index] = math.inf
        elif self._offer(entry, index, opened):
            # READs that come here still: it was refused, or the gate is another one.
            reader.offer_again_s[index] = now_s + OFFER_AGAIN_S

    async def _reader_of(self, inode: int) -> FileReader:
        """The reader of a file that the kernel reads without an OPEN."""
        try:
            entry = await self._entry(inode)
        except StaleId:
            await self._on_stale_read(inode)
            raise
        if entry.folder:
            raise FUSEError(errno.EISDIR)
        return self._readers.keep(entry)

    async def _hidden_bytes(self, inode: int, offset: int, size: int) -> bytes:
        name = self._hidden.name_of(inode)
        if name is None:
            raise FUSEError(errno.EISDIR if inode == FOLDER_INODE else errno.ESTALE)
        content = await self._hidden_content(name)
        return content[offset : min(offset + size, HIDDEN_FILE_BYTES)]

    async def _answer(self, data: bytes | memoryview, size: int) -> bytes:
        slot = self._slots.take(size)
        while slot is None:
            data = bytes(data)  # a view is good until somebody else reads
            await self._wait_for_slot(size)
            slot = self._slots.take(size)
        slot.view[: len(data)] = data
        return self._slots.token(slot, len(data))

    async def _wait_for_slot(self, size: int) -> None:
        """Until one is free. The gate counts requests, but not those of a gate that died just before it began."""
        for _ in range(int(SLOT_WAIT_S / SLOT_POLL_S)):
            await trio.sleep(SLOT_POLL_S)
            slot = self._slots.take(size)
            if slot is not None:
                self._slots.give_back(slot)
                return
        raise RuntimeError(f"no slot was free for {SLOT_WAIT_S:.0f} s: the gate has lost some")
