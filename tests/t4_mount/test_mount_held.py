"""Reads whose bytes do not come yet, and files that are not finished yet: signals, Ctrl-C, kills, other files, refresh.

The mount does not look at block files, and its server holds answers back when told to.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.embedded import replace
from tests.support.mounting import needs_fuse
from tests.t4_mount.board import BLOCK, Board
from tests.t4_mount.live_mount import LiveMount, errno_of, eventually
from tests.t4_mount.switched_server import SwitchedServer

pytestmark = needs_fuse

HELD_S = 1.5


class Held(NamedTuple):
    """A cluster with switches, and its mount."""

    mount: LiveMount
    server: SwitchedServer

    @property
    def source(self) -> Path:
        """What the cluster serves."""
        return self.server.folder


@pytest.fixture(scope="module")
def cluster(board: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    folder = tmp_path_factory.mktemp("held")
    with (
        SwitchedServer(board.new_source("held"), folder / "embedded") as server,
        board.own(server.url, folder, "--no-zero-rpc-reads", "--refresh-s", "6h") as mount,
    ):
        yield Held(mount, server)


@pytest.fixture
def held(cluster: Held) -> Iterator[Held]:
    """Without faults left from another test."""
    cluster.server.clear()
    yield cluster
    cluster.server.clear()


def file(held: Held, name: str, content: bytes) -> Path:
    """A new file, where the mount shows it."""
    folder = held.source / name
    folder.mkdir()
    (folder / "f").write_bytes(content)
    held.mount.refresh()
    return held.mount.root / name / "f"


def test_mount_held_unfinished_file_is_listed_and_opens_once_it_is_finished(board: Board, held: Held) -> None:
    """S10, S33; user report 32: listing takes no longer for it, opening is EBUSY, nothing is logged or kept."""
    mount = held.mount
    said_before = held.server.say_unfinished(True)
    folder = file(held, "writer", b"before").parent
    for name in ("unfinished", "z"):
        (held.source / "writer" / name).write_bytes(b"content of " + name.encode())
    mount.refresh("writer")
    assert sorted(os.listdir(folder)) == ["f", "unfinished", "z"]
    assert subprocess.run(["ls", "-l", folder], capture_output=True, check=True).stderr == b""
    assert held.server.say_unfinished(True) > said_before
    path = folder / "unfinished"
    # Where no open reaches the daemon, an empty file would not be read either.
    assert os.stat(path).st_size == (1 if board.mode.served == "no-open" else 0)
    for _ in range(5):
        assert errno_of(path.read_bytes) == errno.EBUSY
    assert (folder / "f").read_bytes() == b"before"
    asked = mount.rpcs()["GetStatus"]
    for _ in range(200):
        os.stat(path)
    assert mount.rpcs()["GetStatus"] - asked <= 50, "asked again at most once a second"
    held.server.say_unfinished(False)
    eventually(lambda: os.stat(path).st_size == 21, "finished")
    assert path.read_bytes() == b"content of unfinished"


def test_mount_held_interrupted_copy_poisons_nothing(held: Held, tmp_path: Path) -> None:
    """User report 55: Ctrl-C in the middle of cp; then listing and reading are as ever."""
    content = os.urandom(40 * BLOCK)
    path = file(held, "copied", content)
    rule = held.server.hold(HELD_S, nth=8, times=2)
    copy = subprocess.Popen(["cp", path, tmp_path / "copy"])
    try:
        eventually(lambda: rule.injected > 0, "cp waits for bytes")
        assert copy.poll() is None
        copy.send_signal(signal.SIGINT)
        assert copy.wait(60) == -signal.SIGINT
    finally:
        copy.kill()
        copy.wait()
    assert os.listdir(path.parent) == ["f"]
    assert errno_of(lambda: os.stat(path.parent / "missing")) == errno.ENOENT
    assert path.read_bytes() == content


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_mount_held_signals_with_handlers_do_not_cut_a_read(held: Held, flags: int) -> None:
    """A profiler's SIGALRM a thousand times a second while bytes are waited for: all bytes, or EINTR and none."""
    content = os.urandom(4 * BLOCK)
    path = file(held, f"signals{flags}", content)
    rule = held.server.hold(1.0, nth=1)
    handled = 0

    def handler(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1

    libc = ctypes.CDLL(None, use_errno=True)  # Python's own read would go on after EINTR, and hide it
    libc.pread.restype = ctypes.c_ssize_t
    libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
    descriptor = os.open(path, os.O_RDONLY | flags)
    old = signal.signal(signal.SIGALRM, handler)
    signal.siginterrupt(signal.SIGALRM, True)
    try:
        with mmap.mmap(-1, 4 * BLOCK) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            offset = tries = 0
            while offset < len(content):
                tries += 1
                assert tries < 100_000, "signals let no read through"
                got = libc.pread(descriptor, address + offset, BLOCK, offset)
                if got < 0:
                    assert ctypes.get_errno() == errno.EINTR
                    continue
                assert got == BLOCK, "a read was cut short"
                offset += got
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert memory[:] == content
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        os.close(descriptor)
    assert rule.injected == 1, "no read was held, so nothing was tested"
    assert handled > 0


def test_mount_held_reader_that_is_killed_ends(held: Held) -> None:
    """User report 40: SIGKILL while bytes are waited for: at once, or past the page cache when they have come.

    The kernel does not give up a request that the daemon has, unless it is for its own pages.
    """
    content = os.urandom(4 * BLOCK)
    paths = {flag: file(held, f"killed-{flag}", content) for flag in ("fullblock", "direct")}
    rule = held.server.hold(3.0, times=2)
    readers = [
        subprocess.Popen(["dd", f"if={path}", "of=/dev/null", "bs=64K", f"iflag={flag}", "status=none"])
        for flag, path in paths.items()
    ]
    try:
        eventually(lambda: rule.injected == 2, "reads are held")
        assert [reader.poll() for reader in readers] == [None, None]
        for reader in readers:
            reader.kill()
        assert readers[0].wait(2.5) == -signal.SIGKILL
        assert readers[1].wait(8.0) == -signal.SIGKILL
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    held.server.clear()
    assert [path.read_bytes() == content for path in paths.values()] == [True, True]


def test_mount_held_read_holds_up_nobody_else(held: Held) -> None:
    """While one file's bytes do not come: other files, attributes, listings and df of the same mount do."""
    path = file(held, "stuck", os.urandom(BLOCK))
    other = file(held, "quick", b"quick")
    rule = held.server.hold(HELD_S, nth=1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(path.read_bytes)
        eventually(lambda: rule.injected > 0, "a read is held")
        assert other.read_bytes() == b"quick"
        assert os.listdir(path.parent) == ["f"]
        assert os.stat(path).st_size == BLOCK
        assert errno_of(lambda: os.stat(path.parent / "none")) == errno.ENOENT
        os.statvfs(path)
        assert not reading.done(), "the read had ended, so nothing was tested"
        assert reading.result(60) == (held.source / "stuck" / "f").read_bytes()


def test_mount_held_refresh_shows_changes_while_a_read_waits(held: Held) -> None:
    """S02, S06, S37: pushes into the kernel wait for the READ of a replaced file; nothing else waits with them.

    The kernel takes an invalidation of an inode's pages only when its READs have ended.
    """
    old, new = os.urandom(4 * BLOCK), os.urandom(3 * BLOCK)
    path = file(held, "replaced", old)
    for name, data in (("b", b"old b"), ("gone", b"gone")):
        (held.source / "replaced" / name).write_bytes(data)
    held.mount.refresh("replaced")
    folder, source = path.parent, held.source / "replaced"
    assert sorted(os.listdir(folder)) == ["b", "f", "gone"]
    assert (folder / "b").read_bytes() == b"old b"
    assert errno_of(lambda: os.stat(folder / "added")) == errno.ENOENT
    rule = held.server.hold(HELD_S, nth=1)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(os.pread, descriptor, BLOCK, 0)
            eventually(lambda: rule.injected > 0, "a read is held")
            replace(source / "f", new)
            replace(source / "b", b"new b, longer")
            (source / "added").write_bytes(b"added")
            os.unlink(source / "gone")
            held.mount.refresh("replaced")
            assert not reading.done(), "the read had ended, so nothing was tested"

            def all_new() -> bool:
                return (
                    sorted(os.listdir(folder)) == ["added", "b", "f"]
                    and (folder / "b").read_bytes() == b"new b, longer"
                    and (folder / "added").read_bytes() == b"added"
                    and os.stat(path).st_size == len(new)
                )

            eventually(all_new, "everything that changed is shown")
            got: list[bytes] = []
            assert errno_of(lambda: got.append(reading.result(60))) in (0, errno.ESTALE)
            assert got in ([], [old[:BLOCK]]), "the old version, or an error"
    finally:
        os.close(descriptor)
    eventually(lambda: path.read_bytes() == new, "the new version")


TOUCH_PAGES = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
os.close(descriptor)
half = len(mapped) // 2 // 4096 * 4096
sys.stdout.buffer.write(mapped[:half])
sys.stdout.flush()
sys.stdin.readline()
sys.stdout.buffer.write(mapped[:])
"""


def test_mount_held_mapped_file_that_is_replaced_is_old_or_a_bus_error(held: Held) -> None:
    """S02, mapped by 4 processes: the old version's pages, or SIGBUS where ESTALE can't be said; never new ones."""
    old, new = os.urandom(8 * BLOCK), os.urandom(8 * BLOCK)
    path = file(held, "mapped", old)
    readers = [
        subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", TOUCH_PAGES, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.read(4 * BLOCK) == old[: 4 * BLOCK]
        replace(held.source / "mapped" / "f", new)
        held.mount.refresh("mapped")
        assert path.read_bytes() == new
        for reader in readers:
            rest, _ = reader.communicate(b"\n", timeout=60)
            assert reader.returncode in (0, -signal.SIGBUS)
            assert rest == (old if reader.returncode == 0 else b"")
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert path.read_bytes() == new
