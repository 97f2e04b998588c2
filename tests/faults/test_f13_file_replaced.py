"""F13: a file is replaced while it is open and half of it is cached. Who has it open gets the old version whole or
ESTALE, never a mix; who opens it again gets the new one."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyfuse3
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyfuse3 import FUSEError

from fusecache.daemon import file_context
from fusecache.embedded.server import EmbeddedServer
from fusecache.prefetch import fetcher
from tests.support.below_kernel import BelowKernel, MovableClock, below_kernel, cluster_of
from tests.support.embedded import WireClient, embedded_server

BLOCK_BYTES = 64 << 10
REFRESH_S = 600.0
FIRST_MTIME_S = 1_600_000_000

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block worker that can't find an old version's bytes is named. The daemon asks about the file sooner than it
    does by itself, because each example waits for that."""
    expected_logs("block worker failed|local block file failed", optional=True)
    monkeypatch.setattr(fetcher, "ASK_AFTER_S", 0.2)
    # S03 lets a young listing confirm a file that is fetched whole: a window that would hide every other one here.
    monkeypatch.setattr(file_context, "CONFIRM_AGE_S", 0.0)


class Scene(NamedTuple):
    server: EmbeddedServer
    source: Path
    other: WireClient
    state: Path


@pytest.fixture(scope="module", params=["block files", "network"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, bool]]:
    """A cluster of two block workers with small blocks, and another client of it."""
    base = tmp_path_factory.mktemp("replaced")
    (base / "source").mkdir()
    with (
        embedded_server(base / "source", base / "server", block_workers=2, block_size=BLOCK_BYTES) as server,
        WireClient(server.master_target) as other,
    ):
        yield Scene(server, base / "source", other, base / "state"), request.param == "block files"


class Versions:
    """One file as another client sees it: every version it ever had, by inode."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.folder = b"/d%d" % next(_numbers)
        self.path = self.folder + b"/file"
        self._file = scene.source / self.path.decode().lstrip("/")
        self._file.parent.mkdir()
        self.by_inode: dict[int, bytes] = {}
        self.current: bytes | None = None
        self._count = 0
        self.change("renamed over", 100_000)

    def change(self, how: str, size: int) -> None:
        """Another client makes a new version, and Alluxio notices."""
        self._count += 1
        if how == "removed":
            self._file.unlink(missing_ok=True)
            self.current = None
        else:
            content = bytes([self._count % 251 + 1]) * size
            if how == "renamed over" or not self._file.exists():
                replace(self._file, content, FIRST_MTIME_S + self._count)
            else:
                self._file.write_bytes(content)  # into the same file, which block files may be hard links to
                os.utime(self._file, (FIRST_MTIME_S, FIRST_MTIME_S + self._count))
            self.current = content
        self._scene.other.entries(self.folder, sync_interval_ms=0)
        if self.current is not None:
            info = self._scene.other.stat(self.path)
            assert info.length == size, "Alluxio has not noticed the change"
            assert info.fileId + 1 not in self.by_inode, "a new version under an old id"
            self.by_inode[info.fileId + 1] = self.current


def replace(path: Path, content: bytes, mtime_s: int) -> None:
    """New content under an old name, all at once."""
    fresh = path.parent.parent / f".{path.parent.name}.new"
    fresh.write_bytes(content)
    os.utime(fresh, (FIRST_MTIME_S, mtime_s))
    fresh.replace(path)


READ = st.tuples(st.just("read"), st.integers(0, 130_000), st.integers(1, 130_000))
CHANGE = st.tuples(st.sampled_from(["renamed over", "written into", "removed"]), st.integers(1, 130_000), st.just(0))
OTHER = st.tuples(st.sampled_from(["open", "close", "refresh", "age"]), st.just(0), st.just(0))


@settings(
    max_examples=25, print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
# Pinned. A block that a refused read had made its block worker store was then read from its file, under the old id.
@example(steps=[("open", 0, 0), ("renamed over", 65536, 0), ("read", 0, 1), ("read", 0, 1)])
# Pinned. Bytes that will never come were waited for until the budget ended, and were then EIO.
@example(steps=[("removed", 1, 0), ("read", 0, 1), ("read", 70_000, 1)])
@given(steps=st.lists(st.one_of(READ, READ, CHANGE, OTHER), min_size=4, max_size=16))
async def test_replaced_file_is_old_and_whole_or_estale(
    scene: tuple[Scene, bool], steps: list[tuple[str, int, int]]
) -> None:
    """S01, S02: in any order of reads, changes noticed by Alluxio, refreshes, and time."""
    cluster, local = scene
    versions = Versions(cluster)
    clock = MovableClock()
    async with below_kernel(
        cluster_of(cluster.server, local=local), cluster.state, path=versions.folder, clock=clock,
        refresh_s=REFRESH_S, read_budget_s=20.0, sync_interval_s=0, zero_rpc_reads=local, fetch_bytes=64 << 10,
    ) as mount:  # fmt: skip
        await follow(mount, clock, versions, steps)


async def follow(
    mount: BelowKernel, clock: MovableClock, versions: Versions, steps: list[tuple[str, int, int]]
) -> None:
    """Do the steps, then refresh and open again: that is the newest version."""
    handles: list[int] = [await mount.open(b"/file")]
    for kind, first, second in steps:
        if kind == "read":
            for handle in handles:
                await check(mount, versions, handle, first, second)
        elif kind == "open":
            try:
                handles.append(await mount.open(b"/file"))
            except FileNotFoundError:
                continue
            except FUSEError as failure:
                stale(failure)
        elif kind == "close":
            if handles:
                await mount.release(pyfuse3.FileHandleT(handles.pop(0)))
        elif kind == "refresh":
            await mount.tree.refresh(1, force_sync=True)
        elif kind == "age":
            clock.advance(REFRESH_S + 1)
        else:
            versions.change(kind, first)
    await mount.tree.refresh(1, force_sync=True)
    if versions.current is None:
        with pytest.raises(FileNotFoundError):
            await mount.open(b"/file")
    else:
        handles.append(await mount.open(b"/file"))
        assert await mount.read_all(b"/file") == versions.current
        assert (await mount.stat(b"/file")).st_size == len(versions.current)
    for handle in handles:
        await mount.release(pyfuse3.FileHandleT(handle))


async def check(mount: BelowKernel, versions: Versions, handle: int, offset: int, size: int) -> None:
    """One read of a handle: of its own version, or ESTALE. (fh = inode = version.)"""
    if handle not in versions.by_inode:
        return  # listed while it was being written into: between two versions that are known here
    expected = versions.by_inode[handle][offset : offset + size]
    try:
        got = await mount.read(pyfuse3.FileHandleT(handle), offset, size)
    except FUSEError as failure:
        stale(failure)
        return
    assert got == expected, f"{len(got)} bytes at {offset}: {sorted(set(got))} instead of {sorted(set(expected))}"


def stale(failure: FUSEError) -> None:
    """The only errno that a replaced file may give."""
    assert failure.errno == errno.ESTALE, f"{errno.errorcode[failure.errno]} instead of ESTALE"
