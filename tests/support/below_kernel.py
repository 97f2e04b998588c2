"""Everything of a mount but the kernel: client, tree, open files and handlers, wired as `daemon.classic` wires them.

`below_kernel(cluster, state)` is an async context manager around a `BelowKernel`, whose methods are the system calls
of an application: `stat`, `names`, `read_all`. Each goes through the handlers of `fs.operations`, so that a failure
is a FUSEError with its errno, as the kernel would be told.

Not here: kernel caches and their invalidation (what would be pushed is kept in `changes`), signals, the mount itself.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyfuse3
import trio

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Capacity
from fusecache.cache.listing_diff import Change
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.clock import Clock, SystemClock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.daemon.file_context import MetadataFileContext
from fusecache.daemon.mount_core import HEAL_S, freshness_of
from fusecache.embedded.server import EmbeddedServer
from fusecache.errors import FusecacheError
from fusecache.fs.attributes import Attributes
from fusecache.fs.hidden_folder import HiddenFolder
from fusecache.fs.operations import ROOT, Operations
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers
from fusecache.rpc.budget import Budget

READ_BYTES = 128 << 10
"""What an application asks at a time, as the kernel's default read-ahead."""

CONTEXT: Any = None
"""Request context (pid, uid): no handler looks at it."""


def cluster_of(server: EmbeddedServer, master: str | None = None, *, local: bool = False) -> ClusterConfig:
    """How to reach an embedded server; `master` when something stands between. Without `local` no block file is
    opened directly: every byte comes over the network."""
    folders = tuple(str(folder) for folder in server.tier_folders) if local else ()
    return ClusterConfig(name="test", masters=(master or server.master_target,), tier_folders=folders)


class MovableClock(SystemClock):
    """The machine's clock, which tests can put forward; waits are real."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Everything that ages is older by so much."""
        self._ahead_s += seconds


class BelowKernel:
    """One mount's parts."""

    def __init__(
        self,
        client: AlluxioClient,
        store: MetadataStore,
        tree: MetadataTree,
        readers: Readers,
        operations: Operations,
        metrics: Metrics,
        changes: list[Change],
    ) -> None:
        self.client = client
        self.store = store
        self.tree = tree
        self.readers = readers
        self.operations = operations
        self.metrics = metrics
        self.changes = changes
        """What the kernel would have been told, in order."""

    def count(self, name: str) -> float:
        """A metric now, 0 when it never moved."""
        return self.metrics.snapshot().get(name, 0.0)

    async def inode(self, path: bytes) -> int:
        """Walk from the root; FileNotFoundError for a missing name (a negative answer, not an errno)."""
        inode = ROOT
        for name in path.strip(b"/").split(b"/"):
            if name:
                found = await self.operations.lookup(pyfuse3.InodeT(inode), pyfuse3.FileNameT(name), CONTEXT)
                if not found.st_ino:
                    raise FileNotFoundError(path)
                inode = found.st_ino
        return inode

    async def stat(self, path: bytes) -> pyfuse3.EntryAttributes:
        """stat(2)."""
        return await self.operations.getattr(pyfuse3.InodeT(await self.inode(path)), CONTEXT)

    async def listing(self, path: bytes = b"/") -> list[tuple[bytes, pyfuse3.EntryAttributes]]:
        """All of readdir(3), in replies of 100 entries as the kernel asks for them."""
        inode = await self.inode(path)
        handle = await self.operations.opendir(pyfuse3.InodeT(inode), CONTEXT)
        entries: list[tuple[bytes, pyfuse3.EntryAttributes]] = []
        cookie = 0
        while True:
            page: list[tuple[bytes, pyfuse3.EntryAttributes, int]] = []
            await self.operations.readdir(handle, cookie, page)  # type: ignore[arg-type]  # see _replies_into_lists
            if not page:
                return entries
            entries += [(name, attributes) for name, attributes, _ in page]
            cookie = page[-1][2]

    async def names(self, path: bytes = b"/") -> list[bytes]:
        """Names of a listing, sorted."""
        return sorted(name for name, _ in await self.listing(path))

    async def open(self, path: bytes) -> pyfuse3.FileHandleT:
        """open(2) for reading."""
        info = await self.operations.open(pyfuse3.InodeT(await self.inode(path)), os.O_RDONLY, CONTEXT)
        return info.fh

    async def read(self, handle: pyfuse3.FileHandleT, offset: int, size: int) -> bytes:
        """pread(2)."""
        return bytes(await self.operations.read(handle, offset, size))

    async def release(self, handle: pyfuse3.FileHandleT) -> None:
        """close(2)."""
        await self.operations.release(handle)

    async def read_all(self, path: bytes, size: int = READ_BYTES) -> bytes:
        """The whole file, `size` bytes a request, until a read gives nothing."""
        handle = await self.open(path)
        try:
            pieces = []
            offset = 0
            while piece := await self.read(handle, offset, size):
                pieces.append(piece)
                offset += len(piece)
            return b"".join(pieces)
        finally:
            await self.release(handle)


@asynccontextmanager
async def below_kernel(
    cluster: ClusterConfig,
    state: Path,
    *,
    path: bytes = b"/",
    clock: Clock | None = None,
    rng: random.Random | None = None,
    on_change: Callable[[Change], None] | None = None,
    connect_s: float = 20.0,
    **settings: object,
) -> AsyncIterator[BelowKernel]:
    """A mount of `path`; `settings` are those of a mount. `clock` moves the ages, and every wait of the client."""
    clock = clock or SystemClock()
    rng = rng or random.Random()
    chosen = Settings.model_validate({"state_dir": str(state), "runtime_dir": str(state / "run"), **settings})
    metrics = Metrics()
    client = AlluxioClient(cluster, chosen, metrics=metrics, clock=clock, rng=rng)
    changes: list[Change] = []

    def keep(change: Change) -> None:
        changes.append(change)
        if on_change is not None:
            on_change(change)

    try:
        identity = await trio.to_thread.run_sync(client.connect, Budget(clock, connect_s))
        store = MetadataStore(
            state / "metadata", identity.cluster_id, root_path=path, map_bytes=chosen.metadata_map_bytes
        )
        try:
            tree = MetadataTree(
                store,
                root_path=path,
                list_folder=lambda folder, sync_ms: client.list_status(
                    folder, sync_interval_ms=sync_ms, budget=Budget(clock, chosen.metadata_budget_s)
                ),
                get_status=lambda name, sync_ms: client.get_status(
                    name, sync_interval_ms=sync_ms, budget=Budget(clock, chosen.metadata_budget_s)
                ),
                policy=freshness_of(chosen),
                clock=clock,
                rng=rng,
                metrics=metrics,
                limiter=trio.CapacityLimiter(chosen.metadata_threads),
                on_change=keep,
                hot_entries=chosen.metadata_hot_entries,
            )
            readers = Readers(
                client,
                MetadataFileContext(
                    tree, client, chosen, clock, list_again=lambda inode: None, confirm_stored=lambda entry, fd: False
                ),
                chosen,
                metrics=metrics,
                clock=clock,
                limiter=trio.CapacityLimiter(chosen.data_threads),
            )

            async def on_stale_read(inode: int) -> None:
                keep(Change("attributes", inode, b"", inode))
                with trio.move_on_after(HEAL_S), contextlib.suppress(FusecacheError):
                    await tree.refresh(inode, force_sync=False)

            operations = Operations(
                tree,
                readers,
                Attributes(chosen),
                HiddenFolder({}),
                metrics=metrics,
                capacity=lambda: Capacity(0, 0),
                metadata_budget_s=chosen.metadata_budget_s,
                on_stale_read=on_stale_read,
            )
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(tree.run)
                    await tree.start()
                    await nursery.start(readers.fetcher.run)
                    with _replies_into_lists():
                        yield BelowKernel(client, store, tree, readers, operations, metrics, changes)
                    nursery.cancel_scope.cancel()
            finally:
                readers.close_all()
        finally:
            store.close()
    finally:
        client.close()


@contextmanager
def _replies_into_lists() -> Iterator[None]:
    """Let `readdir` fill a list (its token) instead of a buffer of the kernel's. Mounts one after another only, or
    nested: the innermost one's end brings back what the outer one had put in place."""

    def reply(
        token: list[tuple[bytes, pyfuse3.EntryAttributes, int]],
        name: bytes,
        attributes: pyfuse3.EntryAttributes,
        cookie: int,
    ) -> bool:
        if len(token) >= 100:
            return False
        token.append((bytes(name), attributes, cookie))
        return True

    with mock.patch.object(pyfuse3, "readdir_reply", reply):
        yield
