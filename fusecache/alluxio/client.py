"""The Alluxio client as the rest of the code sees it: one object per cluster and process.

    metadata     get_status, list_status, get_file_path, get_file_info       -> master.py
    bytes        open_local (no call at all), open_stream                    -> local_blocks.py, block_stream.py
    placing      cache, load, free, touch                                    -> block_requests.py, loading.py
    cluster      connect, capacity, block_workers, configuration             -> master.py, block_workers.py

Blocking and thread-safe. Every call that may use the network takes a Budget and ends within it. Only exceptions of
`fusecache.errors` leave it. It remembers connections, the list of block workers, and folders in which block files
were found; it caches no metadata and no bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import structlog

from fusecache.alluxio import block_requests, decode
from fusecache.alluxio.block_sources import BlockSources, StoragePolicy
from fusecache.alluxio.block_stream import BlockStream
from fusecache.alluxio.block_workers import LIST_AGE_S, BlockWorkers
from fusecache.alluxio.connection import Connection
from fusecache.alluxio.loading import Loader
from fusecache.alluxio.local_blocks import LocalBlocks, open_complete
from fusecache.alluxio.master import MasterClient
from fusecache.alluxio.masters import Masters
from fusecache.alluxio.model import (
    Block,
    BlockPlacement,
    BlockWorkerInfo,
    Capacity,
    ClusterIdentity,
    FileStatus,
    LoadFailure,
)
from fusecache.alluxio.read_call import ReadOptions
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.sasl import Login, check_login
from fusecache.alluxio.status import to_error
from fusecache.clock import Clock
from fusecache.config.settings import ClusterConfig, Settings
from fusecache.errors import NotFound, Unavailable, UpstreamError
from fusecache.metrics import Metrics
from fusecache.own_user import own_user
from fusecache.rpc.budget import Budget
from fusecache.rpc.channel import BLOCK_WORKER_RECEIVE_BYTES, MASTER_RECEIVE_BYTES
from fusecache.rpc.stall_watch import StallWatch
from fusecache.rpc.tls import TlsFiles, load_credentials
from fusecache.threads import start_if_possible

log = structlog.get_logger(__name__)

LEARN_PAUSE_S = 60.0
"""A block worker whose folders are not visible here is asked again after this time: they may be mounted later."""


class AlluxioClient:
    """See the module's docstring."""

    def __init__(
        self, cluster: ClusterConfig, settings: Settings, *, metrics: Metrics, clock: Clock, rng: random.Random
    ) -> None:
        """No I/O but reading TLS files; UsageError for a user that can't log in."""
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._meter = RpcMeter(metrics)
        self._login = check_login(Login(cluster.user or own_user(), cluster.impersonate or "", cluster.auth))
        self._tls = TlsFiles(cluster.tls_ca_file, cluster.tls_cert_file, cluster.tls_key_file) if cluster.tls else None
        if self._tls is not None:
            load_credentials(self._tls)  # a wrong file is told now, not by the first request
        self._masters = Masters(
            cluster.masters,
            lambda target: self._connect(target, MASTER_RECEIVE_BYTES, self._masters.lost),
            connect_s=settings.connect_s,
            clock=clock,
        )
        self._master = MasterClient(self._masters, try_s=settings.rpc_try_s, meter=self._meter, clock=clock, rng=rng)
        self._workers = BlockWorkers(
            self._master.block_workers,
            lambda target: self._connect(target, BLOCK_WORKER_RECEIVE_BYTES, _nobody_cares),
            node_hosts=cluster.node_hosts,
            connect_s=settings.connect_s,
            clock=clock,
        )
        self._sources = BlockSources(
            self._master,
            self._workers,
            StoragePolicy(
                store=settings.read_type == "cache",
                passive_cache=settings.passive_cache,
                reserved_bytes=settings.reserved_bytes,
                cache_try_s=settings.rpc_try_s,
            ),
            meter=self._meter,
            clock=clock,
            rng=rng,
            stored_here=self._learn_from,
        )
        self._loader = Loader(
            self._workers,
            reserved_bytes=settings.reserved_bytes,
            try_s=settings.rpc_try_s,
            meter=self._meter,
            clock=clock,
            rng=rng,
        )
        self._learn_again_at = -math.inf
        self._local = LocalBlocks(cluster.tier_folders, enabled=settings.zero_rpc_reads)
        self._watch = StallWatch(clock)
        self._options = ReadOptions(
            chunk_bytes=settings.chunk_bytes,
            stall_s=settings.stall_s,
            connect_s=settings.connect_s,
            store=settings.read_type == "cache",
        )

    def connect(self, budget: Budget) -> ClusterIdentity:
        """Find the primary master, log in, ask who the cluster is."""
        return self._master.identity(budget)

    def get_status(self, path: bytes, *, sync_interval_ms: int, budget: Budget) -> FileStatus:
        """One file or folder. NotFound, PermissionDenied, Unavailable, ProtocolError."""
        return self._master.get_status(path, sync_interval_ms=sync_interval_ms, budget=budget)

    def list_status(self, path: bytes, *, sync_interval_ms: int, budget: Budget) -> Iterator[list[FileStatus]]:
        """The children of a folder in pieces; raises rather than end early (`master.MasterClient.list_status`)."""
        return self._master.list_status(path, sync_interval_ms=sync_interval_ms, budget=budget)

    def get_file_path(self, file_id: int, budget: Budget) -> bytes:
        """Where an id lives now. StaleId."""
        return self._master.get_file_path(file_id, budget)

    def get_file_info(self, file_id: int, budget: Budget) -> FileStatus:
        """One file or folder by id. StaleId."""
        return self._master.get_file_info(file_id, budget)

    def capacity(self, budget: Budget) -> Capacity:
        """Size and use of the cluster's cache."""
        return self._master.capacity(budget)

    def block_workers(self, budget: Budget, *, max_age_s: float = LIST_AGE_S) -> tuple[BlockWorkerInfo, ...]:
        """The live block workers; an older list when the master can't be asked."""
        return self._workers.cluster(budget, max_age_s=max_age_s).workers

    def own_block_workers(self, budget: Budget, *, max_age_s: float = LIST_AGE_S) -> tuple[BlockWorkerInfo, ...]:
        """Those of the live block workers that are on this node."""
        cluster = self._workers.cluster(budget, max_age_s=max_age_s)
        return tuple(worker for worker in cluster.workers if worker.worker_id in cluster.node_ids)

    def block_placement(self, block_id: int, budget: Budget) -> BlockPlacement:
        """Who holds a block now. NotFound."""
        return self._master.block_placement(block_id, budget)

    def configuration(self, budget: Budget) -> dict[str, str]:
        """The cluster's properties."""
        return self._master.configuration(budget)

    def free(self, path: bytes, budget: Budget, *, recursive: bool = False) -> None:
        """Drop cached blocks; the under storage keeps its copies."""
        self._master.free(path, budget, recursive=recursive)

    @property
    def block_folders(self) -> tuple[bytes, ...]:
        """Where block files of this node's block workers are looked for, each ending with a slash; those that are not
        there, or not visible here, too."""
        return self._local.folders

    def open_local(self, block: Block) -> int | None:
        """A descriptor of the complete block file on this node, or None. No call, no network."""
        return self._local.open(block)

    def open_stream(self, block: Block, offset: int, length: int, budget: Budget) -> BlockStream:
        """Bytes [offset, offset + length) of a block. The request is sent before this returns; what goes wrong with it
        is met, and mended, by `read`."""
        stream = self._stream(block, offset, length)
        stream.start(budget)
        return stream

    def start_read(
        self, block: Block, offset: int, length: int, budget: Budget, on_answer: Callable[[], None]
    ) -> BlockStream | None:
        """As `open_stream`, but never waits: None when it would have to, or could not say when there is something to
        read. `on_answer` is called once, in another thread, when `BlockStream.read_ready` may give the bytes."""
        stream = self._stream(block, offset, length)
        return stream if stream.start_promptly(budget, on_answer) else None

    def _stream(self, block: Block, offset: int, length: int) -> BlockStream:
        return BlockStream(
            block,
            offset,
            length,
            sources=self._sources,
            options=self._options,
            watch=self._watch,
            meter=self._meter,
            clock=self._clock,
            rng=self._rng,
        )

    def touch(self, block_ids: Sequence[int], budget: Budget) -> int:
        """Tell this node's block worker that blocks are in use, so that it does not evict them first. How many it
        still has."""
        touched = 0
        for block_id in block_ids:
            if budget.spent():
                break
            if self._local_path(block_id, (), budget) is not None:
                touched += 1
        self._meter.touched(touched)
        return touched

    def cache(self, block: Block, budget: Budget) -> None:
        """Have a block stored by the block worker that the policy prefers; returns when the request is taken."""
        self._loader.cache(block, budget)

    def load(self, blocks: Sequence[Block], budget: Budget) -> list[LoadFailure]:
        """Have blocks loaded from the under storage; returns when they are there, with those that are not."""
        return self._loader.load(blocks, budget)

    def learn_local(self, block: Block, budget: Budget) -> int | None:
        """Ask this node's block workers for the block's file; a folder that is visible here is remembered for
        `open_local`. A descriptor, or None."""
        if not self._settings.zero_rpc_reads:
            return None
        place = self._local_path(block.block_id, block.locations, budget)
        if place is None:
            return None
        folder, name = place
        descriptor = open_complete(folder + b"/" + name, block.length)
        if descriptor is not None:
            self._local.learn(folder)
        return descriptor

    def _learn_from(self, block: Block) -> None:
        """This node's block worker has just stored a block: when its file is not found in a folder known by now (a
        block worker may have several), ask where it lies. Does not wait for the answer."""
        now = self._clock.now()
        if not self._settings.zero_rpc_reads or now < self._learn_again_at:
            return
        descriptor = self._local.open(block)
        if descriptor is not None:
            os.close(descriptor)
            return
        self._learn_again_at = now + LEARN_PAUSE_S
        start_if_possible(threading.Thread(target=self._learn, args=(block,), name="learn-tier-folder", daemon=True))

    def _learn(self, block: Block) -> None:
        """In a thread: where this node's block worker has put a block."""
        with contextlib.suppress(UpstreamError):  # the block was read; an unknown folder costs later reads only
            budget = Budget(self._clock, self._settings.rpc_try_s)
            descriptor = self.learn_local(block._replace(locations=()), budget)
            if descriptor is not None:
                os.close(descriptor)
                self._learn_again_at = -math.inf

    def close(self) -> None:
        """End every call and close every connection."""
        # First, so that calls which fail by this are nobody's fault.
        self._workers.close()
        self._masters.close()
        self._watch.close()

    def _local_path(self, block_id: int, locations: Sequence[int], budget: Budget) -> tuple[bytes, bytes] | None:
        """Where one of this node's block workers has the block; asks only holders when they are known."""
        cluster = self._workers.cluster(budget)
        for worker in cluster.workers:
            if worker.worker_id not in cluster.node_ids or (locations and worker.worker_id not in locations):
                continue
            try:
                connection = self._workers.connection(worker, budget)
                timeout_s = budget.per_try_s(self._settings.rpc_try_s)
                return block_requests.open_local_block(connection, block_id, timeout_s)
            except NotFound:
                continue
            except decode.Rejected as refusal:
                self._meter.rejected(refusal.what)
            except grpc.RpcError as error:
                self._workers.suspect(worker, str(to_error(error, worker.address.target)))
            except Unavailable as error:
                self._workers.suspect(worker, str(error))
            except UpstreamError as error:
                # A block worker that keeps pages instead of block files can't tell a path; reading through it works.
                log.debug("no local path", block=block_id, target=worker.address.target, reason=str(error))
        return None

    def _connect(self, target: str, max_receive_bytes: int, session_ended: Callable[[Connection], None]) -> Connection:
        return Connection(
            target,
            login=self._login,
            tls=self._tls,
            connect_s=self._settings.connect_s,
            max_receive_bytes=max_receive_bytes,
            meter=self._meter,
            clock=self._clock,
            session_ended=session_ended,
        )


def _nobody_cares(connection: Connection) -> None:
    """A restarted block worker of the same cluster is as good as before: block ids and lengths are checked anyway."""
