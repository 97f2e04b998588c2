"""A read(2) on its way to the nearest bytes: `FileReader` per open file, `Readers` for all of them.

    hot_read    local block file, bytes in the page cache (preadv2 RWF_NOWAIT): answered inline on the event loop,
                tens of microseconds, no thread, no lock, no allocation but the reply's view
    read        the same file when its bytes must come from the disk (a thread of the data pool)
                -> this node's block worker, whose folder is learned (OpenLocalBlock), once
                -> block workers that hold the block -> the under storage through one of them (`Fetcher`)

One source's failure means the next source. A read inside the file returns exactly its bytes or raises; a read past
the end returns what is left. An id that is known to be replaced is never read from the under storage.

Everything but the thread functions runs on the event loop. Knows no FUSE request and decides no errno.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from typing import Protocol

import structlog
import trio

from fusecache.alluxio.model import Block, block_id_of
from fusecache.cache.record import Entry
from fusecache.clock import Clock
from fusecache.config.settings import Settings
from fusecache.errors import Incomplete, StaleId, Unavailable, UpstreamError
from fusecache.metrics import Metrics
from fusecache.prefetch.fetcher import BlockSource, Confirm, Fetcher
from fusecache.prefetch.open_blocks import OpenBlock, OpenBlocks
from fusecache.rpc.budget import Budget
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 1 << 20
"""Largest READ the kernel sends with 256 pages a request; a larger one is answered by `read`."""


class DataClient(BlockSource, Protocol):
    """What is used of `alluxio.client.AlluxioClient`."""

    def open_local(self, block: Block) -> int | None:
        """Descriptor of a complete local block file, without any call."""
        ...

    def learn_local(self, block: Block, budget: Budget) -> int | None:
        """The same after asking this node's block worker where its blocks lie."""
        ...


class FileContext(Protocol):
    """What the metadata says about a file when bytes are needed from elsewhere."""

    def ufs_path(self, inode: int) -> bytes | None:
        """Path in the under storage; None when unknown."""
        ...

    def superseded(self, inode: int) -> bool:
        """True when the id no longer names a live file."""
        ...

    def confirm_stored(self, entry: Entry, fd: int) -> bool:
        """Whether a block file, stored while the file was open, is known to hold the version of its id; never waits."""
        ...

    def confirm(self, entry: Entry, *, whole: bool) -> Confirm:
        """A blocking check that the path still has this id; raises StaleId. `whole`: fetched in one stream."""
        ...


class FileReader:
    """One version of one file that is open."""

    __slots__ = (
        "_blocks",
        "_fetched",
        "_learned",
        "_readers",
        "_refused",
        "_single",
        "_stale",
        "_whole",
        "entry",
        "offer_again_s",
        "opens",
        "reads",
    )  # fmt: skip

    def __init__(self, readers: Readers, entry: Entry) -> None:
        self._readers = readers
        self.entry = entry
        self.opens = 0
        self.reads = 0
        """Reads that wait for bytes now."""
        self.offer_again_s: dict[int, float] = {}
        """Blocks that whoever may read them without asking here knows: until then; kept for `fs.gated_operations`."""
        self._blocks: dict[int, OpenBlock] = {}
        self._single: OpenBlock | None = None
        """The block file of a file of one block."""
        self._whole = entry.block_count == 1 and entry.length <= readers.settings.fetch_bytes
        """Fetched in one stream, if it has to be fetched."""
        self._learned: set[int] = set()
        self._fetched: set[int] = set()
        """Blocks of which bytes were fetched: only these have streams and buffered bytes to give back."""
        self._refused: set[int] = set()
        """Blocks whose local file failed: another source from now on."""
        self._stale = False
        """The id was seen to be replaced: only what was open before is of this version."""

    def hot_read(self, offset: int, size: int) -> memoryview | bytes | None:
        """The bytes if they are local and in memory, else None. The view is valid until the next call."""
        entry = self.entry
        if offset >= entry.length:
            return b""
        want = min(size, entry.length - offset, MAX_REQUEST_BYTES)
        opened = self._single
        if opened is None or opened.fd < 0:
            index = offset // entry.block_size
            offset -= index * entry.block_size
            if offset + want > entry.block_size:
                return None  # spans two blocks
            opened = self._open(index)
            if opened is None and not offset and index in self._fetched:
                # Another pass, of which only the start looks for what the one before had stored: a thread here costs
                # 0.5 ms a file in the second epoch, a look in vain 10 us.
                opened = self._open_confirmed(index, others=self.reads)
            if opened is None:
                return None
        data = self._readers.read_cached(opened.fd, offset, want, size)
        # A hard link to a source file that somebody writes into holds another version now; `read` goes elsewhere.
        return None if data is None or opened.rewritten() else data

    async def read(self, offset: int, size: int) -> bytes | memoryview:
        """The bytes from wherever they are; UpstreamError when every source failed within the budget."""
        readers = self._readers
        entry = self.entry
        end = min(offset + size, entry.length)
        if offset >= end:
            return b""
        budget = Budget(readers.clock, readers.settings.read_budget_s)
        first, last = offset // entry.block_size, (end - 1) // entry.block_size
        pieces = []
        self.reads += 1
        try:
            for index in range(first, last + 1):
                base = index * entry.block_size
                start = max(offset - base, 0)
                stop = min(end - base, entry.block_size)
                pieces.append(await self._read_block(index, start, stop, budget))
        finally:
            self.reads -= 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def block_file(self, index: int) -> OpenBlock | None:
        """The file of a block, when this node has it.

        Only one that nobody can write to by another name (`written_ns` is None) may be read without asking here any
        more: a hard link to a source file is looked at after each read. Whether its version is confirmed is the
        caller's to see: it may be a block that was fetched, and stored, through this reader.
        """
        opened = self._local_file(index)
        if opened is not None:
            self._readers.served(opened.block_id)
        return opened

    def local_bytes(self) -> int:
        """Bytes of the file that this node can serve from local block files now."""
        blocks = range(self.entry.block_count)
        return sum(opened.length for index in blocks if (opened := self._local_file(index)) is not None)

    def _local_file(self, index: int) -> OpenBlock | None:
        """The local file of a block, whatever this reader's READs take it from."""
        opened = self._blocks.get(index)
        if opened is not None and opened.fd >= 0:
            return opened
        readers = self._readers
        if self._stale or index in self._refused or not readers.settings.zero_rpc_reads:
            return None
        return readers.open_blocks.open(self._local_block(index))

    def block(self, index: int) -> Block:
        """Block `index` as the client wants it, with the under storage only where it may be used."""
        entry = self.entry
        base = index * entry.block_size
        context = self._readers.context
        ufs_path: bytes | None = None
        may_use_ufs = entry.persisted and not context.superseded(entry.inode)
        if may_use_ufs and not entry.in_ufs_tier:
            ufs_path = context.ufs_path(entry.inode)
        return Block(
            block_id=block_id_of(entry.inode - 1, index),
            length=min(entry.block_size, entry.length - base),
            locations=entry.locations[index] if index < len(entry.locations) else (),
            ufs_path=ufs_path,
            ufs_offset=base,
            mount_id=entry.mount_id,
            in_ufs_tier=entry.in_ufs_tier and may_use_ufs,
        )

    def close(self) -> None:
        """Nobody has the file open: give descriptors, streams and buffered bytes back."""
        for opened in self._blocks.values():
            self._readers.open_blocks.close(opened)
        self._blocks.clear()
        self._single = None
        for index in self._fetched:
            self._readers.fetcher.forget(block_id_of(self.entry.inode - 1, index))

    def _open(self, index: int) -> OpenBlock | None:
        opened = self._blocks.get(index)
        if opened is not None and opened.fd >= 0:
            return opened
        readers = self._readers
        if self._stale or not readers.settings.zero_rpc_reads or index in self._refused or index in self._fetched:
            return None
        opened = readers.open_blocks.open(self._local_block(index))
        if opened is not None:
            self._keep(index, opened)
        return opened

    def _local_block(self, index: int) -> Block:
        entry = self.entry
        return Block(
            block_id_of(entry.inode - 1, index),
            min(entry.block_size, entry.length - index * entry.block_size),
            (), None, 0, 0, False,
        )  # fmt: skip

    def _open_confirmed(self, index: int, *, others: int) -> OpenBlock | None:
        """The local file of a block that was fetched before, if its version is known without a call.

        `others`: reads that wait now, besides the caller's.
        """
        readers = self._readers
        if self._stale or index in self._refused or not readers.settings.zero_rpc_reads:
            return None
        opened = readers.open_blocks.open(self._local_block(index))
        if opened is None:
            return None
        if not readers.context.confirm_stored(self.entry, opened.fd):
            if index not in self._blocks:
                readers.open_blocks.close(opened)
            return None
        self._keep_stored(index, opened, others)
        return opened

    def _keep_stored(self, index: int, opened: OpenBlock, others: int) -> None:
        self._keep(index, opened)
        if not others:  # nobody waits for what was fetched: from now on the block is like any other
            self._fetched.discard(index)
            self._readers.fetcher.forget(opened.block_id)

    async def _open_stored(self, index: int) -> OpenBlock | None:
        """The local file of a block that was fetched before: a block worker may have stored it from an under storage
        that had another version by then, under this version's id. Used only once the id is confirmed; StaleId.

        Behind the gate a reader lives long, and every file of a first epoch was fetched: there a comparison of the
        folder confirms all of them, and the call is the exception.
        """
        opened = self._open_confirmed(index, others=self.reads - 1)
        if opened is not None:
            return opened
        readers = self._readers
        if not readers.settings.zero_rpc_reads or index in self._refused:
            return None
        opened = readers.open_blocks.open(self._local_block(index))
        if opened is None:
            return None
        try:
            await self._confirm_now()
        except UpstreamError as error:
            if index not in self._blocks:
                readers.open_blocks.close(opened)
            if isinstance(error, StaleId):
                raise
            return None
        if opened.fd < 0:  # a read beside this one found its version not confirmed yet, and closed it
            opened = readers.open_blocks.open(self._local_block(index))
            if opened is None:
                return None
        self._keep_stored(index, opened, self.reads - 1)
        return opened

    async def _confirm_now(self, *, compare: bool = False) -> None:
        readers = self._readers
        check = readers.context.confirm(self.entry, whole=False)
        try:
            await in_thread(lambda: check(compare=compare), limiter=readers.limiter)
        except StaleId:
            self._stale = True
            raise

    def _keep(self, index: int, opened: OpenBlock) -> None:
        self._blocks[index] = opened
        if self.entry.block_count == 1:
            self._single = opened
        self._readers.served(opened.block_id)

    async def _read_block(self, index: int, start: int, stop: int, budget: Budget) -> bytes | memoryview:
        readers = self._readers
        opened = self._open(index)
        block: Block | None = None
        if opened is None and self._stale:
            raise StaleId(f"file id {self.entry.inode - 1} was replaced")
        if opened is None and index in self._fetched:
            opened = await self._open_stored(index)
        elif opened is None:
            block = self.block(index)
            opened = await self._learn(index, block, budget)
        if opened is not None:
            try:
                return await readers.read_file(opened, start, stop - start)
            except OSError as error:
                self._refused.add(index)
                readers.local_failed(error, opened)
        self._fetched.add(index)
        confirm = readers.context.confirm(self.entry, whole=self._whole)
        try:
            return await readers.fetcher.read(block or self.block(index), start, stop, budget, confirm)
        except UpstreamError as error:
            if isinstance(error, StaleId):
                self._stale = True
            elif not isinstance(error, Unavailable):
                # The under storage ended early or has no such file: was it replaced, perhaps unnoticed? StaleId says so
                # and heals at the next open; EIO would not.
                await self._confirm_now(compare=True)
            raise

    async def _learn(self, index: int, block: Block, budget: Budget) -> OpenBlock | None:
        readers = self._readers
        if index in self._learned or not block.locations or not readers.settings.zero_rpc_reads:
            return None
        self._learned.add(index)
        fd = await in_thread(readers.client.learn_local, block, budget, limiter=readers.limiter)
        if fd is None:
            return None
        opened = readers.open_blocks.adopt(block, fd)
        self._keep(index, opened)
        return opened


class Readers:
    """Every open file of a mount, by inode."""

    def __init__(
        self,
        client: DataClient,
        context: FileContext,
        settings: Settings,
        *,
        metrics: Metrics,
        clock: Clock,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self.client = client
        self.context = context
        self.settings = settings
        self.clock = clock
        self.limiter = limiter
        self.fetcher = Fetcher(client, settings, metrics=metrics, clock=clock, limiter=limiter)
        self.open_blocks = OpenBlocks(client.open_local, settings.max_open_blocks)
        self._files: dict[int, FileReader] = {}
        self._kept: OrderedDict[int, FileReader] = OrderedDict()
        self._touch: dict[int, None] = {}
        self.buffer = memoryview(mmap.mmap(-1, MAX_REQUEST_BYTES))
        """Where `hot_read` puts its bytes; another one may be given before each call."""
        self._nowait = os.RWF_NOWAIT
        self._local_bytes = metrics.counter("fusecache_read_bytes_total", source="local_block")
        self._failed_local = metrics.counter("fusecache_block_sources_failed_total", source="local_block")
        self._open_files = metrics.gauge("fusecache_open_files")

    def get(self, inode: int) -> FileReader | None:
        """The reader of an open file."""
        return self._files.get(inode)

    def open(self, entry: Entry) -> FileReader:
        """One more open of a file; Incomplete while it is being written."""
        if not entry.completed:
            raise Incomplete(f"file id {entry.inode - 1} is still being written")
        reader = self._files.get(entry.inode)
        if reader is None:
            reader = self._files[entry.inode] = FileReader(self, entry)
        reader.opens += 1
        self._open_files.value += 1
        return reader

    def release(self, inode: int) -> None:
        """One open less; the last one closes the file."""
        reader = self._files.get(inode)
        if reader is None:
            return
        reader.opens -= 1
        self._open_files.value -= 1
        if reader.opens <= 0:
            del self._files[inode]
            reader.close()

    def kept(self, inode: int) -> FileReader | None:
        """The reader that `keep` made, used last from now on."""
        reader = self._kept.get(inode)
        if reader is not None:
            self._kept.move_to_end(inode)
        return reader

    def keep(self, entry: Entry) -> FileReader:
        """The reader of a file that is read without having been opened here: nobody will say that it was closed.

        So the one used least recently is closed once more than `max_open_blocks` are kept. Incomplete while the file
        is being written.
        """
        reader = self.kept(entry.inode)
        if reader is None:
            reader = self.open(entry)
            self._kept[entry.inode] = reader
            if len(self._kept) > self.settings.max_open_blocks:
                self._close_oldest_kept()
        return reader

    def _close_oldest_kept(self) -> None:
        for inode, reader in self._kept.items():
            if not reader.reads:
                del self._kept[inode]
                self.release(inode)
                return

    def close_all(self) -> None:
        """Shutdown."""
        for reader in self._files.values():
            reader.close()
        self._files.clear()
        self._kept.clear()
        self.open_blocks.close_all()

    def served(self, block_id: int) -> None:
        """Note a block that is read without its block worker knowing (see `take_served`)."""
        if len(self._touch) < 100_000:
            self._touch[block_id] = None

    def take_served(self, most: int) -> list[int]:
        """Up to `most` blocks to touch, oldest first; they are noted again at their next open."""
        taken = [block_id for block_id, _ in zip(self._touch, range(most), strict=False)]
        for block_id in taken:
            del self._touch[block_id]
        return taken

    def read_cached(self, fd: int, offset: int, want: int, size: int) -> memoryview | None:
        """preadv2(RWF_NOWAIT) into the shared buffer; None when a byte is not in memory.

        The kernel asks again past MAX_REQUEST_BYTES only when it was told so; hence None for larger requests.
        """
        if size > MAX_REQUEST_BYTES:
            return None
        view = self.buffer[:want]
        try:
            got = os.preadv(fd, (view,), offset, self._nowait)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and self._nowait:
                self._nowait = 0  # tmpfs: its pages are memory, so a plain read does not wait either
                return self.read_cached(fd, offset, want, size)
            return None  # `read` meets the same error and goes to the next source
        if got != want:
            return None
        self._local_bytes.value += got
        return view

    async def read_file(self, opened: OpenBlock, offset: int, size: int) -> bytes:
        """`size` bytes of a local block file in a thread; OSError when it can't give them all."""
        opened.users += 1
        try:
            data = await in_thread(_pread_all, opened.fd, offset, size, limiter=self.limiter)
            if opened.rewritten():
                raise OSError(errno.ESTALE, "the file that it is a link to was written to")
        finally:
            self.open_blocks.leave(opened)
        self._local_bytes.value += size
        return data

    def local_failed(self, error: OSError, opened: OpenBlock) -> None:
        """A local block file could not be read: count, and do not use it again."""
        self._failed_local.inc()
        report = log.info if error.errno == errno.ESTALE else log.warning  # a changed source file is no failure
        report("local block file failed, reading elsewhere", block_id=opened.block_id, error=str(error))
        self.open_blocks.close(opened)


def _pread_all(fd: int, offset: int, size: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) == size:
        return data
    pieces = [data]
    missing = size - len(data)
    while data and missing:
        data = os.pread(fd, missing, offset + size - missing)
        pieces.append(data)
        missing -= len(data)
    if missing:
        raise OSError(errno.EIO, f"block file ended {missing} bytes early")
    return b"".join(pieces)
