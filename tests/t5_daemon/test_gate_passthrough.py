"""Passthrough with the real kernel: who reads the bytes, and that an inode stays as it was opened, whoever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusecache.kernel import features, probe
from tests.support import stand_in_worker
from tests.support.mounting import needs_fuse
from tests.support.stand_in_worker import NAMES
from tests.support.supervised import WAIT_S, Supervised, runs, until

FEATURES = probe.probe()

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(not FEATURES.usable("mount"), reason=f"no mount(2) here: {FEATURES['mount'].why}"),
    pytest.mark.skipif(not FEATURES.usable("passthrough"), reason=f"no passthrough: {FEATURES['passthrough'].why}"),
]

FROM_WORKER = stand_in_worker.CONTENT
FROM_BLOCK = bytes(reversed(FROM_WORKER))
FROM_LATER_BLOCK = bytes(len(FROM_WORKER))

HOLD = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
if sys.argv[2] == "mapped":
    os.close(descriptor)
print("held", flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(mapping[:])
"""


class Mount(Supervised):
    """A mount in passthrough mode whose workers offer what the folder `blocks` holds."""

    def __init__(self, folder: Path, features_: features.Features) -> None:
        super().__init__(
            folder,
            features_,
            open_mode="passthrough",
            worker_argv=(sys.executable, "-S", "-m", "tests.support.passthrough_worker"),
            environment={
                "FUSECACHE_STAND_IN": str(folder / "orders"),
                "FUSECACHE_STAND_IN_MODE": "passthrough",
            },
        )
        self.blocks = self.orders / "blocks"
        self.blocks.mkdir()

    def block(self, name: bytes, content: bytes) -> Path:
        """Put a block file in place of the one there was, as a block worker does: another file under the name."""
        path = self.blocks / str(NAMES[name])
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.rename(path)
        return path

    def asked(self) -> int:
        """OPENs that reached workers."""
        log = self.blocks / "opens"
        return log.stat().st_size // 8 if log.exists() else 0

    def content(self, name: str) -> bytes:
        """The file, read in a child that may fail."""
        done = self.read(name, cold=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_part(self, part: str) -> None:
        """SIGKILL, and see it gone."""
        pid = self.parts()[part]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not runs(pid), f"{part} is dead")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    with Mount(tmp_path, FEATURES) as made:
        made.start()
        assert made.report == b"ready\n"
        yield made


@contextlib.contextmanager
def held(mount: Mount, name: str, how: str) -> Iterator[Callable[[], bytes]]:
    """A process that keeps a file open, or only mapped; gives what ends it and returns what it sees then."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(mount.mountpoint / name), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"

    def end() -> bytes:
        return process.communicate(b"\n", timeout=WAIT_S)[0]

    try:
        yield end
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_the_kernel_reads_the_offered_file_and_asks_a_worker_once(mount: Mount) -> None:
    mount.block(b"file", FROM_BLOCK)
    for _ in range(3):
        assert mount.content("file") == FROM_BLOCK
    assert mount.asked() == 1
    assert mount.read("file").stdout == FROM_BLOCK  # O_DIRECT


def test_without_an_offer_workers_read(mount: Mount) -> None:
    assert mount.content("file") == FROM_WORKER
    assert mount.content("file") == FROM_WORKER
    assert mount.asked() == 2


def test_a_block_with_a_second_name_is_not_read_by_the_kernel(mount: Mount) -> None:
    block = mount.block(b"file", FROM_BLOCK)
    os.link(block, mount.blocks / "another name")
    assert mount.content("file") == FROM_WORKER


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_is_gone_keeps_the_mode_of_its_inode(
    mount: Mount, how: str, expected_logs: Callable[..., None]
) -> None:
    expected_logs("a worker ended")
    block = mount.block(b"file", FROM_BLOCK)
    with held(mount, "file", how) as end:
        block.unlink()
        for index in range(2):
            mount.kill_part(f"worker {index}")
        assert mount.content("file") == FROM_BLOCK
        assert mount.asked() == 1
        assert end() == FROM_BLOCK


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_comes_later_waits_for_the_last_release(mount: Mount, how: str) -> None:
    with held(mount, "file", how) as end:
        mount.block(b"file", FROM_BLOCK)
        assert mount.content("file") == FROM_WORKER
        assert end() == FROM_WORKER
    assert mount.content("file") in (FROM_WORKER, FROM_BLOCK)
    until(lambda: mount.content("file") == FROM_BLOCK, "after the last release the offer counts")


def test_a_gate_that_dies_leaves_open_files_as_they_were(mount: Mount, expected_logs: Callable[..., None]) -> None:
    expected_logs("the gate ended; requests in flight are", count=1)
    mount.block(b"file", FROM_BLOCK)
    with held(mount, "file", "open") as end:
        assert mount.asked() == 1
        mount.kill_part("gate")
        assert mount.content("file") == FROM_BLOCK
        assert mount.asked() == 1  # the next gate's table knows it
        assert end() == FROM_BLOCK
    assert mount.content("file") == FROM_BLOCK


def test_an_invalidated_inode_is_asked_for_again(mount: Mount) -> None:
    mount.block(b"slow", FROM_BLOCK)
    assert mount.content("slow") == FROM_BLOCK
    mount.block(b"slow", FROM_LATER_BLOCK)
    assert mount.content("slow") == FROM_BLOCK  # registered still: nobody said that it changed
    (mount.orders / "invalidate").touch()
    until((mount.orders / "invalidated").exists, "the push has returned")
    assert mount.content("slow") == FROM_LATER_BLOCK
    assert mount.asked() == 2
