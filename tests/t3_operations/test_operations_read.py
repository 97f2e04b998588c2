"""OPEN, READ and RELEASE without a kernel."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from fusecache.errors import Unavailable
from tests.support.log_noise import Declare
from tests.t3_operations.operations_rig import CONTEXT, ROOT, refused, rig


async def test_operations_read_gives_exactly_what_is_there(tmp_path: Path) -> None:
    """S01; user reports 27 and 29."""
    rng = random.Random(2)
    async with rig(tmp_path, fetch_bytes=64 << 10) as r:
        contents = {b"/f%d" % size: rng.randbytes(size) for size in (0, 1, 10, 4095, 4096, 4097, 300_000)}
        for path, content in contents.items():
            r.write(path, content)
        for path, content in contents.items():
            size = len(content)
            inode = (await r.walk(path)).st_ino
            info = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
            for _ in range(50):
                offset, want = rng.randrange(size + 5000), rng.randrange(1, 200_000)
                got = bytes(await r.operations.read(info.fh, offset, want))
                assert got == content[offset : offset + want], (size, offset, want)
            await r.operations.release(info.fh)


async def test_operations_open_handle_is_the_inode_and_pages_are_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        info = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        assert (info.fh, info.keep_cache, info.direct_io) == (inode, True, False)
        assert r.metrics.snapshot()["fusecache_open_files"] == 1
        await r.operations.release(info.fh)
        assert r.metrics.snapshot()["fusecache_open_files"] == 0


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND])
async def test_operations_open_for_writing_is_erofs(tmp_path: Path, flags: int) -> None:
    """S13."""
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"x")
        await r.walk(b"/f")
        with refused(errno.EROFS):
            await r.operations.open(inode, flags, CONTEXT)
        assert r.metrics.snapshot()["fusecache_open_files"] == 0


async def test_operations_open_of_a_folder_is_eisdir(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.model.mkdir(b"/d")
        inode = (await r.walk(b"/d")).st_ino
        for folder in (inode, ROOT):
            with refused(errno.EISDIR):
                await r.operations.open(folder, os.O_RDONLY, CONTEXT)


async def test_operations_open_of_an_incomplete_file_is_ebusy_until_it_is_whole(tmp_path: Path) -> None:
    """S10; user report 32: no log, no attribute kept by the kernel, and it can be opened once it is finished."""
    async with rig(tmp_path) as r:
        node = r.model.write(b"/f", 0, completed=False)
        assert await r.list_names(ROOT) == [b"f"]
        got = await r.walk(b"/f")
        assert (got.entry_timeout, got.attr_timeout) == (0.0, 0.0)
        for _ in range(3):
            with refused(errno.EBUSY):
                await r.operations.open(got.st_ino, os.O_RDONLY, CONTEXT)
        assert r.errors("open", "EBUSY") == 3
        assert r.metrics.snapshot()["fusecache_open_files"] == 0
        r.contents.by_file_id[node.file_id] = b"whole"
        node.length, node.completed = 5, True
        r.clock.time_s += 2
        finished = await r.walk(b"/f")
        assert (finished.st_ino, finished.st_size) == (got.st_ino, 5)
        assert await r.read_file(finished.st_ino) == b"whole"


async def test_operations_release_of_one_of_two_opens_keeps_the_other(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"content")
        await r.walk(b"/f")
        first = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        second = await r.operations.open(inode, os.O_RDONLY, CONTEXT)
        assert first.fh == second.fh
        await r.operations.release(first.fh)
        assert bytes(await r.operations.read(second.fh, 0, 100)) == b"content"
        await r.operations.release(second.fh)
        with refused(errno.EBADF):
            await r.operations.read(second.fh, 0, 100)


async def test_operations_read_of_a_replaced_file_is_estale_and_reopening_gives_the_new(tmp_path: Path) -> None:
    """S02: all-old bytes or ESTALE; the daemon is told, so that the kernel forgets the old one's pages."""
    async with rig(tmp_path, fetch_bytes=64 << 10) as r:
        old_content, new_content = os.urandom(1 << 20), os.urandom(1 << 20)
        old = r.write(b"/f", old_content)
        await r.list_names(ROOT)
        info = await r.operations.open(old, os.O_RDONLY, CONTEXT)
        assert bytes(await r.operations.read(info.fh, 0, 4096)) == old_content[:4096]
        new = r.write(b"/f", new_content)
        del r.contents.by_file_id[old - 1]
        r.contents.error = Unavailable("nobody has the old blocks")
        await r.tree.refresh(ROOT, force_sync=True)
        with refused(errno.ESTALE):
            await r.operations.read(info.fh, 900_000, 4096)
        assert r.stale_reads == [old]
        r.contents.error = None
        await r.operations.release(info.fh)
        assert (await r.walk(b"/f")).st_ino == new
        assert await r.read_file(new) == new_content
        with refused(errno.ESTALE):
            await r.operations.open(old, os.O_RDONLY, CONTEXT)


async def test_operations_read_without_any_source_is_eio_and_the_next_one_is_fine(
    tmp_path: Path, expected_logs: Declare
) -> None:
    """S19, S22: never zeros, never a short read; user report 26."""
    expected_logs(r"request failed", count=1)
    async with rig(tmp_path) as r:
        inode = r.write(b"/f", b"content")
        await r.walk(b"/f")
        r.contents.error = Unavailable("no block worker answers")
        with refused(errno.EIO):
            await r.read_file(inode)
        r.contents.error = None
        assert await r.read_file(inode) == b"content"
        assert r.stale_reads == []
