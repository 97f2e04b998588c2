"""A metadata tree over the in-memory Alluxio, under trio's MockClock."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing

from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.listing_diff import Change
from fusecache.cache.record import Entry
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import ROOT, MetadataTree
from fusecache.metrics import Metrics
from tests.t2_cache.alluxio_model import AlluxioModel

REFRESH_S = 100.0


class TestClock:
    """Seconds of a MockClock, from a moment well after boot; readable from any thread."""

    __test__ = False

    def __init__(self, mock: trio.testing.MockClock) -> None:
        self._mock = mock

    def now(self) -> float:
        return 10_000.0 + self._mock.current_time()

    def sleep(self, seconds: float) -> None:
        raise AssertionError("the cache never blocks a thread on time")


class Asking:
    """What the kernel does with a tree, or with a worker's view of one."""

    tree: Any

    async def walk(self, path: bytes) -> Entry:
        """As the kernel does: name by name from the root."""
        entry = await self.tree.getattr(ROOT)
        for name in [part for part in path.split(b"/") if part]:
            entry = self.tree.hot_child(entry.inode, name) or await self.tree.lookup(entry.inode, name)
        return entry

    async def list_all(self, inode: int, page: int = 7) -> list[Entry]:
        """Every page of a folder."""
        entries: list[Entry] = []
        after = 0
        while found := await self.tree.children(inode, after, page):
            entries.extend(found)
            after = found[-1].inode
        return entries


class Mounted(Asking):
    """One tree in use."""

    def __init__(self, tree: MetadataTree, store: MetadataStore, model: AlluxioModel, metrics: Metrics) -> None:
        self.tree = tree
        self.store = store
        self.model = model
        self.metrics = metrics
        self.changes: list[Change] = []

    def count(self, name: str) -> float:
        """A metric's value, 0 when it never moved."""
        return self.metrics.snapshot().get(name, 0.0)


@asynccontextmanager
async def mounted(
    folder: Path,
    model: AlluxioModel,
    mock_clock: trio.testing.MockClock,
    *,
    root_path: bytes = b"/",
    policy: FreshnessPolicy | None = None,
    chunk: int = 8192,
    map_bytes: int = 64 << 20,
    boot: str = "boot-1",
    cluster: str = "cluster-1",
    threads: int = 4,
    hot_entries: int = 1000,
    on_change: Callable[[Change], None] | None = None,
) -> AsyncIterator[Mounted]:
    """A running tree whose root is resolved; closed with everything it started."""
    metrics = Metrics()
    with MetadataStore(folder, cluster, root_path=root_path, map_bytes=map_bytes, boot=boot) as store:
        use: Mounted

        def changed(change: Change) -> None:
            use.changes.append(change)
            if on_change is not None:
                on_change(change)

        tree = MetadataTree(
            store,
            root_path=root_path,
            list_folder=model.list_folder,
            get_status=model.get_status,
            policy=policy or FreshnessPolicy(refresh_s=REFRESH_S, stale_if_error_s=1000.0, negative_s=20.0),
            clock=TestClock(mock_clock),
            rng=random.Random(7),
            metrics=metrics,
            limiter=trio.CapacityLimiter(threads),
            on_change=changed,
            hot_entries=hot_entries,
            chunk=chunk,
        )
        use = Mounted(tree, store, model, metrics)
        async with trio.open_nursery() as nursery:
            await nursery.start(tree.run)
            try:
                await tree.start()
                yield use
            finally:
                nursery.cancel_scope.cancel()
