"""F13: a file is replaced while somebody has it open and has read half of it.

Whatever way it is replaced and wherever its bytes come from: the old version whole, or ESTALE, never a mix of both,
once Alluxio has noticed (a refresh makes it look). Opening it again gives the new version.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.embedded import WireClient, replace
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import BLOCK, Board, Place, started
from tests.t4_mount.live_mount import errno_of

pytestmark = needs_fuse
shared_mounts = started("unsynced")

SIZE = 10 * BLOCK + 777


def overwrite(path: Path, data: bytes) -> None:
    """Into the same file, as an editor that does not care."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))


def removed(path: Path, data: bytes) -> None:
    os.unlink(path)


WAYS: dict[str, Callable[[Path, bytes], None]] = {"replace": replace, "overwrite": overwrite, "remove": removed}


@pytest.fixture(scope="module", params=["folder", "blocks", "cluster", "uncached"])
def place(request: pytest.FixtureRequest, board: Board) -> Place:
    """One block file per file; several, read without a call; streams from two block workers; blocks nobody stores."""
    return board.place(request.param, "versions")


def read_direct(descriptor: int, offset: int, size: int) -> bytes:
    """Past the page cache, so that the daemon answers every byte."""
    with mmap.mmap(-1, size) as buffer:
        got = os.preadv(descriptor, [buffer], offset)
        return buffer[:got]


def read_buffered(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)


def version_of(data: bytes, **versions: bytes) -> str:
    """Name of the version `data` is, or what each of its pages is.

    In words, because pytest explains two different byte strings of this size for a minute and a half.
    """
    for name, version in versions.items():
        if data == version:
            return name
    pages = []
    for offset in range(0, len(data), 4096):
        page = slice(offset, offset + 4096)
        pages.append(next((name for name, version in versions.items() if data[page] == version[page]), "neither"))
    runs = [f"{len([*run])} of {name}" for name, run in itertools.groupby(pages)]
    return f"{len(data)} bytes, pages: {', '.join(runs)}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_mount_versions_half_read_file_is_all_old_or_estale(place: Place, way: str, direct: bool) -> None:
    """S02, S03; F13."""
    source = place.source / f"{way}{direct}"
    shown = place.shown / source.name
    rng = random.Random(SIZE)
    read = read_direct if direct else read_buffered
    piece = 16 << 10
    for turn in range(4):
        old, new = rng.randbytes(SIZE), rng.randbytes(SIZE - turn * 1000)
        replace(source, old)
        place.refresh()
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
            place.refresh()
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
            assert version_of(shown.read_bytes(), old=old, new=new) == "new"
            assert os.stat(shown).st_size == len(new)
            assert os.stat(shown).st_ino != inode, "another version is another inode"


def test_mount_versions_old_and_new_can_be_open_at_once(place: Place) -> None:
    """S02: each descriptor has its version."""
    source = place.source / "both"
    old, new = os.urandom(SIZE), os.urandom(SIZE)
    replace(source, old)
    place.refresh()
    first = os.open(place.shown / "both", os.O_RDONLY)
    try:
        assert os.pread(first, SIZE, 0) == old
        replace(source, new)
        place.refresh()
        second = os.open(place.shown / "both", os.O_RDONLY)
        try:
            assert os.pread(second, SIZE, 0) == new
            assert os.pread(first, SIZE, 0) == old, "its pages are the old version's"
            assert os.pread(second, SIZE, 0) == new
        finally:
            os.close(second)
    finally:
        os.close(first)


def test_mount_versions_file_gone_from_the_under_storage_is_dropped(place: Place) -> None:
    """User report 31: gone without Alluxio knowing: reading is ENOENT or ESTALE, never EIO; then open is ENOENT."""
    source = place.source / "gone"
    source.write_bytes(os.urandom(SIZE))
    place.refresh()
    assert "gone" in os.listdir(place.shown)
    os.unlink(source)
    assert errno_of((place.shown / "gone").read_bytes) in (errno.ENOENT, errno.ESTALE)
    place.refresh()
    assert errno_of(lambda: os.open(place.shown / "gone", os.O_RDONLY)) == errno.ENOENT
    assert "gone" not in os.listdir(place.shown)


def test_mount_versions_estale_is_healed_by_opening_again(board: Board) -> None:
    """S02, S03; user report 21: Alluxio has noticed, the mount has not (its listing is good for ten minutes).

    The first READ finds out, and opening the path again gives the new version at once, without a refresh.
    """
    place = board.place("unsynced", "healed")
    (place.source / "f").write_bytes(b"o" * SIZE)
    with WireClient(board.cluster("one").master) as other:
        assert os.stat(place.shown / "f").st_size == SIZE
        assert os.listdir(place.shown) == ["f"]
        replace(place.source / "f", b"n" * 100)
        other.stat(os.fsencode(f"/{place.path}/f"), sync_interval_ms=0)
        descriptor = os.open(place.shown / "f", os.O_RDONLY)
        try:
            assert os.fstat(descriptor).st_size == SIZE, "the mount does not know yet"
            for _ in range(3):
                assert errno_of(lambda: os.pread(descriptor, 4096, 0)) == errno.ESTALE
        finally:
            os.close(descriptor)
        assert (place.shown / "f").read_bytes() == b"n" * 100
        assert os.stat(place.shown / "f").st_size == 100
