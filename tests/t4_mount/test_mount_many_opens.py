"""User report 45, days of opens: nothing grows in the daemon, and more files are open than it keeps open itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board
from tests.t4_mount.live_mount import LiveMount, eventually

pytestmark = needs_fuse

BLOCK = 64 << 10


class Small:
    """300 small files, mounted with room for 32 open block files."""

    def __init__(self, mount: LiveMount, contents: dict[str, bytes]) -> None:
        self.mount = mount
        self.files = [(os.fsencode(mount.root / name), content) for name, content in contents.items()]


@pytest.fixture(scope="module")
def small(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    source = board.new_source("small")
    contents = {f"f{number}": os.urandom(1000 + number) for number in range(300)}
    for name, content in contents.items():
        (source / name).write_bytes(content)
    with board.own(source, tmp_path_factory.mktemp("small"), "--max-open-blocks", "32") as mount:
        yield Small(mount, contents)


def test_mount_many_opens_thousands_of_opens_leave_nothing_in_the_daemon(board: Board, small: Small) -> None:
    """User report 45: descriptors, memory and open files are the same after 9,000 opens as after the first few."""
    mount = small.mount

    def read_all(*, forget: bool) -> None:
        for path, content in small.files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if forget:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.read(descriptor, 5000) == content
            finally:
                os.close(descriptor)

    def closed() -> bool:
        # Where no close reaches the daemon it keeps what it last read, bounded as the descriptors below show.
        return not board.mode.opens_reach_the_daemon or mount.metrics()["fusecache_open_files"] == 0

    for _ in range(5):
        read_all(forget=True)
    eventually(closed, "all released")
    descriptors, resident = len(mount.descriptors()), mount.resident_bytes()
    opens = mount.metrics().get("fusecache_requests_total{op=open}", 0)
    for turn in range(30):
        read_all(forget=turn % 2 == 0)
    if board.mode.opens_reach_the_daemon:
        assert mount.metrics()["fusecache_requests_total{op=open}"] - opens == 30 * len(small.files)
    eventually(closed, "all released again")
    eventually(lambda: len(mount.descriptors()) <= descriptors + 5, "descriptors given back")
    assert mount.resident_bytes() < resident + (16 << 20)


def test_mount_many_opens_more_open_files_than_block_files_kept_open(
    board: Board, small: Small, expected_logs: Callable[..., None]
) -> None:
    """User report 45: all of them are right."""
    # In classic mode the mount's end may meet the last RELEASE, whose answer nobody waits for any more.
    expected_logs(r"fuse_release\(\): fuse_reply_\* failed", optional=True)
    opened = [os.open(path, os.O_RDONLY) for path, _ in small.files]
    try:
        for _ in range(2):
            for descriptor, (_, content) in zip(opened, small.files, strict=True):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                assert os.pread(descriptor, 5000, 0) == content
        block_files = sum("alluxioworker" in target for target in small.mount.descriptors())
        assert block_files <= 40 * len(small.mount.pids())
        assert block_files or board.mode.passthrough
    finally:
        for descriptor in opened:
            os.close(descriptor)
