"""Metadata calls to the primary master: request, retry within the budget, decode.

Every call that may load metadata carries the whole of `common_options`: Alluxio's server does not merge its
defaults into a request, so that leaving out the load type hides files that are only in the under storage, and
leaving out the ttl lets the master delete what it has just loaded (and the under storage's file with it).

A listing is streamed. Before its first message it may be retried; after that an error is raised, because a
second try could show some entries twice and others never.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import grpc
import structlog

from fusecache.alluxio import decode
from fusecache.alluxio.connection import AnswerStream, Connection, OpenCall
from fusecache.alluxio.masters import Masters
from fusecache.alluxio.methods import (
    FREE,
    GET_BLOCK_INFO,
    GET_BLOCK_MASTER_INFO,
    GET_CONFIGURATION,
    GET_FILE_INFO,
    GET_FILE_PATH,
    GET_MASTER_INFO,
    GET_STATUS,
    GET_WORKER_INFO_LIST,
    LIST_STATUS,
    Answer,
    Method,
    Request,
)
from fusecache.alluxio.model import BlockPlacement, BlockWorkerInfo, Capacity, ClusterIdentity, FileStatus
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.status import code_of, is_temporary, one_line, to_error
from fusecache.clock import Clock
from fusecache.errors import NotFound, StaleId, Unavailable
from fusecache.pb.alluxio import block_master_pb2 as blocks_pb2
from fusecache.pb.alluxio import common_pb2, meta_master_pb2
from fusecache.pb.alluxio import file_system_master_pb2 as files_pb2
from fusecache.rpc.budget import Budget
from fusecache.rpc.retry import call_with_retry

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

LISTING_PIECE = 1000
"""Entries decoded at a time: a message of 10,000 entries as one list of values held 65 MB and the interpreter
for as long as its decoding took."""


def common_options(sync_interval_ms: int) -> files_pb2.FileSystemMasterCommonPOptions:
    """The options no metadata request may go without. `sync_interval_ms`: -1 never compares with the under storage,
    0 always, N when the last comparison is older."""
    return files_pb2.FileSystemMasterCommonPOptions(syncIntervalMs=sync_interval_ms, ttl=-1, ttlAction=common_pb2.FREE)


class MasterClient:
    """Typed metadata calls. Blocking and thread-safe."""

    def __init__(self, masters: Masters, *, try_s: float, meter: RpcMeter, clock: Clock, rng: random.Random) -> None:
        self._masters = masters
        self._try_s = try_s
        self._meter = meter
        self._clock = clock
        self._rng = rng

    def identity(self, budget: Budget) -> ClusterIdentity:
        """Cluster id, version, and who is primary. From then on the masters of another cluster are refused."""
        answer = self._call(GET_MASTER_INFO, meta_master_pb2.GetMasterInfoPOptions(), budget, "cluster")
        primary = self._masters.primary(budget).target
        identity = self._decoded(lambda: decode.decode_identity(answer.masterInfo, primary))
        self._masters.belong_to(identity.cluster_id)
        return identity

    def get_status(self, path: bytes, *, sync_interval_ms: int, budget: Budget) -> FileStatus:
        """One file or folder by path. NotFound."""
        request = files_pb2.GetStatusPRequest(
            path=path,
            options=files_pb2.GetStatusPOptions(
                loadMetadataType=files_pb2.ONCE,
                commonOptions=common_options(sync_interval_ms),
                updateTimestamps=False,
            ),
        )
        answer = self._call(GET_STATUS, request, budget, one_line(path))
        return self._decoded(lambda: decode.decode_status(answer.fileInfo, self._meter.rejected, asked=path))

    def get_file_info(self, file_id: int, budget: Budget) -> FileStatus:
        """One file or folder by id; loads nothing from the under storage. StaleId when the id is unknown."""
        request = files_pb2.GetFileInfoPRequest(fileId=file_id, options=files_pb2.GetFileInfoPOptions())
        try:
            answer = self._call(GET_FILE_INFO, request, budget, f"file id {file_id}")
        except NotFound as error:
            raise StaleId(str(error)) from error

        def decoded() -> FileStatus:
            status = decode.decode_status(answer.fileInfo, self._meter.rejected, asked=None)
            if status.file_id != file_id:
                raise decode.Rejected("file_id", f"answer about file id {file_id} is about {status.file_id}")
            return status

        return self._decoded(decoded)

    def get_file_path(self, file_id: int, budget: Budget) -> bytes:
        """Where an id lives now. StaleId when it is unknown."""
        request = files_pb2.GetFilePathPRequest(fileId=file_id)
        try:
            answer = self._call(GET_FILE_PATH, request, budget, f"file id {file_id}")
        except NotFound as error:
            raise StaleId(str(error)) from error
        return self._decoded(lambda: decode.decode_file_path(answer))

    def list_status(self, path: bytes, *, sync_interval_ms: int, budget: Budget) -> Iterator[list[FileStatus]]:
        """The children of a folder, in pieces of at most LISTING_PIECE, in the server's order.

        The end of the iterator is the end of the folder; a stream that breaks raises instead. An empty folder gives
        no piece. NotFound when the path is gone or names a file.
        """
        request = files_pb2.ListStatusPRequest(
            path=path,
            options=files_pb2.ListStatusPOptions(
                loadMetadataType=files_pb2.ONCE,
                commonOptions=common_options(sync_interval_ms),
                recursive=False,
            ),
        )
        listing = self._retry(LIST_STATUS.name, lambda _: self._start(request, budget), budget, one_line(path))
        try:
            message = listing.first
            while message is not None:
                infos = message.fileInfos
                for start in range(0, len(infos), LISTING_PIECE):
                    piece = infos[start : start + LISTING_PIECE]
                    # Alluxio answers the listing of a file with the file itself: the folder was replaced by one.
                    if len(infos) == 1 and piece[0].path == path and path != b"/":
                        raise NotFound(f"{one_line(path)}: not a folder")
                    yield decode.decode_listing(piece, path, self._meter.rejected)
                message = next(listing.stream, None)
        except grpc.RpcError as error:
            listing.call.failed(error)
            self._after_failure(listing.connection, error)
            raise Unavailable(f"{one_line(path)}: listing broke off: {to_error(error, listing.call.target)}") from error
        except BaseException:
            listing.call.cancelled()
            raise
        finally:
            listing.stream.cancel()
        listing.call.succeeded()

    def block_workers(self, budget: Budget) -> tuple[BlockWorkerInfo, ...]:
        """The live block workers."""
        answer = self._call(GET_WORKER_INFO_LIST, blocks_pb2.GetWorkerInfoListPOptions(), budget, "block workers")
        return decode.decode_block_workers(answer, self._meter.rejected)

    def block_placement(self, block_id: int, budget: Budget) -> BlockPlacement:
        """Who holds a block now. NotFound."""
        request = blocks_pb2.GetBlockInfoPRequest(blockId=block_id, options=blocks_pb2.GetBlockInfoPOptions())
        answer = self._call(GET_BLOCK_INFO, request, budget, f"block {block_id}")
        return self._decoded(lambda: decode.decode_block_placement(answer.blockInfo, block_id, self._meter.rejected))

    def capacity(self, budget: Budget) -> Capacity:
        """Cache capacity of the cluster."""
        request = blocks_pb2.GetBlockMasterInfoPOptions(
            filters=[blocks_pb2.CAPACITY_BYTES, blocks_pb2.FREE_BYTES, blocks_pb2.USED_BYTES]
        )
        answer = self._call(GET_BLOCK_MASTER_INFO, request, budget, "capacity")
        return self._decoded(lambda: decode.decode_capacity(answer.blockMasterInfo))

    def configuration(self, budget: Budget) -> dict[str, str]:
        """The cluster's properties; needs no login."""
        answer = self._call(GET_CONFIGURATION, meta_master_pb2.GetConfigurationPOptions(), budget, "configuration")
        return decode.decode_configuration(answer, self._meter.rejected)

    def free(self, path: bytes, budget: Budget, *, recursive: bool) -> None:
        """Drop the cached blocks of a file (or of a folder's files); the under storage keeps its copies."""
        request = files_pb2.FreePRequest(
            path=path,
            options=files_pb2.FreePOptions(recursive=recursive, forced=False, commonOptions=common_options(-1)),
        )
        self._call(FREE, request, budget, one_line(path))

    def _start(self, request: files_pb2.ListStatusPRequest, budget: Budget) -> _Listing:
        """One try: the stream with its first message. The deadline is the whole budget, because the first message
        of a folder that is not yet loaded comes only when the master has listed the under storage."""
        connection = self._masters.primary(budget)
        try:
            stream, call = connection.answers(LIST_STATUS, request, budget.per_try_s(budget.total_s))
            try:
                first = next(stream, None)
            except grpc.RpcError as error:
                call.failed(error)
                raise
        except (grpc.RpcError, Unavailable) as error:
            self._after_failure(connection, error)
            raise
        return _Listing(connection, stream, call, first)

    def _call(self, method: Method[Request, Answer], request: Request, budget: Budget, what: str) -> Answer:
        def attempt(seconds: float) -> Answer:
            connection = self._masters.primary(budget)
            try:
                return connection.unary(method, request, seconds)
            except (grpc.RpcError, Unavailable) as error:
                self._after_failure(connection, error)
                raise

        return self._retry(method.name, attempt, budget, what)

    def _after_failure(self, connection: Connection, error: BaseException) -> None:
        """A master that does not answer may not be the primary any more: ask around before the next try."""
        if is_temporary(error) and code_of(error) is not grpc.StatusCode.UNAUTHENTICATED:
            self._masters.lost(connection)

    def _retry(self, name: str, attempt: Callable[[float], Result], budget: Budget, what: str) -> Result:
        def on_retry(number: int, error: BaseException) -> None:
            self._meter.retried(name)
            if number in (3, 10, 30, 100):
                log.warning("master does not answer", method=name, tries=number, reason=str(to_error(error, what)))

        try:
            return call_with_retry(
                attempt,
                budget=budget,
                try_s=self._try_s,
                is_temporary=is_temporary,
                clock=self._clock,
                rng=self._rng,
                on_retry=on_retry,
            )
        except grpc.RpcError as error:
            raise to_error(error, what) from error

    def _decoded(self, decoded: Callable[[], Result]) -> Result:
        try:
            return decoded()
        except decode.Rejected as refusal:
            self._meter.rejected(refusal.what)
            raise


class _Listing(NamedTuple):
    """A listing under way."""

    connection: Connection
    stream: AnswerStream[files_pb2.ListStatusPResponse]
    call: OpenCall
    first: files_pb2.ListStatusPResponse | None
    """None = the folder is empty."""
