"""A tree with its service, and workers' views of it over a real socket, in one trio run over the in-memory Alluxio.

The board is a real memfd. LMDB can't be opened twice in one process, so the workers here read through the writer's own
environment; that another process can read it is `test_read_only_store`'s.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from fusecache.cache import store as store_module
from fusecache.cache.board import BoardReader, BoardWriter
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.listing_diff import Change
from fusecache.cache.read_only_store import ReadOnlyStore
from fusecache.cache.store import MetadataStore
from fusecache.cache.tables import Tables
from fusecache.cache.tree import MetadataTree
from fusecache.daemon.metadata_service import MetadataService
from fusecache.daemon.remote_tree import RemoteTree
from fusecache.metrics import Metrics
from tests.t2_cache.alluxio_model import AlluxioModel
from tests.t2_cache.harness import Asking, TestClock

REFRESH_S = 100.0
BOOT = "boot-1"
POLICY = FreshnessPolicy(refresh_s=REFRESH_S, stale_if_error_s=1000.0, negative_s=20.0)


class SameProcessStore(ReadOnlyStore):
    """Reads through the environment of the writer in this process."""

    def __init__(self, mount: SharedMount) -> None:
        self._mount = mount
        super().__init__(boot=BOOT)

    def _open(self, path: Path, map_bytes: int) -> lmdb.Environment:
        return self._mount.environment(map_bytes)

    def _open_tables(self, environment: lmdb.Environment, namespace: str) -> Tables:
        return self._mount.tables[namespace]  # to open them again would wait for the writer's transaction

    def _release(self, environment: lmdb.Environment) -> None:
        """It is the writer's."""


class Agent:
    """One life of the agent."""

    def __init__(self, mount: SharedMount) -> None:
        self.mount = mount
        self.metrics = Metrics()
        self.healed: list[int] = []
        self.listed_again: list[int] = []
        self.board = BoardWriter(mount.board_fd)
        self.store = MetadataStore(
            mount.store_folder, mount.cluster, root_path=mount.root_path, map_bytes=64 << 20, boot=BOOT
        )
        mount.tables[self.store.namespace] = self.store.tables
        self.tree = MetadataTree(
            self.store,
            root_path=mount.root_path,
            list_folder=mount.model.list_folder,
            get_status=mount.model.get_status,
            policy=mount.policy,
            clock=mount.clock,
            rng=random.Random(7),
            metrics=self.metrics,
            limiter=trio.CapacityLimiter(4),
            on_change=mount.on_change,
            chunk=mount.chunk,
            board=self.board,
        )
        self.service = MetadataService(
            mount.socket,
            self.tree,
            self.store,
            metrics=self.metrics,
            metadata_budget_s=mount.budget_s,
            on_stale_read=self._heal,
            list_again=self.listed_again.append,
            extra={"echo": self._echo},
        )

    async def settled(self) -> None:
        """No listing or question is running; under a mock clock they take no time."""
        loader = self.tree._running()
        while True:
            await wait_all_tasks_blocked()
            if not len(loader._listings) and not len(loader._questions):
                return
            await trio.to_thread.run_sync(lambda: None)

    async def _heal(self, inode: int) -> None:
        self.healed.append(inode)

    async def _echo(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"said": question["text"]}


class SharedMount:
    """What outlives an agent: the model, the board, the workers."""

    agent: Agent | None = None

    def __init__(
        self,
        folder: Path,
        model: AlluxioModel,
        mock_clock: MockClock,
        *,
        policy: FreshnessPolicy,
        chunk: int,
        budget_s: float,
        on_change: Callable[[Change], None],
        root_path: bytes,
    ) -> None:
        self.store_folder = folder / "metadata"
        self.model = model
        self.mock_clock = mock_clock
        self.clock = TestClock(mock_clock)
        self.policy = policy
        self.chunk = chunk
        self.budget_s = budget_s
        self.on_change = on_change
        self.root_path = root_path
        self.cluster = "cluster-1"
        self.socket = folder / "run" / "agent.sock"
        self._environment: lmdb.Environment | None = None
        self.tables: dict[str, Tables] = {}
        self.workers: list[RemoteTree] = []
        self.board_fd = os.memfd_create("board")

    @property
    def tree(self) -> MetadataTree:
        assert self.agent is not None
        return self.agent.tree

    def environment(self, map_bytes: int) -> lmdb.Environment:
        """The writer's, which stays open when it is gone, as another process's own would."""
        if self._environment is None:
            self._environment = store_module._share_environment(self.store_folder, map_bytes, BOOT)
        return self._environment

    def close(self) -> None:
        """At the end of the test."""
        if self._environment is not None:
            store_module._drop_environment(self.store_folder)
        os.close(self.board_fd)

    async def _connected(self, tree: RemoteTree) -> None:
        """The pauses between two attempts to connect pass by jumps."""
        assert self.agent is not None
        number = int(str(tree._link._hello["index"]))
        while not tree._link.connected or number not in [line.number for line in self.agent.service.workers()]:
            self.mock_clock.jump(0.05)
            await trio.to_thread.run_sync(lambda: None)

    @asynccontextmanager
    async def living_agent(self) -> AsyncIterator[Agent]:
        """An agent, until the end of the block; then it is gone as if killed: nothing is told to anybody."""
        agent = self.agent = Agent(self)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(agent.tree.run)
                await agent.tree.start()
                await nursery.start(agent.service.run)
                for worker in self.workers:
                    await self._connected(worker)
                try:
                    yield agent
                finally:
                    nursery.cancel_scope.cancel()
        finally:
            self.agent = None
            agent.store.close()
            agent.board.close()

    @asynccontextmanager
    async def worker(self, index: int = 0, *, hot_entries: int = 1000) -> AsyncIterator[Worker]:
        """A worker's view, until the end of the block; connected, when an agent lives."""
        board = BoardReader(self.board_fd)
        metrics = Metrics()
        tree = RemoteTree(
            self.socket,
            board=board,
            index=index,
            root_path=self.root_path,
            policy=self.policy,
            clock=self.clock,
            metrics=metrics,
            metadata_budget_s=self.budget_s,
            hot_entries=hot_entries,
            store=SameProcessStore(self),
        )
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(tree.run)
                self.workers.append(tree)
                if self.agent is not None:
                    await self._connected(tree)
                    await tree.start()
                try:
                    yield Worker(tree, metrics)
                finally:
                    self.workers.remove(tree)
                    nursery.cancel_scope.cancel()
        finally:
            tree.close()
            board.close()


class Worker(Asking):
    """One worker in use."""

    def __init__(self, tree: RemoteTree, metrics: Metrics) -> None:
        self.tree = tree
        self.metrics = metrics

    def hits(self) -> float:
        """Answers given without the agent."""
        return self.metrics.snapshot().get("fusecache_metadata_lookups_total{result=hit}", 0.0)


@contextmanager
def shared_mount(
    folder: Path,
    model: AlluxioModel,
    mock_clock: MockClock,
    *,
    policy: FreshnessPolicy = POLICY,
    chunk: int = 8192,
    budget_s: float = 20.0,
    on_change: Callable[[Change], None] = lambda change: None,
    root_path: bytes = b"/",
) -> Iterator[SharedMount]:
    """What agents and workers share; `folder` holds the store and the socket."""
    mount = SharedMount(
        folder,
        model,
        mock_clock,
        policy=policy,
        chunk=chunk,
        budget_s=budget_s,
        on_change=on_change,
        root_path=root_path,
    )
    try:
        yield mount
    finally:
        mount.close()
