"""O_DIRECT and very large reads: user report 38. Where the kernel passes reads through to a disk, its rules hold."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.board import BLOCK, Board, Place, started
from tests.t4_mount.live_mount import errno_of

pytestmark = needs_fuse
shared_mounts = started("folder", "blocks", "cluster")

MIB = 1 << 20
SIZE = 64 * MIB + 4097


@pytest.fixture(scope="module")
def buffer() -> Iterator[mmap.mmap]:
    """Aligned memory for the largest read."""
    with mmap.mmap(-1, SIZE + mmap.PAGESIZE) as memory:
        yield memory


@pytest.fixture(scope="module")
def large(board: Board) -> tuple[Place, bytes]:
    """One file of 64 MiB and a bit."""
    place = board.place("folder", "direct")
    content = random.Random(3).randbytes(MIB) * 64 + b"e" * 4097
    (place.source / "f").write_bytes(content)
    return place, content


@pytest.mark.parametrize("local", [False, True], ids=["first", "local"])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_mount_direct_64_mebibytes_in_one_call(
    board: Board, large: tuple[Place, bytes], buffer: mmap.mmap, local: bool, direct: bool
) -> None:
    """User report 38: one preadv, larger than any buffer of ours, before and after the block is local."""
    place, content = large
    if local:
        place.warm("f")
    opens_before = place.mount.passthrough_opens()
    descriptor = os.open(place.shown / "f", os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        view = memoryview(buffer)
        pieces = [view[offset : offset + 8 * MIB] for offset in range(0, len(view), 8 * MIB)]
        assert os.preadv(descriptor, pieces, 0) == SIZE
        assert buffer[:SIZE] == content
        assert os.preadv(descriptor, pieces, 4096) == SIZE - 4096
        assert buffer[: SIZE - 4096] == content[4096:]
        del pieces
        view.release()
    finally:
        os.close(descriptor)
    if local and board.mode.passthrough:
        assert place.mount.passthrough_opens() == opens_before + 1


@pytest.mark.parametrize("kind", ["folder", "blocks"])
def test_mount_direct_unaligned_reads(board: Board, buffer: mmap.mmap, kind: str, tmp_path: Path) -> None:
    """S33, S34: exact through the daemon; through to a disk EINVAL, as on the disk itself; one whole block only."""
    place = board.place(kind, "unaligned")  # type: ignore[arg-type]  # pytest's parameters are str
    content = random.Random(4).randbytes(3 * BLOCK + 5)
    (place.source / "f").write_bytes(content)
    place.warm("f")
    (tmp_path / "plain").write_bytes(content)  # on the file system of the block files
    whole_block = kind == "folder"
    opens_before = place.mount.passthrough_opens()
    descriptor = os.open(place.shown / "f", os.O_RDONLY | os.O_DIRECT)
    plain = os.open(tmp_path / "plain", os.O_RDONLY | os.O_DIRECT)
    view = memoryview(buffer)
    try:
        passed_through = place.mount.passthrough_opens() > opens_before
        assert passed_through == (board.mode.passthrough and whole_block)
        for offset, size, shift in ((3, 100, 0), (4096, 100, 0), (0, 4096, 3), (1, BLOCK, 1), (BLOCK - 1, 2, 0)):
            into = view[shift : shift + size]

            def read(from_: int, into: memoryview = into, offset: int = offset) -> int:
                return os.preadv(from_, [into], offset)

            as_on_the_disk = errno_of(lambda read=read: read(plain))
            number = errno_of(lambda read=read: read(descriptor))
            assert number == (as_on_the_disk if passed_through else 0), (offset, size, shift)
            if number == 0:
                assert into == content[offset : offset + size]
            else:
                assert number == errno.EINVAL
            into.release()
        # Aligned reads to an end that is not aligned work everywhere.
        assert os.preadv(descriptor, [view[: 8 * BLOCK]], 0) == len(content)
        assert view[: len(content)] == content
    finally:
        view.release()
        os.close(descriptor)
        os.close(plain)


@pytest.mark.parametrize("kind", ["folder", "blocks", "cluster"])
def test_mount_direct_and_buffered_opens_share_a_file(board: Board, kind: str) -> None:
    """One after the other, both ways round, and both at once: user report 50."""
    place = board.place(kind, "mixed")  # type: ignore[arg-type]  # pytest's parameters are str
    content = random.Random(5).randbytes(2 * BLOCK + 4095)
    (place.source / "f").write_bytes(content)
    if kind != "cluster":
        place.warm("f")
    path = place.shown / "f"
    with mmap.mmap(-1, 4 * BLOCK) as memory:
        for first, second in ((0, os.O_DIRECT), (os.O_DIRECT, 0)):
            descriptors = [os.open(path, os.O_RDONLY | first), os.open(path, os.O_RDONLY | second)]
            try:
                for descriptor in (*descriptors, *reversed(descriptors)):
                    assert os.preadv(descriptor, [memory], 0) == len(content)
                    assert memory[: len(content)] == content
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
