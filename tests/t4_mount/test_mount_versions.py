"""F13: a file is replaced while somebody has it open and has read half of it.

Whatever way it is replaced and wherever its bytes come from: the old version whole, or ESTALE, never a mix of both,
once Alluxio has noticed (a refresh makes it look). Opening it again gives the new version.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.embedded import WireClient, replace
from tests.support.mounting import needs_fuse
from tests.t4_mount.live_mount import EmbeddedProcess, LiveMount, errno_of, live_mount

pytestmark = needs_fuse

BLOCK = 64 << 10
SIZE = 10 * BLOCK + 777


def overwrite(path: Path, data: bytes) -> None:
    """Into the same file, as an editor that does not care."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))


def removed(path: Path, data: bytes) -> None:
    os.unlink(path)


WAYS: dict[str, Callable[[Path, bytes], None]] = {"replace": replace, "overwrite": overwrite, "remove": removed}


@pytest.fixture(scope="module", params=["folder", "cluster", "cluster_uncached"])
def mount(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMount]:
    """Hard-linked block files; copies of small blocks on two block workers; blocks that nobody stores."""
    folder = tmp_path_factory.mktemp("versions")
    source = folder / "source"
    source.mkdir()
    with ExitStack() as stack:
        if request.param == "folder":
            yield stack.enter_context(live_mount(source, folder))
            return
        flags = ("--block-workers", "2", "--block-size-bytes", str(BLOCK))
        cluster = stack.enter_context(EmbeddedProcess(source, folder / "embedded", *flags))
        more = ("--read-type", "no_cache") if request.param == "cluster_uncached" else ()
        yield stack.enter_context(live_mount(cluster.url, folder, "--no-zero-rpc-reads", *more))


def read_direct(descriptor: int, offset: int, size: int) -> bytes:
    """Past the page cache, so that the daemon answers every byte."""
    with mmap.mmap(-1, size) as buffer:
        got = os.preadv(descriptor, [buffer], offset)
        return buffer[:got]


def read_buffered(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_mount_versions_half_read_file_is_all_old_or_estale(mount: LiveMount, way: str, direct: bool) -> None:
    """S02, S03; F13."""
    source = mount.root.parent / "source" / f"{way}{direct}"
    shown = mount.root / source.name
    rng = random.Random(SIZE)
    read = read_direct if direct else read_buffered
    piece = 16 << 10
    for turn in range(4):
        old, new = rng.randbytes(SIZE), rng.randbytes(SIZE - turn * 1000)
        replace(source, old)
        mount.refresh()
        descriptor = os.open(shown, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: the second half is not there yet
        try:
            offsets = [*range(0, SIZE, piece)]
            split = 0 if turn == 0 else rng.randrange(1, len(offsets))
            for offset in offsets[:split]:
                assert read(descriptor, offset, piece) == old[offset : offset + piece]
            inode = os.fstat(descriptor).st_ino
            WAYS[way](source, new)
            mount.refresh()
            answers = set()
            for offset in [*offsets[split:], *offsets[:split]]:
                try:
                    data = read(descriptor, offset, piece)
                except OSError as failure:
                    answers.add(failure.errno)
                    continue
                assert data == old[offset : offset + piece], f"{way}, turn {turn}, byte {offset}: not the old version"
                answers.add(0)
            assert answers <= {0, errno.ESTALE}, answers
        finally:
            os.close(descriptor)
        if way == "remove":
            assert errno_of(lambda: os.stat(shown)) == errno.ENOENT
        else:
            assert shown.read_bytes() == new
            assert os.stat(shown).st_size == len(new)
            assert os.stat(shown).st_ino != inode, "another version is another inode"


def test_mount_versions_old_and_new_can_be_open_at_once(mount: LiveMount) -> None:
    """S02: each descriptor has its version."""
    source = mount.root.parent / "source" / "both"
    old, new = os.urandom(SIZE), os.urandom(SIZE)
    replace(source, old)
    mount.refresh()
    first = os.open(mount.root / "both", os.O_RDONLY)
    try:
        assert os.pread(first, SIZE, 0) == old
        replace(source, new)
        mount.refresh()
        second = os.open(mount.root / "both", os.O_RDONLY)
        try:
            assert os.pread(second, SIZE, 0) == new
            assert os.pread(first, SIZE, 0) == old, "its pages are the old version's"
            assert os.pread(second, SIZE, 0) == new
        finally:
            os.close(second)
    finally:
        os.close(first)


def test_mount_versions_file_gone_from_the_under_storage_is_dropped(mount: LiveMount) -> None:
    """User report 31: gone without Alluxio knowing: reading is ENOENT or ESTALE, never EIO; then open is ENOENT."""
    source = mount.root.parent / "source" / "gone"
    source.write_bytes(os.urandom(SIZE))
    mount.refresh()
    assert "gone" in os.listdir(mount.root)
    os.unlink(source)
    assert errno_of((mount.root / "gone").read_bytes) in (errno.ENOENT, errno.ESTALE)
    mount.refresh()
    assert errno_of(lambda: os.open(mount.root / "gone", os.O_RDONLY)) == errno.ENOENT
    assert "gone" not in os.listdir(mount.root)


def test_mount_versions_estale_is_healed_by_opening_again(tmp_path: Path) -> None:
    """S02, S03; user report 21: Alluxio has noticed, the mount has not (its listing is good for ten minutes).

    The first READ finds out, and opening the path again gives the new version at once, without a refresh.
    """
    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_bytes(b"o" * SIZE)
    with (
        EmbeddedProcess(source, tmp_path / "embedded", "--block-size-bytes", str(BLOCK)) as cluster,
        live_mount(cluster.url, tmp_path, "--sync-interval-s", "-1", "--read-budget-s", "20") as mount,
        WireClient(cluster.master) as other,
    ):
        assert os.stat(mount.root / "f").st_size == SIZE
        assert os.listdir(mount.root) == ["f"]
        replace(source / "f", b"n" * 100)
        other.stat(b"/f", sync_interval_ms=0)
        descriptor = os.open(mount.root / "f", os.O_RDONLY)
        try:
            assert os.fstat(descriptor).st_size == SIZE, "the mount does not know yet"
            for _ in range(3):
                assert errno_of(lambda: os.pread(descriptor, 4096, 0)) == errno.ESTALE
        finally:
            os.close(descriptor)
        assert (mount.root / "f").read_bytes() == b"n" * 100
        assert os.stat(mount.root / "f").st_size == 100
