"""The handlers of a worker behind the gate: no OPEN, no RELEASE, answers as tokens of slots."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio

from fusecache.alluxio.model import Block
from fusecache.cache.record import Entry
from fusecache.errors import Unavailable
from fusecache.fs.attributes import Attributes
from fusecache.fs.gated_operations import HIDDEN_FILE_BYTES, GatedOperations
from fusecache.fs.hidden_folder import FOLDER_INODE, HiddenFolder
from fusecache.kernel.reply_slots import GateSlots, Slot, WorkerSlots, create_slots
from fusecache.prefetch.open_blocks import OpenBlock
from tests.t3_operations.operations_rig import CONTEXT, Rig, refused, rig

ASKED = 1 << 16
CONTENT = bytes(range(256)) * 40


class Gated:
    """A worker's handlers, with the gate's side of its slots."""

    def __init__(self, r: Rig) -> None:
        self.rig = r
        self.descriptor = create_slots(4, 1 << 20)
        self.worker_slots = WorkerSlots(self.descriptor)
        self.gate_slots = GateSlots(self.descriptor)
        self.offered: list[tuple[int, int]] = []
        self.taken = True
        """Whether the next offer is said to be taken."""
        self.operations: GatedOperations[Slot] = GatedOperations(
            r.tree,
            r.readers,
            Attributes(r.settings, opened_unasked=True),
            HiddenFolder({b"stats": bytes, b"version": bytes}, shown_bytes=HIDDEN_FILE_BYTES),
            metrics=r.metrics,
            capacity=lambda: r.cluster,
            metadata_budget_s=r.settings.metadata_budget_s,
            on_stale_read=self._stale_read,
            slots=self.worker_slots,
            offer=self._offer,
            hidden_content=self._hidden,
        )
        r.operations = self.operations

    async def read(self, inode: int, offset: int = 0, size: int = ASKED) -> bytes:
        """What the kernel gets: the gate takes the bytes of the token's slot and frees it."""
        token = await self.operations.read(pyfuse3.FileHandleT(inode), offset, size)
        number, view = self.gate_slots.bytes_of(token, size)
        data = bytes(view)
        self.gate_slots.free(number)
        return data

    async def _stale_read(self, inode: int) -> None:
        self.rig.stale_reads.append(inode)

    def _offer(self, entry: Entry, index: int, opened: OpenBlock) -> bool:
        self.offered.append((entry.inode, opened.length))
        return self.taken

    async def _hidden(self, name: bytes) -> bytes:
        return b"content of " + name


def closed(slots: WorkerSlots) -> bool:
    """Close; False while somebody still has a view."""
    try:
        slots.close()
    except BufferError:
        return False
    return True


@asynccontextmanager
async def gated(state: Path, **settings: Any) -> AsyncIterator[Gated]:
    async with rig(state, **settings) as r:
        made = Gated(r)
        try:
            yield made
        finally:
            assert made.worker_slots.busy == 0, "a slot was taken and never given back"
            r.readers.buffer = memoryview(bytearray(1))  # it was the last slot's view
            made.gate_slots.close()
            with trio.fail_after(10):
                while not closed(made.worker_slots):
                    gc.collect()  # tracebacks of failed reads hold views, some of them in threads that just end
                    await trio.sleep(0.01)
            os.close(made.descriptor)


async def test_gated_read_without_open_gives_a_token_for_exactly_the_bytes(tmp_path: Path) -> None:
    async with gated(tmp_path) as worker:
        inode = worker.rig.write(b"/f", CONTENT)
        await worker.rig.walk(b"/f")
        assert await worker.read(inode) == CONTENT
        assert await worker.read(inode, 100, 50) == CONTENT[100:150]
        assert await worker.read(inode, len(CONTENT) - 3) == CONTENT[-3:]
        assert await worker.read(inode, len(CONTENT)) == b""


async def test_gated_read_of_a_local_block_lands_in_the_slot_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "block"
    block.write_bytes(CONTENT)
    async with gated(tmp_path / "state") as worker:
        inode = worker.rig.write(b"/f", CONTENT)
        opener = worker.rig.readers.open_blocks
        monkeypatch.setattr(opener, "_open_local", lambda block_: os.open(block, os.O_RDONLY | os.O_CLOEXEC))
        await worker.rig.walk(b"/f")
        worker.taken = False
        for tries in (1, 2):
            assert await worker.read(inode) == CONTENT
            assert worker.offered == [(inode, len(CONTENT))] * tries, "until the gate has it"
        assert worker.rig.metrics.snapshot()["fusecache_read_bytes_total{source=local_block}"] == 2 * len(CONTENT)
        worker.taken = True
        for _ in range(2):
            assert await worker.read(inode) == CONTENT
            assert worker.offered == [(inode, len(CONTENT))] * 3, "once"


async def test_gated_failed_read_gives_its_slot_back(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    expected_logs("request failed", count=8)
    async with gated(tmp_path) as worker:
        inode = worker.rig.write(b"/f", CONTENT)
        await worker.rig.walk(b"/f")
        worker.rig.contents.error = Unavailable("no source answers")
        for _ in range(8):  # twice as often as there are slots
            with refused(errno.EIO):
                await worker.operations.read(pyfuse3.FileHandleT(inode), 0, ASKED)
        worker.rig.contents.error = None


async def test_gated_read_of_unknown_and_of_folder_inodes(tmp_path: Path) -> None:
    """The kernel may ask with any inode that it once had."""
    async with gated(tmp_path) as worker:
        worker.rig.model.mkdir(b"/d")
        folder = await worker.rig.walk(b"/d")
        with refused(errno.EISDIR):
            await worker.operations.read(pyfuse3.FileHandleT(folder.st_ino), 0, ASKED)
        with refused(errno.ESTALE):
            await worker.operations.read(pyfuse3.FileHandleT(987654321), 0, ASKED)
        assert worker.rig.stale_reads == [987654321], "and the path is healed"


async def test_gated_incomplete_file_shows_a_byte_and_refuses_to_be_read(tmp_path: Path) -> None:
    """S33: without OPEN the error can only come with a READ, which the kernel does not send for an empty file."""
    async with gated(tmp_path) as worker:
        inode = worker.rig.write(b"/f", b"", completed=False)
        assert (await worker.rig.walk(b"/f")).st_size == 1
        with refused(errno.EBUSY):
            await worker.operations.read(pyfuse3.FileHandleT(inode), 0, ASKED)


async def test_gated_readers_are_kept_in_order_of_use(tmp_path: Path) -> None:
    async with gated(tmp_path, max_open_blocks=16) as worker:
        inodes = [worker.rig.write(b"/f%d" % number, b"%d" % number) for number in range(40)]
        for number in range(len(inodes)):
            await worker.rig.walk(b"/f%d" % number)
        for number, inode in enumerate(inodes):
            assert await worker.read(inode) == b"%d" % number
            await worker.read(inodes[0])
        readers = worker.rig.readers
        assert readers.kept(inodes[0]) is not None, "used all the time"
        assert readers.kept(inodes[1]) is None
        assert sum(readers.kept(inode) is not None for inode in inodes) == 16
        assert worker.rig.metrics.snapshot()["fusecache_open_files"] == 16


async def test_gated_hidden_files_have_a_size_and_their_content(tmp_path: Path) -> None:
    """S33: no OPEN says "direct I/O", so the kernel needs a size to send a READ; a shorter answer ends the file."""
    async with gated(tmp_path) as worker:
        folder = await worker.operations.lookup(pyfuse3.ROOT_INODE, pyfuse3.FileNameT(b".fusecache"), CONTEXT)
        assert folder.st_ino == FOLDER_INODE
        found = await worker.operations.lookup(folder.st_ino, pyfuse3.FileNameT(b"version"), CONTEXT)
        assert found.st_size == HIDDEN_FILE_BYTES
        assert found.entry_timeout == found.attr_timeout == 0
        assert await worker.read(found.st_ino) == b"content of version"
        assert await worker.read(found.st_ino, 8) == b"of version"
        with refused(errno.EISDIR):
            await worker.operations.read(pyfuse3.FileHandleT(FOLDER_INODE), 0, ASKED)
        with refused(errno.ESTALE):
            await worker.operations.read(pyfuse3.FileHandleT(FOLDER_INODE + 99), 0, ASKED)


async def test_gated_open_offers_whole_local_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S34: one block, on this node, under one name."""
    block = tmp_path / "block"
    block.write_bytes(CONTENT)
    local: set[int] = set()

    def open_local(wanted: Block) -> int | None:
        return os.open(block, os.O_RDONLY | os.O_CLOEXEC) if wanted.block_id in local else None

    async with gated(tmp_path / "state") as worker:
        r = worker.rig
        monkeypatch.setattr(r.readers.open_blocks, "_open_local", open_local)
        here, away, linked = (r.write(name, CONTENT) for name in (b"/here", b"/away", b"/linked"))
        for name in (b"/here", b"/away", b"/linked"):
            await r.walk(name)
        local.add(((here - 1) >> 24) << 24)

        async def open_(inode: int) -> None:
            await worker.operations.open(pyfuse3.InodeT(inode), os.O_RDONLY, CONTEXT)

        await open_(here)
        await open_(away)
        assert worker.offered == [(here, len(CONTENT))]
        os.link(block, tmp_path / "another name")
        local.add(((linked - 1) >> 24) << 24)
        await open_(linked)
        assert worker.offered == [(here, len(CONTENT))]
        with refused(errno.EROFS):
            await worker.operations.open(pyfuse3.InodeT(here), os.O_RDWR, CONTEXT)
