"""What users of such systems reported and no other file here covers: unfinished files, Ctrl-C, days of opens."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.embedded.faults import FaultPlan
from tests.support.embedded import embedded_server
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import Board
from tests.t4_mount.live_mount import LiveMount, errno_of, eventually

pytestmark = needs_fuse

BLOCK = 64 << 10


class Unfinished:
    """Makes the server say of one file that its writer has it open still."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.active = True
        self.said = 0

    def __call__(self, method: str, answer: Any) -> Any:
        if not self.active:
            return answer
        infos = answer.fileInfos if method == "ListStatus" else [answer.fileInfo] if method == "GetStatus" else []
        for info in infos:
            if info.name == self.name:
                self.said += 1
                info.completed = False
                info.length = 0
                info.ClearField("blockIds")
                info.ClearField("fileBlockInfos")
        return answer


def test_mount_reports_unfinished_file_is_listed_and_opens_once_it_is_finished(board: Board, tmp_path: Path) -> None:
    """S10; user report 32: listing takes no longer for it, opening is EBUSY, nothing is logged, nothing is kept."""
    source = board.new_source()
    for name in ("before", "unfinished", "z"):
        (source / name).write_bytes(b"content of " + name.encode())
    unfinished = Unfinished(b"unfinished")
    with (
        embedded_server(source, tmp_path / "embedded", rewrite=unfinished) as server,
        board.own(f"alluxio://{server.master_target}/", tmp_path) as mount,
    ):
        assert sorted(os.listdir(mount.root)) == ["before", "unfinished", "z"]
        assert subprocess.run(["ls", "-l", mount.root], capture_output=True, check=True).stderr == b""
        assert unfinished.said > 0
        path = mount.root / "unfinished"
        assert os.stat(path).st_size == 0
        for _ in range(5):
            assert errno_of(path.read_bytes) == errno.EBUSY
        assert (mount.root / "before").read_bytes() == b"content of before"
        asked = mount.rpcs()["GetStatus"]
        for _ in range(200):
            os.stat(path)
        assert mount.rpcs()["GetStatus"] - asked <= 50, "asked again at most once a second"
        unfinished.active = False
        eventually(lambda: os.stat(path).st_size > 0, "finished")
        assert path.read_bytes() == b"content of unfinished"
        assert "traceback" not in mount.mount.stderr().lower()
        assert '"level": "warning"' not in mount.mount.stderr()


def test_mount_reports_interrupted_copy_poisons_nothing(board: Board, tmp_path: Path) -> None:
    """User report 55: Ctrl-C in the middle of cp; then listing and reading are as ever."""
    source = board.new_source()
    content = os.urandom(40 * BLOCK)
    (source / "big").write_bytes(content)
    plan = FaultPlan()
    rule = plan.on("ReadBlock", nth=8, times=2).delay(2.0)
    with (
        embedded_server(source, tmp_path / "embedded", block_size=BLOCK, faults=plan) as server,
        board.own(f"alluxio://{server.master_target}/", tmp_path, "--no-zero-rpc-reads") as mount,
    ):
        copy = subprocess.Popen(["cp", mount.root / "big", tmp_path / "copy"])
        try:
            eventually(lambda: rule.injected > 0, "cp waits for bytes")
            assert copy.poll() is None
            copy.send_signal(signal.SIGINT)
            assert copy.wait(60) == -signal.SIGINT
        finally:
            copy.kill()
            copy.wait()
        assert os.listdir(mount.root) == ["big"]
        assert errno_of(lambda: os.stat(mount.root / "missing")) == errno.ENOENT
        assert (mount.root / "big").read_bytes() == content


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


def test_mount_reports_thousands_of_opens_leave_nothing_in_the_daemon(board: Board, small: Small) -> None:
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


def test_mount_reports_more_open_files_than_block_files_kept_open(board: Board, small: Small) -> None:
    """User report 45: all of them are right."""
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
