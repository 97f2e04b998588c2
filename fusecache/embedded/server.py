"""The embedded cluster as one object: ports bound, services wired, everything released at the end.

`EmbeddedServer(folder, state)` is a context manager; `start` returns once every port answers. The master
listens on 127.0.0.1, block worker i on 127.0.0.(i+1), each with its own tier folder, so that "this node's
block worker" can be told from the others on one machine. The ports are open to every user of the machine:
whoever connects reads what this process's user can read in the folder.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import grpc

from fusecache.clock import Clock, SystemClock
from fusecache.embedded import inode as inodes
from fusecache.embedded.authentication import Authentication
from fusecache.embedded.block_store import BlockStore
from fusecache.embedded.block_worker import BlockWorker
from fusecache.embedded.faults import MASTER, FaultPlan
from fusecache.embedded.freed_blocks import FreedBlocks
from fusecache.embedded.inode import Inode
from fusecache.embedded.link_times import LinkTimes
from fusecache.embedded.master import Master
from fusecache.embedded.namespace import Namespace
from fusecache.embedded.source import SourceFolder
from fusecache.embedded.state import StateFolder
from fusecache.embedded.tampering import Rewrite, Tampering
from fusecache.embedded.versions import MASTER_VERSIONS, WORKER_VERSIONS, version_service
from fusecache.errors import NotFound, UsageError

DEFAULT_BLOCK_SIZE = 1 << 30
"""Large enough that nearly every file is one block, which can be a hard link."""
ENTRIES_PER_MESSAGE = 10_000
"""Alluxio's alluxio.master.filesystem.liststatus.result.message.length."""
MAX_THREADS = 1024
"""Every open stream (one SASL handshake a channel, open local blocks, reads) holds a thread; idle ones are reused."""
_WORKER_ID_BASE = 4_000_000_000_000_000_000
"""Alluxio's worker ids are random positive 63-bit numbers: large ones find clients that use 32 bits."""


class EmbeddedServer:
    """An Alluxio-compatible cluster over one folder."""

    def __init__(
        self,
        folder: Path,
        state: Path,
        *,
        port: int = 0,
        block_workers: int = 1,
        block_size: int = DEFAULT_BLOCK_SIZE,
        auth: str = "simple",
        sync_interval_ms: int = -1,
        entries_per_message: int = ENTRIES_PER_MESSAGE,
        capacity_bytes: int | None = None,
        keep_free_bytes: int | None = None,
        link_blocks: bool = True,
        impersonators: Collection[str] = (),
        free_after_s: float | None = 1.0,
        faults: FaultPlan | None = None,
        rewrite: Rewrite | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`port` 0 takes a free one. `sync_interval_ms` is used for requests that name none.

        `capacity_bytes` is that of each block worker; None: the size of the state folder's file system, shared out.
        Copies of blocks leave `keep_free_bytes` free there; None: a tenth of it. `link_blocks` False copies every
        block. `free_after_s` is how long blocks of files that were freed, replaced or removed stay (Alluxio: until
        a heartbeat each second); None: until the server ends. `impersonators` are users that may speak for others.
        `rewrite` changes answers before they are sent (tests of clients).
        """
        if auth not in ("simple", "nosasl"):
            raise UsageError(f"auth {auth!r} is not one of simple, nosasl")
        if block_workers < 1 or block_workers > 200:
            raise UsageError(f"block_workers {block_workers} is not in 1 .. 200")
        if block_size < 1:
            raise UsageError(f"block_size {block_size} is not at least 1 byte")
        self.folder = folder
        self.auth = auth
        self.authentications: list[Authentication] = []
        """Of the master, then of each block worker; empty with `nosasl`."""
        self._state_path = state
        self._port = port
        self._worker_count = block_workers
        self._worker_ports = [0] * block_workers
        self._block_size = block_size
        self._sync_interval_ms = sync_interval_ms
        self._entries_per_message = entries_per_message
        self._capacity_bytes = capacity_bytes
        self._keep_free_bytes = keep_free_bytes
        self._link_blocks = link_blocks
        self._impersonators = impersonators
        self._free_after_s = free_after_s
        self._freed: FreedBlocks | None = None
        self._faults = faults
        self._rewrite = rewrite
        self._clock: Clock = SystemClock() if clock is None else clock
        self._state: StateFolder | None = None
        self._namespace: Namespace | None = None
        self._workers: list[BlockWorker] = []
        self._servers: list[grpc.Server] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._master: Master | None = None

    # -- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind all ports and begin to serve: a later start of the same object takes the same ports.

        UsageError or StateError says what can't be used.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all calls at once and release everything; safe to call again."""
        stopping = [server.stop(None) for server in self._servers]
        for stopped in stopping:
            stopped.wait()
        if self._freed is not None:
            self._freed.close()
            self._freed = None
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        self._servers.clear()
        self._pools.clear()
        self.authentications.clear()
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None
        if self._state is not None:
            self._state.close()
            self._state = None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- what others may know ------------------------------------------------------------------------------

    @property
    def master_target(self) -> str:
        """host:port of the master."""
        return f"127.0.0.1:{self._running_master().port}"

    @property
    def tier_folders(self) -> tuple[Path, ...]:
        """Tier folder of each block worker."""
        return tuple(worker.store.tier for worker in self._workers)

    @property
    def worker_targets(self) -> tuple[str, ...]:
        """host:port of each block worker."""
        return tuple(f"{worker.host}:{worker.port}" for worker in self._workers)

    @property
    def cluster_id(self) -> str:
        """The cluster's id, the same for every start over one state folder."""
        if self._namespace is None:
            raise RuntimeError("the embedded server is not running")
        return self._namespace.cluster_id

    @property
    def blocks(self) -> tuple[BlockStore, ...]:
        """Block store of each block worker."""
        return tuple(worker.store for worker in self._workers)

    def _running_master(self) -> Master:
        if self._master is None:
            raise RuntimeError("the embedded server is not running")
        return self._master

    # -- wiring --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        SourceFolder(self.folder)  # a wrong source is said before anything is made
        self._state = StateFolder(self._state_path)
        source = SourceFolder(self.folder, hidden=self._state_path)
        freed = self._freed = FreedBlocks(self._free_after_s, lambda: self.blocks)
        self._namespace = Namespace(
            self._state_path / "namespace",
            source,
            block_size=self._block_size,
            clock=self._clock,
            default_sync_interval_ms=self._sync_interval_ms,
            on_gone=freed.add,
        )
        background = self._pool("background")
        link_times = LinkTimes() if self._link_blocks else None
        disk_bytes = shutil.disk_usage(self._state_path).total
        self._workers = [
            BlockWorker(
                _WORKER_ID_BASE + index,
                f"127.0.0.{index + 1}",
                BlockStore(
                    self._state_path / f"tier{index}",
                    capacity_bytes=self._capacity_bytes or disk_bytes // self._worker_count,
                    keep_free_bytes=disk_bytes // 10 if self._keep_free_bytes is None else self._keep_free_bytes,
                    link_times=link_times,
                    expected=self._expected,
                ),
                source,
                background=background,
                peers=lambda: self._workers,
            )
            for index in range(self._worker_count)
        ]
        self._master = Master(
            self._namespace,
            source,
            self._workers,
            entries_per_message=self._entries_per_message,
            configuration=self._configuration(),
            freed=freed,
        )
        for index, worker in enumerate(self._workers):
            handlers = [worker.service(), version_service(WORKER_VERSIONS)]
            # 4 MiB: alluxio.worker.network.max.inbound.message.size.
            worker.port = self._serve(
                f"{worker.host}:{self._worker_ports[index]}", handlers, index, max_receive_bytes=4 << 20
            )
            self._worker_ports[index] = worker.port
        handlers = [*self._master.services(), version_service(MASTER_VERSIONS)]
        self._master.port = self._serve(f"127.0.0.1:{self._port}", handlers, MASTER, max_receive_bytes=100 << 20)
        self._port = self._master.port

    def _serve(
        self, target: str, handlers: list[grpc.GenericRpcHandler], number: int, *, max_receive_bytes: int
    ) -> int:
        """Start the master (`number` MASTER) or a block worker; the port it listens on."""
        interceptors: list[grpc.ServerInterceptor] = []
        if self.auth == "simple":
            authentication = Authentication(self._impersonators)
            self.authentications.insert(0 if number == MASTER else number, authentication)
            interceptors.append(authentication)
            handlers = [*handlers, authentication.service()]
        if self._faults is not None or self._rewrite is not None:
            interceptors.append(Tampering(self._faults, self._rewrite, number))
        server = grpc.server(
            self._pool(target),
            handlers=handlers,
            interceptors=interceptors,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_receive_bytes),
                ("grpc.max_send_message_length", -1),
                # Alluxio's permit.keepalive.time: pings every 30 s are welcome, on idle channels too.
                ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        _check_free(target)
        port: int = server.add_insecure_port(target)
        server.start()
        self._servers.append(server)
        return port

    def _pool(self, name: str) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"embedded {name}")
        self._pools.append(pool)
        return pool

    def _expected(self, block_id: int) -> tuple[int, int] | None:
        """(length, source mtime_ns) of a block of a current file."""
        assert self._namespace is not None
        try:
            inode: Inode = self._namespace.by_id(inodes.file_of_block(block_id))
        except NotFound:
            return None
        index = block_id & inodes.LAST_SEQUENCE
        return (inode.block_length(index), inode.mtime_ns) if index < inode.block_count else None

    def _configuration(self) -> dict[str, str]:
        return {
            "alluxio.master.mount.table.root.ufs": os.fsdecode(os.path.realpath(self.folder)),
            "alluxio.security.authentication.type": "SIMPLE" if self.auth == "simple" else "NOSASL",
            "alluxio.user.block.size.bytes.default": str(self._block_size),
            "alluxio.user.file.metadata.sync.interval": str(self._sync_interval_ms),
            "alluxio.worker.tieredstore.levels": "1",
            "alluxio.worker.tieredstore.level0.alias": "SSD",
        }


def _check_free(target: str) -> None:
    """UsageError when the port can't be bound; gRPC itself would only print several lines and raise RuntimeError."""
    host, _, port = target.rpartition(":")
    with socket.socket() as probe:
        # As gRPC does: connections of an earlier server that still linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as exc:
            raise UsageError(f"port {target!r} can't be bound: {exc.strerror}; name another one, or 0") from exc
