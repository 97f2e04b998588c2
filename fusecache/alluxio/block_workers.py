"""The block workers of the cluster: who they are, a connection to each, which of them failed lately.

The list comes from the master and is kept for a while; when the master can't be asked, the old list goes on
being used. A block worker is version-checked when it is first spoken to. Those that failed are remembered for
SUSPECT_S and asked last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from fusecache.alluxio.connection import Connection
from fusecache.alluxio.masters import check_service_version
from fusecache.alluxio.model import BlockWorkerInfo
from fusecache.alluxio.node_names import own_hosts
from fusecache.alluxio.placement import of_this_node
from fusecache.clock import Clock
from fusecache.errors import Unavailable, UpstreamError
from fusecache.pb.alluxio.version_pb2 import BLOCK_WORKER_CLIENT_SERVICE
from fusecache.rpc.budget import Budget

log = structlog.get_logger(__name__)

BLOCK_WORKER_VERSION = 1
SUSPECT_S = 30.0
"""How long a block worker that failed is asked last. A dead one costs `connect_s` a try: without this memory every
read of its blocks would pay that."""

LIST_AGE_S = 120.0
"""As Alluxio's own client (alluxio.user.worker.list.refresh.interval)."""


REFRESH_WAIT_S = 2.0
"""Longest wait for a newer list while there is an old one: reads go on when no master answers."""


class Cluster(NamedTuple):
    """The block workers at one moment."""

    workers: tuple[BlockWorkerInfo, ...]
    node_ids: frozenset[int]
    """Those on this node."""
    taken_s: float


class BlockWorkers:
    """Thread-safe; made without I/O."""

    def __init__(
        self,
        fetch: Callable[[Budget], tuple[BlockWorkerInfo, ...]],
        connect: Callable[[str], Connection],
        *,
        node_hosts: Sequence[str],
        connect_s: float,
        clock: Clock,
    ) -> None:
        self._fetch = fetch
        self._connect = connect
        self._node_hosts = tuple(node_hosts)
        self._connect_s = connect_s
        self._clock = clock
        self._cluster: Cluster | None = None
        self._refresh = threading.Lock()
        self._connections: dict[str, Connection] = {}
        self._checked: set[str] = set()
        self._set_up = threading.Lock()
        self._closed = False
        self._suspect_until_s: dict[int, float] = {}
        self._warned_s: dict[int, float] = {}

    def cluster(self, budget: Budget, *, max_age_s: float = LIST_AGE_S) -> Cluster:
        """The block workers, at most `max_age_s` old when the master answers."""
        cluster = self._cluster
        if cluster is not None and self._clock.now() - cluster.taken_s <= max_age_s:
            return cluster
        # One thread asks; the others go on with the old list when there is one.
        if cluster is not None:
            if not self._refresh.acquire(blocking=False):
                return cluster
        elif not self._refresh.acquire(timeout=budget.per_try_s(budget.total_s)):
            raise Unavailable("block workers: another thread's request did not end within the budget")
        try:
            newer = self._cluster
            if newer is not None and newer is not cluster:
                return newer
            return self._renew(cluster, budget)
        finally:
            self._refresh.release()

    def fresh(self) -> Cluster | None:
        """What `cluster` gives without asking the master, None when it would ask."""
        cluster = self._cluster
        return cluster if cluster is not None and self._clock.now() - cluster.taken_s <= LIST_AGE_S else None

    def suspects(self) -> frozenset[int]:
        """Ids of the block workers that failed within the last SUSPECT_S."""
        if not self._suspect_until_s:
            return frozenset()
        now = self._clock.now()
        for worker_id, until_s in list(self._suspect_until_s.items()):
            if until_s <= now:
                self._suspect_until_s.pop(worker_id, None)
        return frozenset(self._suspect_until_s)

    def known(self) -> Cluster | None:
        """The last list, without asking anybody; None before the first one."""
        return self._cluster

    def suspect(self, worker: BlockWorkerInfo, reason: str) -> None:
        """`worker` failed in a way that another request would meet too."""
        if self._closed:
            return  # it was we who ended the call
        now = self._clock.now()
        if now - self._warned_s.get(worker.worker_id, -SUSPECT_S) >= SUSPECT_S:
            self._warned_s[worker.worker_id] = now
            log.warning("block worker failed", target=worker.address.target, reason=reason)
        self._suspect_until_s[worker.worker_id] = now + SUSPECT_S

    def trust(self, worker: BlockWorkerInfo) -> None:
        """`worker` has just served bytes."""
        if self._suspect_until_s:
            self._suspect_until_s.pop(worker.worker_id, None)

    def connection(self, worker: BlockWorkerInfo, budget: Budget) -> Connection:
        """A version-checked connection. grpc.RpcError when it does not answer; VersionMismatch."""
        target = worker.address.target
        connection = self._connections.get(target)
        if connection is None:
            with self._set_up:
                if self._closed:
                    raise UpstreamError(f"{target}: the client is closed")
                connection = self._connections.get(target)
                if connection is None:
                    connection = self._connections[target] = self._connect(target)
        if target not in self._checked:
            check_service_version(
                connection,
                BLOCK_WORKER_CLIENT_SERVICE,
                "block worker",
                BLOCK_WORKER_VERSION,
                budget.per_try_s(self._connect_s),
            )
            self._checked.add(target)
        return connection

    def checked(self, worker: BlockWorkerInfo) -> Connection | None:
        """What `connection` gives without asking the block worker, None when it would ask."""
        target = worker.address.target
        return self._connections.get(target) if target in self._checked else None

    def close(self) -> None:
        """Close every connection."""
        with self._set_up:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()

    def _renew(self, old: Cluster | None, budget: Budget) -> Cluster:
        try:
            workers = self._fetch(budget if old is None else budget.part(REFRESH_WAIT_S))
        except UpstreamError as error:
            if old is None:
                raise
            log.warning("block worker list not refreshed", reason=str(error), age_s=self._clock.now() - old.taken_s)
            # Not asked again before a while: the master is down and reads must not wait for it.
            self._cluster = old._replace(taken_s=self._clock.now() - LIST_AGE_S + SUSPECT_S)
            return self._cluster
        self._cluster = Cluster(workers, self._node_ids(workers), self._clock.now())
        self._forget_gone(workers)
        return self._cluster

    def _node_ids(self, workers: Sequence[BlockWorkerInfo]) -> frozenset[int]:
        names = self._node_hosts
        if not names:
            candidates = {name for w in workers for name in (w.address.host, w.address.container_host, w.address.node)}
            names = tuple(own_hosts(candidates))
        return of_this_node(workers, names)

    def _forget_gone(self, workers: Sequence[BlockWorkerInfo]) -> None:
        live = {worker.address.target for worker in workers}
        with self._set_up:
            gone = [target for target in self._connections if target not in live]
            connections = [self._connections.pop(target) for target in gone]
            self._checked.difference_update(gone)
        for connection in connections:
            log.info("block worker left the cluster", target=connection.target)
            connection.close()
