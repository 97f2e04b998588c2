"""Who to ask for a block now, and what to do afterwards: joins placement, the block workers and the Cache call.

After a read through the under storage the block worker is asked, once per block, to store the whole block (Cache,
in its own time): reads come in pieces, and a piece is never stored by itself. With `passive_cache` a block that came
from another node is copied to this node's block worker instead.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc
import structlog

from fusecache.alluxio import placement
from fusecache.alluxio.block_requests import start_cache
from fusecache.alluxio.block_workers import BlockWorkers, Cluster
from fusecache.alluxio.connection import Connection, PendingCall
from fusecache.alluxio.master import MasterClient
from fusecache.alluxio.model import Block, BlockWorkerInfo
from fusecache.alluxio.placement import Source
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.status import text_of
from fusecache.clock import Clock
from fusecache.errors import Unavailable, UpstreamError
from fusecache.pb.alluxio.block_worker_pb2 import CacheResponse
from fusecache.rpc.budget import Budget
from fusecache.threads import start_if_possible

log = structlog.get_logger(__name__)

REMEMBERED_REQUESTS = 10_000
"""Blocks for which a Cache call was made lately; the same block is not asked for again while it is remembered."""

ASKED_AGAIN_S = 60.0
"""After this a block that still comes from the under storage is asked for again: the first call may have been lost."""

REMEMBERED_HOLDERS = 100_000
"""Blocks that were stored because this client read them: known here before a listing shows it."""

FRESH_LIST_AGE_S = 5.0
"""When all hints have failed the list of block workers is taken anew, but not more often than this."""


PLACEMENT_WAIT_S = 5.0
"""Longest wait for the master's word on where a block is now; the old hints and the under storage remain."""


class StoragePolicy(NamedTuple):
    """What settings say about storing what was read."""

    store: bool
    passive_cache: bool
    reserved_bytes: int
    cache_try_s: float


class BlockSources:
    """Implements `block_stream.Sources`. Thread-safe."""

    def __init__(
        self,
        master: MasterClient,
        workers: BlockWorkers,
        policy: StoragePolicy,
        *,
        meter: RpcMeter,
        clock: Clock,
        rng: random.Random,
        stored_here: Callable[[Block], None],
    ) -> None:
        """`stored_here` is told of a block that this node's block worker has stored because it was read."""
        self._master = master
        self._workers = workers
        self._policy = policy
        self._meter = meter
        self._clock = clock
        self._rng = rng
        self._stored_here = stored_here
        self._requested: OrderedDict[int, float] = OrderedDict()
        self._holders: OrderedDict[int, int] = OrderedDict()

    def find(self, block: Block, budget: Budget, *, fresh: bool) -> Iterator[Source]:
        """Sources of `block`, best first. `fresh` asks the master where it is now."""
        if fresh:
            block = self._located(block, budget)
            cluster = self._workers.cluster(budget, max_age_s=FRESH_LIST_AGE_S)
        else:
            cluster = self._workers.cluster(budget)
            block = self._with_holder(block)
        return self._ordered(block, cluster)

    def ready(self, block: Block) -> tuple[Source, Connection, Iterator[Source]] | None:
        """The first that `find` gives, its connection, and the others; None when finding them would need a call."""
        cluster = self._workers.fresh()
        if cluster is None:
            return None
        candidates = self._ordered(self._with_holder(block), cluster)
        source = next(candidates, None)
        connection = None if source is None else self._workers.checked(source.worker)
        return None if source is None or connection is None else (source, connection, candidates)

    def _with_holder(self, block: Block) -> Block:
        holder = self._holders.get(block.block_id)
        if holder is None or holder in block.locations:
            return block
        return block._replace(locations=(*block.locations, holder))

    def _ordered(self, block: Block, cluster: Cluster) -> Iterator[Source]:
        return placement.sources(
            block,
            cluster.workers,
            node_ids=cluster.node_ids,
            suspects=self._workers.suspects(),
            reserved_bytes=self._policy.reserved_bytes,
            rng=self._rng,
        )

    def connection(self, source: Source, budget: Budget) -> Connection:
        """A connection to the source's block worker."""
        return self._workers.connection(source.worker, budget)

    def failed(self, source: Source, error: UpstreamError) -> None:
        """Ask a block worker that did not answer last for a while; one that refused is as good as before."""
        if isinstance(error, Unavailable):
            self._workers.suspect(source.worker, str(error))

    def served(self, source: Source, block: Block, *, stored: bool) -> None:
        """Have the block stored where the settings want it, if it is not. Does not wait: the thread is grpc's."""
        self._workers.trust(source.worker)
        if source.ufs and stored:
            self._remember_holder(block, source.worker.worker_id)
        if not self._policy.store or not placement.readable_from_ufs(block):
            return
        target = self._store_at(source, stored=stored)
        if target is not None and self._first_request(block.block_id):
            # A login may be needed first.
            asking = threading.Thread(
                target=self.request,
                args=(target, block, source.worker, Budget(self._clock, self._policy.cache_try_s)),
                name=f"cache-{block.block_id}",
                daemon=True,
            )
            start_if_possible(asking)  # the bytes are here: whether the block is stored must not cost the read

    def request(self, target: BlockWorkerInfo, block: Block, origin: BlockWorkerInfo, budget: Budget) -> None:
        """Send a Cache call to `target` and don't wait for it."""
        try:
            connection = self._workers.connection(target, budget)
            call = start_cache(connection, block, origin.address, budget.per_try_s(self._policy.cache_try_s))
        except (grpc.RpcError, UpstreamError) as error:
            log.debug("block not requested", block=block.block_id, target=target.address.target, reason=text_of(error))
            return
        call.when_done(_settle)

    def _located(self, block: Block, budget: Budget) -> Block:
        """The block with what the master knows now; the old hints come after it, because a block worker that has just
        failed or restarted may be missing from the answer and have the block all the same."""
        try:
            known = self._master.block_placement(block.block_id, budget.part(PLACEMENT_WAIT_S)).locations
        except UpstreamError as error:
            log.debug("no fresh locations", block=block.block_id, reason=str(error))
            return block
        return block._replace(locations=(*known, *(i for i in block.locations if i not in known)))

    def _store_at(self, source: Source, *, stored: bool) -> BlockWorkerInfo | None:
        cluster = self._workers.known()
        local = source.worker.worker_id in cluster.node_ids if cluster else True
        if self._policy.passive_cache and cluster is not None and not local:
            for worker in cluster.workers:
                if worker.worker_id in cluster.node_ids:
                    return worker
        return source.worker if source.ufs and not stored else None

    def _remember_holder(self, block: Block, worker_id: int) -> None:
        self._holders[block.block_id] = worker_id
        if len(self._holders) > REMEMBERED_HOLDERS:
            with contextlib.suppress(KeyError):  # another thread has emptied it
                self._holders.popitem(last=False)
        cluster = self._workers.known()
        if cluster is not None and worker_id in cluster.node_ids:
            self._stored_here(block)

    def _first_request(self, block_id: int) -> bool:
        now = self._clock.now()
        last = self._requested.get(block_id)
        if last is not None and now - last < ASKED_AGAIN_S:
            return False
        self._requested[block_id] = now
        self._requested.move_to_end(block_id)
        if len(self._requested) > REMEMBERED_REQUESTS:
            with contextlib.suppress(KeyError):  # another thread has emptied it
                self._requested.popitem(last=False)
        return True


def _settle(call: PendingCall[CacheResponse]) -> None:
    """Runs in a grpc thread: counts how the call ended. Caching is best effort, the read has long succeeded."""
    try:
        call.result()
    except (grpc.RpcError, UpstreamError) as error:
        log.debug("block not stored", reason=text_of(error))
