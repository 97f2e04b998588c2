"""Which master is the primary: asks all of them, believes the first that answers, forgets it when it fails.

Only a primary answers getServiceVersion for the meta master service; a standby closes the connection or says
UNAVAILABLE. All addresses are asked at once, so that one that drops packets delays nothing. Every discovery also
checks that the primary speaks the protocol version this client speaks, and that it is of the same cluster as before.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import structlog

from fusecache.alluxio.connection import Connection, PendingCall
from fusecache.alluxio.decode import decode_identity
from fusecache.alluxio.methods import GET_MASTER_INFO, GET_SERVICE_VERSION
from fusecache.alluxio.status import code_of, to_error
from fusecache.clock import Clock
from fusecache.errors import Unavailable, UpstreamError, VersionMismatch
from fusecache.pb.alluxio.meta_master_pb2 import GetMasterInfoPOptions
from fusecache.pb.alluxio.version_pb2 import (
    FILE_SYSTEM_MASTER_CLIENT_SERVICE,
    META_MASTER_CLIENT_SERVICE,
    GetServiceVersionPRequest,
    GetServiceVersionPResponse,
    ServiceType,
)
from fusecache.rpc.budget import Budget

log = structlog.get_logger(__name__)

META_MASTER_VERSION = 2
FILE_SYSTEM_MASTER_VERSION = 2
"""Alluxio 2.x (Constants.java); another number is another protocol."""

CONFIRMED_FOR_S = 30.0
"""Without a session (authentication off, or not yet logged in) nothing tells that a master was restarted, perhaps as
another cluster's: it is asked again after this time."""

_TRY_NEXT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        # A master that is starting up has not registered the service yet.
        grpc.StatusCode.NOT_FOUND,
    }
)
"""Answers that mean "not the primary, or not yet"; anything else is an error of that server."""

_Version = PendingCall[GetServiceVersionPResponse]


class Masters:
    """The masters of one cluster; `primary` is remembered until `lost`."""

    def __init__(
        self, targets: Sequence[str], connect: Callable[[str], Connection], *, connect_s: float, clock: Clock
    ) -> None:
        """`connect` makes a connection that calls `lost` when its session ends."""
        self._targets = tuple(targets)
        self._clock = clock
        self._confirmed_s = 0.0
        self._connect = connect
        self._connect_s = connect_s
        self._connections: dict[str, Connection] = {}
        self._primary: Connection | None = None
        self._last_target = ""
        self._discovery = threading.Lock()
        self._cluster_id: str | None = None
        self._closed = False

    def primary(self, budget: Budget) -> Connection:
        """The primary's connection. Unavailable when no master says it is; VersionMismatch.

        UpstreamError after `close`: final, so that nobody who retries goes on until its budget is spent.
        """
        if self._closed:
            raise UpstreamError(f"{self._names()}: the client is closed")
        primary, confirmed_s = self._primary, self._confirmed_s
        if primary is not None and (primary.notices_restarts or self._clock.now() - confirmed_s < CONFIRMED_FOR_S):
            return primary
        limit_s = budget.per_try_s(self._connect_s)
        if not self._discovery.acquire(timeout=limit_s):
            raise Unavailable(f"{self._names()}: still looking for the primary master after {limit_s:.1f} s")
        try:
            if self._primary is None or self._confirmed_s == confirmed_s:
                self._primary = self._discover(limit_s)
                self._confirmed_s = self._clock.now()
                if self._last_target not in ("", self._primary.target):
                    log.info("another master is primary", primary=self._primary.target, before=self._last_target)
                self._last_target = self._primary.target
            return self._primary
        finally:
            self._discovery.release()

    def belong_to(self, cluster_id: str) -> None:
        """From now on only masters of this cluster are believed: ids repeat across clusters, so that one that was
        formatted anew, or another one behind the same address, would serve its own bytes under our ids."""
        self._cluster_id = cluster_id

    def lost(self, connection: Connection) -> None:
        """`connection` did not answer: the next call looks for the primary again."""
        if self._primary is connection:
            self._primary = None

    def close(self) -> None:
        """Close every connection. Ends calls and a discovery that are under way, so it must not wait for them."""
        self._closed = True
        self._primary = None
        for connection in list(self._connections.values()):
            connection.close()

    def _discover(self, limit_s: float) -> Connection:
        answers: queue.SimpleQueue[tuple[Connection, _Version]] = queue.SimpleQueue()
        request = GetServiceVersionPRequest(serviceType=META_MASTER_CLIENT_SERVICE)
        pending: list[_Version] = []
        for target in self._targets:
            connection = self._connections.get(target)
            if connection is None:
                connection = self._connections[target] = self._connect(target)
            if self._closed:  # made after `close` had looked
                connection.close()
            call = connection.future(GET_SERVICE_VERSION, request, limit_s)
            pending.append(call)
            call.when_done(partial(_hand_over, answers, connection))
        failures: list[UpstreamError] = []
        final: UpstreamError | None = None
        try:
            for _ in self._targets:
                connection, call = answers.get()  # ends: every call has a deadline
                try:
                    answer = call.result()
                except grpc.RpcError as error:
                    failure = to_error(error, connection.target)
                    failures.append(failure)
                    if code_of(error) not in _TRY_NEXT:
                        final = failure
                    continue
                _check_version(connection.target, "meta master", answer.version, META_MASTER_VERSION)
                self._check_file_system_version(connection, limit_s)
                self._check_cluster(connection, limit_s)
                return connection
        finally:
            for call in pending:
                call.cancel()
        if final is not None and len(failures) == len(self._targets) == 1:
            raise final
        reasons = "; ".join(str(failure) for failure in failures)
        raise Unavailable(f"no master of {self._names()} is primary: {reasons}")

    def _check_file_system_version(self, connection: Connection, limit_s: float) -> None:
        request = GetServiceVersionPRequest(serviceType=FILE_SYSTEM_MASTER_CLIENT_SERVICE)
        try:
            answer = connection.unary(GET_SERVICE_VERSION, request, limit_s)
        except grpc.RpcError as error:
            # The meta service answers a moment before the file system service is registered.
            raise Unavailable(str(to_error(error, connection.target))) from error
        _check_version(connection.target, "file system master", answer.version, FILE_SYSTEM_MASTER_VERSION)

    def _check_cluster(self, connection: Connection, limit_s: float) -> None:
        if self._cluster_id is None:
            return
        try:
            answer = connection.unary(GET_MASTER_INFO, GetMasterInfoPOptions(), limit_s)
        except grpc.RpcError as error:
            raise Unavailable(str(to_error(error, connection.target))) from error
        identity = decode_identity(answer.masterInfo, connection.target)
        if identity.cluster_id != self._cluster_id:
            raise UpstreamError(
                f"{connection.target} is a master of cluster {identity.cluster_id}, not of {self._cluster_id} any more:"
                f" mount again"
            )

    def _names(self) -> str:
        return ", ".join(self._targets)


def check_service_version(
    connection: Connection, service: ServiceType, name: str, expected: int, limit_s: float
) -> None:
    """VersionMismatch unless the server's `service` has version `expected`; grpc.RpcError when it does not say."""
    answer = connection.unary(GET_SERVICE_VERSION, GetServiceVersionPRequest(serviceType=service), limit_s)
    _check_version(connection.target, name, answer.version, expected)


def _hand_over(answers: queue.SimpleQueue[tuple[Connection, _Version]], connection: Connection, call: _Version) -> None:
    answers.put((connection, call))


def _check_version(target: str, name: str, version: int, expected: int) -> None:
    if version != expected:
        raise VersionMismatch(
            f"{target}: {name} service has version {version}, this client speaks {expected} (Alluxio 2.x)"
        )
