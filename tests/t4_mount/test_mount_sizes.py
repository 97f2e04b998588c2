"""Files around 2^31 and 2^32 bytes: offsets and lengths that do not fit where somebody once thought they would."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fusecache.pb.alluxio.block_worker_pb2 import CacheRequest
from tests.support.embedded import WireClient, read_request
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board, Place, started
from tests.t4_mount.live_mount import eventually

pytestmark = needs_fuse
shared_mounts = started("large", "uncached")

SIZES = (2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1)
MARK = 64 << 10
"""Bytes around each edge that are not zeros."""


class Large(NamedTuple):
    """A sparse file and where the mount shows it."""

    place: Place
    size: int
    content: int
    """A descriptor of the source, which may have lost its name."""

    @property
    def path(self) -> str:
        return str(self.place.shown / f"f{self.size}")

    def edges(self) -> list[int]:
        """Offsets where something could go wrong."""
        interesting = (0, 2**31, 2**32, self.size)
        return sorted(
            {edge + by for edge in interesting for by in (-4096, -1, 0, 1, 4096) if 0 <= edge + by <= self.size + 4096}
        )


def make(place: Place, size: int) -> int:
    """The file, nearly all of it holes; a descriptor of it."""
    rng = random.Random(size)
    descriptor = os.open(place.source / f"f{size}", os.O_RDWR | os.O_CREAT)
    for edge in (0, 2**31, 2**32, size):
        start = max(0, edge - MARK // 2)
        os.pwrite(descriptor, rng.randbytes(min(MARK, max(0, size - start))), start)
    os.ftruncate(descriptor, size)
    return descriptor


def make_local(master: str, path: str) -> None:
    """Have the block worker keep the only block of a file, as another client's request, without reading it."""
    with WireClient(master) as client:
        info = client.stat(os.fsencode(path))
        host, _, port = client.worker_targets()[0].partition(":")
        with WireClient(f"{host}:{port}") as worker:
            request = CacheRequest(
                block_id=info.blockIds[0],
                length=info.length,
                source_host=host.encode(),
                source_port=int(port),
                open_ufs_block_options=read_request(info).open_ufs_block_options,
            )
            worker.worker.Cache(request, metadata=worker.metadata)


@pytest.fixture(scope="module", params=SIZES)
def large(request: pytest.FixtureRequest, board: Board) -> Iterator[Large]:
    """One block, a hard link to the source: nobody copies gigabytes.

    In passthrough mode the source loses its name, so that the block file has one only.
    """
    place = board.place("large", "sizes")
    found = Large(place, request.param, make(place, request.param))
    try:
        make_local(board.cluster("large").master, f"/{place.path}/f{found.size}")

        def seen() -> bool:
            descriptor = os.open(found.path, os.O_RDONLY)
            try:
                os.pread(descriptor, 1, 0)  # the first one shows the mount where the block worker keeps its blocks
            finally:
                os.close(descriptor)
            return int(os.getxattr(found.path, "user.fusecache.local_bytes")) == found.size

        # Listed, once and for all: a look-up alone would be answered before the listing that it asks for is made.
        assert f"f{found.size}" in os.listdir(place.shown)
        if board.mode.passthrough:
            os.unlink(place.source / f"f{found.size}")  # before anybody sees that the block file had two names
        eventually(seen, "the mount sees the block file")
        yield found
    finally:
        os.close(found.content)


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_mount_sizes_reads_around_the_edges_are_exact(board: Board, large: Large, flags: int) -> None:
    """S01: before, at and behind 2^31, 2^32 and the end; nothing comes after the end."""
    opens_before = large.place.mount.passthrough_opens()
    descriptor = os.open(large.path, os.O_RDONLY | flags)
    try:
        assert os.fstat(descriptor).st_size == os.lseek(descriptor, 0, os.SEEK_END) == large.size
        assert large.place.mount.passthrough_opens() - opens_before == (1 if board.mode.passthrough else 0)
        with mmap.mmap(-1, 1 << 20) as memory:
            for offset in large.edges():
                if flags:
                    offset &= ~4095
                for want in (4096, 128 << 10, 1 << 20):
                    got = os.preadv(descriptor, [memoryview(memory)[:want]], offset)
                    assert memory[:got] == os.pread(large.content, want, offset), (offset, want)
    finally:
        os.close(descriptor)


def test_mount_sizes_mapped_around_the_edges_are_exact(large: Large) -> None:
    descriptor = os.open(large.path, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
            for offset in large.edges():
                assert mapped[offset : offset + 8192] == os.pread(large.content, 8192, offset), offset
    finally:
        os.close(descriptor)


def test_mount_sizes_many_blocks_through_streams(board: Board) -> None:
    """32,769 blocks in one file, read around their edges."""
    place = board.place("uncached", "many-blocks")
    large = Large(place, 2**31 + 1, make(place, 2**31 + 1))
    try:
        descriptor = os.open(large.path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for offset in large.edges():
                assert os.pread(descriptor, 8192, offset) == os.pread(large.content, 8192, offset), offset
        finally:
            os.close(descriptor)
    finally:
        os.close(large.content)
