"""The handlers of a mount without a kernel: real Operations, tree, store and readers over a cluster in memory.

A test calls handlers as pyfuse3 would, and plays the kernel's part itself: READDIR replies are collected with a
limit as a buffer has one, and what the daemon would push is in `changes`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyfuse3
import pytest
import trio

from fusecache.alluxio.model import Block, Capacity, file_id_of
from fusecache.cache.freshness import FreshnessPolicy
from fusecache.cache.listing_diff import Change
from fusecache.cache.record import Entry
from fusecache.cache.store import MetadataStore
from fusecache.cache.tree import MetadataTree
from fusecache.config.settings import Settings
from fusecache.errors import NotFound, StaleId
from fusecache.fs.attributes import Attributes
from fusecache.fs.hidden_folder import HiddenFolder
from fusecache.fs.operations import Operations
from fusecache.metrics import Metrics
from fusecache.prefetch.reader import Readers
from fusecache.rpc.budget import Budget
from tests.support.clocks import LoopClock
from tests.t2_cache.alluxio_model import AlluxioModel

ROOT = pyfuse3.ROOT_INODE
CONTEXT: Any = None
"""No handler looks at the caller: the kernel checks permissions."""


class Listed(NamedTuple):
    """One entry of a READDIRPLUS reply."""

    name: bytes
    attributes: pyfuse3.EntryAttributes
    cookie: int


class FakeStream:
    """A range of one block."""

    source = "block_worker"

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def read(self, size: int, budget: Budget) -> bytes:
        data = self._content[self._position : self._position + size]
        self._position += size
        return data

    def close(self) -> None:
        """Nothing is held."""


class Contents:
    """The bytes of the model's files, as the data client gives them."""

    def __init__(self) -> None:
        self.by_file_id: dict[int, bytes] = {}
        self.error: Exception | None = None
        """Raised by every stream while set."""

    def open_local(self, block: Block) -> int | None:
        return None

    def learn_local(self, block: Block, budget: Budget) -> int | None:
        return None

    def open_stream(self, block: Block, offset: int, length: int, budget: Budget) -> FakeStream:
        if self.error is not None:
            raise self.error
        start = (block.block_id & 0xFFFFFF) * (64 << 20) + offset
        return FakeStream(self.by_file_id[file_id_of(block.block_id)][start : start + length])

    def start_read(self, *asked: object) -> None:
        """Nothing goes without waiting here."""


class TreeContext:
    """What the readers ask of the metadata."""

    def __init__(self, tree: MetadataTree, model: AlluxioModel) -> None:
        self._tree = tree
        self._model = model

    def ufs_path(self, inode: int) -> bytes | None:
        return self._tree.ufs_path(inode)

    def superseded(self, inode: int) -> bool:
        return self._tree.superseded(inode)

    def confirm_stored(self, entry: Entry, fd: int) -> bool:
        return False

    def confirm(self, entry: Entry, *, whole: bool) -> Callable[[], None]:
        inode = entry.inode
        path = self._tree.path(inode)

        def check(limit_s: float | None = None, *, compare: bool = False) -> None:
            try:
                current = self._model.node(path).file_id + 1
            except NotFound:
                current = 0
            if current != inode:
                raise StaleId(f"{path!r} has another id")

        return check


class Rig:
    """One mount's handlers; made by `rig`."""

    def __init__(self, state: Path, settings: dict[str, Any]) -> None:
        self.model = AlluxioModel(piece=settings.pop("piece", 1000))
        self.contents = Contents()
        self.clock = LoopClock()
        self.metrics = Metrics()
        self.settings = Settings.model_validate(settings)
        self.changes: list[Change] = []
        self.stale_reads: list[int] = []
        self.cluster = Capacity(100 << 30, 25 << 30)
        self.store = MetadataStore(state, "cluster", root_path=b"/", map_bytes=64 << 20)
        self.tree = MetadataTree(
            self.store,
            root_path=b"/",
            list_folder=self.model.list_folder,
            get_status=self.model.get_status,
            policy=FreshnessPolicy(
                refresh_s=self.settings.refresh_s,
                immutable=self.settings.immutable,
                immutable_kernel_timeout_s=self.settings.immutable_kernel_timeout_s,
                stale_if_error_s=self.settings.stale_if_error_s,
                negative_s=self.settings.negative_s,
                sync_interval_s=self.settings.sync_interval_s,
            ),
            clock=self.clock,
            rng=random.Random(1),
            metrics=self.metrics,
            limiter=trio.CapacityLimiter(4),
            on_change=self.changes.append,
        )
        self.readers = Readers(
            self.contents,
            TreeContext(self.tree, self.model),
            self.settings,
            metrics=self.metrics,
            clock=self.clock,
            limiter=trio.CapacityLimiter(4),
        )
        self.operations = Operations(
            self.tree,
            self.readers,
            Attributes(self.settings),
            HiddenFolder({b"stats": lambda: b"one 1\ntwo 2\n", b"version": lambda: b"v\n"}),
            metrics=self.metrics,
            capacity=lambda: self.cluster,
            metadata_budget_s=self.settings.metadata_budget_s,
            on_stale_read=self._stale_read,
        )

    async def _stale_read(self, inode: int) -> None:
        self.stale_reads.append(inode)

    # ---- the kernel's part ----

    def write(self, path: bytes, content: bytes, **changes: Any) -> int:
        """Another client writes a file; its inode."""
        node = self.model.write(path, len(content))
        for name, value in changes.items():
            setattr(node, name, value)
        self.contents.by_file_id[node.file_id] = content
        return node.file_id + 1

    async def walk(self, path: bytes) -> pyfuse3.EntryAttributes:
        """LOOKUP for each component; attributes of the last."""
        attributes = await self.operations.getattr(ROOT, CONTEXT)
        for name in path.strip(b"/").split(b"/"):
            attributes = await self.operations.lookup(attributes.st_ino, name, CONTEXT)
        return attributes

    async def read_dir(self, inode: int, after: int = 0, room: int = 1 << 30) -> list[Listed]:
        """One READDIRPLUS whose reply has room for so many entries."""
        reply: list[Listed] = []

        def take(token: object, name: bytes, attributes: pyfuse3.EntryAttributes, cookie: int) -> bool:
            assert token is reply
            if len(reply) >= room:
                return False
            reply.append(Listed(name, attributes, cookie))
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pyfuse3, "readdir_reply", take)
            await self.operations.readdir(pyfuse3.FileHandleT(inode), after, reply)  # type: ignore[arg-type]
        return reply

    async def list_names(self, inode: int, room: int = 100) -> list[bytes]:
        """A whole listing as the kernel reads it: OPENDIR, READDIRPLUS until nothing comes, RELEASEDIR."""
        handle = await self.operations.opendir(pyfuse3.InodeT(inode), CONTEXT)
        names: list[bytes] = []
        after = 0
        while page := await self.read_dir(handle, after, room):
            names += [entry.name for entry in page]
            after = page[-1].cookie
        await self.operations.releasedir(handle)
        return names

    async def read_file(self, inode: int, offset: int = 0, size: int = 1 << 20) -> bytes:
        """OPEN, READ, RELEASE."""
        info = await self.operations.open(pyfuse3.InodeT(inode), 0, CONTEXT)
        try:
            return bytes(await self.operations.read(info.fh, offset, size))
        finally:
            await self.operations.release(info.fh)

    def errors(self, op: str, name: str) -> float:
        """How many requests `op` were answered with errno `name`."""
        return self.metrics.snapshot().get(f"fusecache_request_errors_total{{op={op},errno={name}}}", 0)


@asynccontextmanager
async def rig(state: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A running rig over an empty cluster; `settings` are those of the mount."""
    made = Rig(state / "metadata", settings)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(made.tree.run)
            await made.tree.start()
            await nursery.start(made.readers.fetcher.run)
            try:
                yield made
            finally:
                made.readers.close_all()
                nursery.cancel_scope.cancel()
    finally:
        made.store.close()


@contextmanager
def refused(number: int) -> Iterator[None]:
    """The block must end with FUSEError `number`."""
    with pytest.raises(pyfuse3.FUSEError) as caught:
        yield
    assert caught.value.errno == number
