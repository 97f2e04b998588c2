"""Workers answer as the tree does, whatever another client does to it, and keep the promise while agents come and go.

The operations, and the simulated kernel that judges answers, are those of the tree's own test
(`t2_cache.test_against_model`); here each request goes to one of two workers over their sockets.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import trio
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.loader import Loader
from fusecache.cache.record import Entry
from fusecache.cache.tree import ROOT, MetadataTree
from fusecache.daemon.remote_tree import RemoteTree
from fusecache.errors import NotFound, StaleId, Unavailable
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t2_cache.harness import Mounted
from tests.t2_cache.test_against_model import (
    FOLDERS,
    NAMES,
    OPERATIONS,
    PATHS,
    REFRESH_S,
    SETTLE_S,
    STALE_S,
    Kernel,
    apply,
    settle,
)
from tests.t3_operations.remote_rig import SharedMount, Worker, shared_mount

POLICY = FreshnessPolicy(refresh_s=REFRESH_S, stale_if_error_s=STALE_S, negative_s=20.0, refresh_calls_per_s=1000.0)

MORE_OPERATIONS = st.one_of(
    OPERATIONS,
    st.tuples(st.just("grow"), PATHS),
    st.tuples(st.just("complete"), PATHS),
)
STEPS = st.lists(st.tuples(MORE_OPERATIONS, PATHS, FOLDERS), min_size=1, max_size=20)
RESTARTS = st.lists(
    st.tuples(st.one_of(OPERATIONS, st.tuples(st.just("restart"), st.just(()))), PATHS, FOLDERS),
    min_size=1,
    max_size=20,
)

Steps = list[tuple[tuple[Any, ...], tuple[bytes, ...], tuple[bytes, ...]]]


class TwoWorkers:
    """What the kernel asks, each time of the other worker; what is done to the tree goes to the agent's."""

    def __init__(self, mount: SharedMount, workers: list[Worker]) -> None:
        self._mount = mount
        self._turn = itertools.cycle(worker.tree for worker in workers)
        self._last = next(self._turn)

    def hot_child(self, parent: int, name: bytes) -> Entry | None:
        self._last = next(self._turn)
        return self._last.hot_child(parent, name)

    async def lookup(self, parent: int, name: bytes) -> Entry:
        return await self._last.lookup(parent, name)

    async def children(self, inode: int, after: int, limit: int) -> list[Entry]:
        return await next(self._turn).children(inode, after, limit)

    def kernel_timeout_s(self, entry: Entry) -> float:
        return self._last.kernel_timeout_s(entry)

    def negative_timeout_s(self, parent: int) -> float:
        return self._last.negative_timeout_s(parent)

    def path(self, inode: int) -> bytes:
        return self._mount.tree.path(inode)

    async def refresh(self, inode: int, *, force_sync: bool) -> object:
        return await self._mount.tree.refresh(inode, force_sync=force_sync)

    @property
    def _loader(self) -> Loader:
        return self._mount.tree._running()


async def outcome(answer: Callable[[], Awaitable[Any]]) -> object:
    """The answer, or the class of the error."""
    try:
        return await answer()
    except (NotFound, StaleId, Unavailable) as exc:
        return type(exc)


async def listed(tree: MetadataTree | RemoteTree, inode: int) -> list[Entry]:
    entries: list[Entry] = []
    after = 0
    while page := await tree.children(inode, after, 2):
        entries.extend(page)
        after = page[-1].inode
    return entries


async def compare(mount: SharedMount, workers: list[Worker], seen: set[int]) -> None:
    """Every name of every folder that was ever seen: the tree's answer and each worker's."""
    tree = mount.tree
    for inode in sorted(seen):
        told = await outcome(lambda inode=inode: listed(tree, inode))  # type: ignore[misc]
        for worker in workers:
            assert await outcome(lambda inode=inode, w=worker: listed(w.tree, inode)) == told, inode  # type: ignore[misc]
        for name in NAMES:
            entry = await outcome(lambda inode=inode, name=name: tree.lookup(inode, name))  # type: ignore[misc]
            for worker in workers:
                remote = worker.tree
                found = remote.hot_child(inode, name) or await outcome(
                    lambda inode=inode, name=name, remote=remote: remote.lookup(inode, name)  # type: ignore[misc]
                )
                assert found == entry, (inode, name, found, entry)
                if isinstance(entry, Entry):
                    assert isinstance(found, Entry)
                    assert abs(remote.kernel_timeout_s(found) - tree.kernel_timeout_s(entry)) < 1e-3, entry
                    assert await remote.getattr(entry.inode) == entry
                    assert remote.path(entry.inode) == tree.path(entry.inode)
                    assert remote.ufs_path(entry.inode) == tree.ufs_path(entry.inode)
                elif entry is NotFound:
                    assert abs(remote.negative_timeout_s(inode) - tree.negative_timeout_s(inode)) < 1e-3, inode
            if isinstance(entry, Entry) and entry.folder:
                seen.add(entry.inode)
    for inode in seen:
        for worker in workers:
            # A worker may hold on to what it was told for longer; it never calls a living id dead.
            assert tree.superseded(inode) or not worker.tree.superseded(inode)


def change_more(model: AlluxioModel, operation: tuple[Any, ...]) -> None:
    """Files that are being written."""
    path = b"/" + b"/".join(operation[1])
    try:
        if operation[0] == "grow":
            parent, name = model.parent(path)
            if parent.folder and name not in parent.children:
                model.write(path, 3, completed=False)
        else:
            node = model.node(path)
            if not node.folder:
                node.completed, node.length = True, 4
    except (NotFound, KeyError):
        return


async def run_compared(folder: Path, clock: MockClock, steps: Steps, chunk: int) -> None:
    model = AlluxioModel(piece=2)
    kernel: Kernel
    with shared_mount(
        folder, model, clock, policy=POLICY, chunk=chunk, on_change=lambda change: kernel.forget(change)
    ) as mount:
        async with mount.living_agent() as agent, mount.worker(0, hot_entries=3) as first, mount.worker(1) as second:
            workers = [first, second]
            kernel = Kernel(cast(Mounted, MountedWorkers(mount, workers)), clock)
            kernel.record()
            seen = {ROOT}
            for operation, _, _ in steps:
                note(f"{clock.current_time():.3f}: {operation}")
                clock.jump(0.001)  # no two listings are asked for at one moment
                if operation[0] in ("grow", "complete"):
                    change_more(model, operation)
                    kernel.record()
                else:
                    try:
                        await apply(kernel, operation)
                    except (Unavailable, StaleId):
                        note("not now")
                await agent.settled()
                await compare(mount, workers, seen)
                await agent.settled()
                await compare(mount, workers, seen)


class MountedWorkers:
    """`harness.Mounted` with two workers for a tree."""

    def __init__(self, mount: SharedMount, workers: list[Worker]) -> None:
        self.model = mount.model
        self.tree = TwoWorkers(mount, workers)


async def run_restarted(folder: Path, clock: MockClock, steps: Steps, chunk: int) -> None:
    model = AlluxioModel(piece=2)
    kernel: Kernel
    with shared_mount(
        folder, model, clock, policy=POLICY, chunk=chunk, on_change=lambda change: kernel.forget(change)
    ) as mount:
        async with mount.worker(0, hot_entries=3) as first, mount.worker(1) as second:
            kernel = Kernel(cast(Mounted, MountedWorkers(mount, [first, second])), clock)
            kernel.record()
            living = mount.living_agent()
            await living.__aenter__()
            try:
                for operation, path, folder_path in steps:
                    note(f"{kernel.now():.3f}: {operation}, look up {path}, list {folder_path}")
                    clock.jump(0.001)
                    if operation[0] == "restart":
                        if not kernel.outage:
                            await living.__aexit__(None, None, None)
                            living = mount.living_agent()
                            await living.__aenter__()
                        continue
                    try:
                        await apply(kernel, operation)
                        await kernel.walk(path)
                        await kernel.list_folder(folder_path)
                    except Unavailable:
                        assert kernel.outage or kernel.now() - kernel.outage_ended < SETTLE_S
                    await settle(kernel)
            finally:
                await living.__aexit__(None, None, None)


@settings(max_examples=25)
@given(STEPS, st.sampled_from([1, 8192]))
@example(
    # A file is being written, listed meanwhile, and done.
    steps=[
        (("mkdir", (b"a",)), (), ()),
        (("grow", (b"a", b"b")), (), ()),
        (("refresh", (b"a",)), (), ()),
        (("write", (b"a", b"c")), (), ()),
        (("complete", (b"a", b"b")), (), ()),
        (("advance", 5.0), (), ()),
        (("refresh", (b"a",)), (), ()),
    ],
    chunk=8192,
)
def test_workers_answer_as_the_tree_does(steps: Steps, chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = MockClock()
        trio.run(run_compared, Path(folder), clock, steps, chunk, clock=clock)


@settings(max_examples=25)
@given(RESTARTS, st.sampled_from([1, 8192]))
@example(
    # A folder that is not listed when its agent ends.
    steps=[
        (("mkdir", (b"a",)), (b"a",), ()),
        (("write", (b"a", b"b")), (b"a", b"b"), ()),
        (("restart", ()), (), ()),
        (("write", (b"a", b"b")), (b"a", b"b"), (b"a",)),
        (("restart", ()), (), ()),
        (("advance", 101.0), (b"a", b"b"), (b"a",)),
    ],
    chunk=8192,
)
def test_mount_keeps_its_promise_while_agents_come_and_go(steps: Steps, chunk: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = MockClock()
        trio.run(run_restarted, Path(folder), clock, steps, chunk, clock=clock)
