"""Bytes through the kernel: whatever the size, offset and way of reading, they are the source's or an error.

Each test runs over three mounts: a folder (one block file per file, read without a call, or by the kernel itself), a
cluster of small blocks (several block files per file, read without a call), and one of two block workers whose block
files the mount does not look at, so that everything comes through streams.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounting import needs_fuse, sha256_tree
from tests.t4_mount.board import BLOCK, Board, Place

pytestmark = needs_fuse

KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    0, 1, 10, 4095, 4096, 4097, 110 * KIB,
    BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 9 * MIB + 12_345,
)  # fmt: skip


class Data:
    """The source's files and where a mount shows them."""

    def __init__(self, place: Place, contents: dict[str, bytes]) -> None:
        self.place = place
        self.contents = contents

    def path(self, name: str) -> Path:
        return self.place.shown / name


@pytest.fixture(scope="module", params=["folder", "blocks", "cluster"])
def data(request: pytest.FixtureRequest, board: Board) -> Iterator[Data]:
    place = board.place(request.param, "bytes")
    rng = random.Random(11)
    contents = {f"f{size}": rng.randbytes(size) for size in SIZES}
    for name, content in contents.items():
        (place.source / name).write_bytes(content)
    if request.param != "cluster":
        place.warm()
    before, opens_before = place.mount.sources(), place.mount.passthrough_opens()
    yield Data(place, contents)
    after = place.mount.sources()
    read = {source: after[source] - before.get(source, 0) for source in after}
    if request.param == "cluster":
        assert read.get("local_block", 0) == 0
        assert read["block_worker"] + read["ufs"] > 0
    elif request.param == "folder" and board.mode.passthrough:
        assert place.mount.passthrough_opens() > opens_before
        assert read.get("local_block", 0) == 0, "the kernel reads what is whole and local"
    else:
        assert read["local_block"] > 0


def drop_pages(path: Path) -> int:
    """Open a file with its pages forgotten, so that reads reach the daemon; the descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor


def test_mount_bytes_whole_tree_equals_the_source(data: Data) -> None:
    """S01: cold and warm."""
    expected = sha256_tree(data.place.source)
    assert sha256_tree(data.place.shown) == expected
    assert sha256_tree(data.place.shown) == expected


def test_mount_bytes_ten_thousand_random_reads_equal_the_source(data: Data) -> None:
    """S01: offset, size and file by chance, past the end too; every 20th read finds the file's pages forgotten."""
    rng = random.Random(5)
    names = list(data.contents)
    descriptors = {name: os.open(data.path(name), os.O_RDONLY) for name in names}
    try:
        for number in range(10_000):
            name = rng.choice(names)
            content, descriptor = data.contents[name], descriptors[name]
            if number % 20 == 0:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(descriptor, 0, 0, rng.choice((os.POSIX_FADV_RANDOM, os.POSIX_FADV_NORMAL)))
            offset = rng.randrange(len(content) + 10_000)
            want = rng.choice((1, 100, 4096, rng.randrange(1, 300_000)))
            assert os.pread(descriptor, want, offset) == content[offset : offset + want], (name, offset, want)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


@pytest.mark.parametrize("size", SIZES)
def test_mount_bytes_reads_around_the_end_of_odd_sizes(data: Data, size: int) -> None:
    """S01; user reports 27 and 29: nothing is short before the end, nothing comes after it."""
    content = data.contents[f"f{size}"]
    descriptor = drop_pages(data.path(f"f{size}"))
    try:
        assert os.fstat(descriptor).st_size == size
        near = {0, 1, size - 4096, size - 1, size, size + 1, size + 4096, size // 2, BLOCK - 1, BLOCK, 2 * BLOCK + 1}
        for offset in sorted(offset for offset in near if offset >= 0):
            for want in (1, 4096, 128 * KIB, MIB):
                assert os.pread(descriptor, want, offset) == content[offset : offset + want], (offset, want)
    finally:
        os.close(descriptor)


def test_mount_bytes_mmap_equals_the_source(data: Data) -> None:
    name = f"f{SIZES[-1]}"
    content = data.contents[name]
    descriptor = drop_pages(data.path(name))
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
            rng = random.Random(3)
            for _ in range(300):
                offset = rng.randrange(len(content))
                assert mapped[offset : offset + 5000] == content[offset : offset + 5000]
            assert bytes(mapped) == content
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [1, 4095, 4097, 4 * BLOCK + 1, 9 * MIB + 12_345])
def test_mount_bytes_direct_reads_with_an_unaligned_tail(data: Data, size: int) -> None:
    """User reports 38 and 50: O_DIRECT in requests larger than any buffer of ours, to an end that is not aligned."""
    content = data.contents[f"f{size}"]
    descriptor = os.open(data.path(f"f{size}"), os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 16 * MIB)
    try:
        got = os.preadv(descriptor, [buffer], 0)
        assert got == size
        assert buffer[:got] == content
        for offset in range(0, size, MIB):
            got = os.preadv(descriptor, [memoryview(buffer)[: 64 * KIB]], offset)
            assert buffer[:got] == content[offset : offset + 64 * KIB]
        assert os.preadv(descriptor, [buffer], (size + 4095) // 4096 * 4096) == 0
    finally:
        buffer.close()
        os.close(descriptor)


def test_mount_bytes_dd_with_direct_four_mebibyte_blocks(data: Data, tmp_path: Path) -> None:
    """User report 38."""
    name = f"f{SIZES[-1]}"
    subprocess.run(
        ["dd", f"if={data.path(name)}", f"of={tmp_path / 'copy'}", "bs=4M", "iflag=direct", "status=none"], check=True
    )
    assert (tmp_path / "copy").read_bytes() == data.contents[name]


def test_mount_bytes_vectored_four_mebibyte_read(data: Data) -> None:
    """User report 38: one preadv into many pieces, 4 MiB at once."""
    name = f"f{SIZES[-1]}"
    content = data.contents[name]
    descriptor = drop_pages(data.path(name))
    pieces = [bytearray(64 * KIB) for _ in range(64)]
    try:
        assert os.preadv(descriptor, pieces, 777) == 4 * MIB
        assert b"".join(pieces) == content[777 : 777 + 4 * MIB]
    finally:
        os.close(descriptor)


def test_mount_bytes_many_processes_read_one_file_at_once(data: Data) -> None:
    """User report 26: no zeros under load."""
    name = f"f{SIZES[-1]}"
    os.close(drop_pages(data.path(name)))
    readers = [subprocess.Popen(["cmp", data.path(name), data.place.source / name]) for _ in range(8)]
    assert [reader.wait() for reader in readers] == [0] * 8


def test_mount_bytes_seeking_past_the_end_and_reading_gives_nothing(data: Data) -> None:
    with open(data.path("f10"), "rb", buffering=0) as file:
        assert file.seek(1 << 40) == 1 << 40
        assert file.read(100) == b""
        with pytest.raises(OSError) as caught:
            file.seek(-1)
        assert caught.value.errno == errno.EINVAL
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 10
