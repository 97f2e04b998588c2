"""A small Alluxio that does what a test tells it, right or wrong: gRPC over real sockets, answers from a script.

One object is one server process of a cluster: a master, a block worker, or both on one port. Without a script it
behaves: SASL SIMPLE with channel ids, right versions, blocks from `blocks`, and a block worker's habit of taking a
half-closed ReadBlock for a cancelled one (it then ends with OK and too little data). `on(method, handler)` replaces
one procedure; `read_faults` holds what goes wrong with the next ReadBlock calls. Everything that was received and
everything that was done wrong is counted, so that a test can prove that its fault happened.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from fusecache.alluxio import methods
from fusecache.alluxio.model import FILE_SEQUENCE, block_id_of
from fusecache.pb.alluxio import (
    block_master_pb2,
    block_worker_pb2,
    common_pb2,
    file_system_master_pb2,
    meta_master_pb2,
    sasl_server_pb2,
    version_pb2,
)

SERVICE_VERSIONS = {
    version_pb2.META_MASTER_CLIENT_SERVICE: 2,
    version_pb2.FILE_SYSTEM_MASTER_CLIENT_SERVICE: 2,
    version_pb2.BLOCK_MASTER_CLIENT_SERVICE: 2,
    version_pb2.BLOCK_WORKER_CLIENT_SERVICE: 1,
}

_STREAMED_ANSWERS = {"ListStatus"}
_CONVERSATIONS = {"authenticate", "ReadBlock", "OpenLocalBlock"}
_METHODS = {method.name: method for method in vars(methods).values() if isinstance(method, methods.Method)}

_REQUEST_TYPES: dict[str, Any] = {
    "getServiceVersion": version_pb2.GetServiceVersionPRequest,
    "authenticate": sasl_server_pb2.SaslMessage,
    "GetStatus": file_system_master_pb2.GetStatusPRequest,
    "ListStatus": file_system_master_pb2.ListStatusPRequest,
    "GetFilePath": file_system_master_pb2.GetFilePathPRequest,
    "Free": file_system_master_pb2.FreePRequest,
    "GetFileInfo": file_system_master_pb2.GetFileInfoPRequest,
    "GetWorkerInfoList": block_master_pb2.GetWorkerInfoListPOptions,
    "GetBlockInfo": block_master_pb2.GetBlockInfoPRequest,
    "GetBlockMasterInfo": block_master_pb2.GetBlockMasterInfoPOptions,
    "GetConfiguration": meta_master_pb2.GetConfigurationPOptions,
    "GetMasterInfo": meta_master_pb2.GetMasterInfoPOptions,
    "ReadBlock": block_worker_pb2.ReadRequest,
    "OpenLocalBlock": block_worker_pb2.OpenLocalBlockRequest,
    "Cache": block_worker_pb2.CacheRequest,
    "Load": block_worker_pb2.LoadRequest,
}

Handler = Callable[[Any, grpc.ServicerContext], Any]


class Received(NamedTuple):
    """One call as it came in; for conversations the first message."""

    method: str
    request: Any
    channel_id: str | None


@dataclass
class ReadFault:
    """What goes wrong with one ReadBlock call. Byte counts are of this call's data."""

    cut_after: int | None = None
    """End with OK after so many bytes."""
    fail_after: int | None = None
    """End with `code` after so many bytes."""
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    stall_after: int | None = None
    """Send nothing more after so many bytes, until the client gives up."""
    empty_chunks: int = 0
    """Chunks without bytes to send before the data; -1 = endlessly."""
    chunk_bytes: int | None = None
    """Size of chunks, whatever was asked for."""
    surplus: bytes = b""
    """Bytes that follow the last one asked for, in the same chunk."""


@dataclass
class ReadSeen:
    """How one ReadBlock call went, seen from the server."""

    request: block_worker_pb2.ReadRequest
    acknowledged: list[int] = field(default_factory=list)
    half_closed_early: bool = False
    sent: int = 0


class ScriptedAlluxio:
    """See the module's docstring. `start()` before use, `stop()` after; a context manager does both."""

    def __init__(
        self, *, auth: bool = True, port: int = 0, cluster_id: bytes = b"c0ffee00-0000-4000-8000-000000000001"
    ):
        self.auth = auth
        self.cluster_id = cluster_id
        self.versions = dict(SERVICE_VERSIONS)
        self.files: dict[bytes, file_system_master_pb2.FileInfo] = {}
        self.children: dict[bytes, list[list[file_system_master_pb2.FileInfo]]] = {}
        self.workers: list[block_master_pb2.WorkerInfo] = []
        self.placements: dict[int, list[int]] = {}
        self.blocks: dict[int, bytes] = {}
        self.local_paths: dict[int, bytes] = {}
        self.configuration: dict[bytes, bytes] = {}
        self.read_faults: deque[ReadFault] = deque()
        self.received: list[Received] = []
        self.reads: list[ReadSeen] = []
        self.done: Counter[str] = Counter()
        self.sessions: set[str] = set()
        self.session_ids: list[str] = []
        self.stopping = threading.Event()
        self._handlers: dict[str, Handler] = {}
        self._sessions_open: list[threading.Event] = []
        self._port = port
        self._server: grpc.Server | None = None
        self._pool: futures.ThreadPoolExecutor | None = None
        self._credentials: grpc.ServerCredentials | None = None
        self.target = ""

    def serve_tls(self, key: bytes, certificate: bytes, *, client_ca: bytes | None = None) -> None:
        """Speak TLS from the next start on; with `client_ca`, only to clients that have a certificate of it."""
        self._credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=client_ca, require_client_auth=client_ca is not None
        )

    def start(self) -> ScriptedAlluxio:
        """Listen. A restarted server keeps its port and forgets its sessions."""
        self.stopping = threading.Event()
        self.sessions = set()
        self._pool = futures.ThreadPoolExecutor(64, thread_name_prefix="scripted-alluxio")
        server = grpc.server(
            self._pool,
            handlers=[_Dispatch(self)],
            options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)],
        )
        address = f"127.0.0.1:{self._port}"
        if self._credentials is None:
            self._port = server.add_insecure_port(address)
        else:
            self._port = server.add_secure_port(address, self._credentials)
        assert self._port
        self.target = f"127.0.0.1:{self._port}"
        server.start()
        self._server = server
        return self

    def stop(self) -> None:
        """Drop every connection, at once. Idempotent."""
        self.stopping.set()
        self.end_sessions()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> ScriptedAlluxio:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def on(self, method: str, handler: Handler) -> None:
        """Have `handler(request, context)` answer `method` (for conversations `request` is the iterator)."""
        assert method in _METHODS, method
        self._handlers[method] = handler

    def calls(self, method: str) -> list[Received]:
        """What was received for `method`."""
        return [received for received in list(self.received) if received.method == method]

    def end_sessions(self) -> None:
        """Complete every SASL stream: the ids are not authenticated any more."""
        self.sessions.clear()
        for end in list(self._sessions_open):
            end.set()

    def forget_sessions(self) -> None:
        """Forget the ids and keep the streams: what a purge does."""
        self.sessions.clear()

    def add_worker(self, worker: ScriptedAlluxio, worker_id: int, **fields: Any) -> None:
        """Have this master list `worker` as a block worker."""
        port = int(worker.target.rpartition(":")[2])
        self.workers.append(
            block_master_pb2.WorkerInfo(
                id=worker_id,
                address=common_pb2.WorkerNetAddress(host=b"127.0.0.1", rpcPort=port, dataPort=port),
                state=b"LIVE",
                capacityBytes=fields.get("capacity_bytes", 1 << 40),
                usedBytes=fields.get("used_bytes", 0),
            )
        )

    def answer(self, name: str, request: Any, context: grpc.ServicerContext) -> Any:
        """Answer one call: the script's handler, else the built-in one."""
        channel_id = dict(context.invocation_metadata()).get("channel-id")
        conversation = name in _CONVERSATIONS
        if not conversation:
            self.received.append(Received(name, request, channel_id))
        if self.auth and _METHODS[name].authenticated and channel_id not in self.sessions:
            self.done["unauthenticated"] += 1
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, f"Channel: {channel_id} is not authenticated for call: {name}"
            )
        handler = self._handlers.get(name)
        if handler is not None:
            return handler(request, context)
        return getattr(self, _attribute_of(name))(request, context)

    def receive_first(self, name: str, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """The first message of a conversation, written down."""
        first = next(requests)
        self.received.append(Received(name, first, dict(context.invocation_metadata()).get("channel-id")))
        return first

    # what a behaving server answers

    def _get_service_version(self, request: Any, context: grpc.ServicerContext) -> Any:
        version = self.versions.get(request.serviceType)
        if version is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Service {request.serviceType} is not found.")
        return version_pb2.GetServiceVersionPResponse(version=version)

    def _authenticate(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        first = self.receive_first("authenticate", requests, context)
        channel_id = first.clientId.decode()
        _, user, password = first.message.split(b"\0")
        if not user or not password or channel_id in self.session_ids:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "Plain authentication failed")
        self.session_ids.append(channel_id)
        self.sessions.add(channel_id)
        end = threading.Event()
        self._sessions_open.append(end)
        if not context.add_callback(end.set):
            end.set()  # the client has gone already
        yield sasl_server_pb2.SaslMessage(messageType=sasl_server_pb2.SUCCESS)
        end.wait()
        self.sessions.discard(channel_id)
        self._sessions_open.remove(end)

    def _get_master_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        info = meta_master_pb2.MasterInfo(clusterId=self.cluster_id, version=b"2.9.3")
        return meta_master_pb2.GetMasterInfoPResponse(masterInfo=info)

    def _get_configuration(self, request: Any, context: grpc.ServicerContext) -> Any:
        return meta_master_pb2.GetConfigurationPResponse(
            clusterConfigs=[common_pb2.ConfigProperty(name=k, value=v) for k, v in self.configuration.items()]
        )

    def _get_status(self, request: Any, context: grpc.ServicerContext) -> Any:
        info = self.files.get(request.path)
        if info is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f'Path "{request.path!r}" does not exist.')
        return file_system_master_pb2.GetStatusPResponse(fileInfo=info)

    def _list_status(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        for infos in self.children.get(request.path, []):
            yield file_system_master_pb2.ListStatusPResponse(fileInfos=infos)

    def _get_file_path(self, request: Any, context: grpc.ServicerContext) -> Any:
        for path, info in self.files.items():
            if info.fileId == request.fileId:
                return file_system_master_pb2.GetFilePathPResponse(path=path)
        context.abort(grpc.StatusCode.NOT_FOUND, f"inodeId {request.fileId} does not exist")
        return None

    def _get_file_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        for info in self.files.values():
            if info.fileId == request.fileId:
                return file_system_master_pb2.GetFileInfoPResponse(fileInfo=info)
        context.abort(grpc.StatusCode.NOT_FOUND, f"inodeId {request.fileId} does not exist")
        return None

    def _free(self, request: Any, context: grpc.ServicerContext) -> Any:
        return file_system_master_pb2.FreePResponse()

    def _get_worker_info_list(self, request: Any, context: grpc.ServicerContext) -> Any:
        return block_master_pb2.GetWorkerInfoListPResponse(workerInfos=self.workers)

    def _get_block_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        ids = self.placements.get(request.blockId)
        if ids is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"block {request.blockId} does not exist")
            return None
        locations = [common_pb2.BlockLocation(workerId=worker_id) for worker_id in ids]
        return block_master_pb2.GetBlockInfoPResponse(
            blockInfo=common_pb2.BlockInfo(blockId=request.blockId, length=1, locations=locations)
        )

    def _get_block_master_info(self, request: Any, context: grpc.ServicerContext) -> Any:
        info = block_master_pb2.BlockMasterInfo(capacityBytes=1 << 40, freeBytes=1 << 39, usedBytes=1 << 39)
        return block_master_pb2.GetBlockMasterInfoPResponse(blockMasterInfo=info)

    def _open_local_block(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        first = self.receive_first("OpenLocalBlock", requests, context)
        path = self.local_paths.get(first.block_id)
        if path is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"block {first.block_id} is not here")
        yield block_worker_pb2.OpenLocalBlockResponse(path=path)
        for _ in requests:
            pass
        self.done["local_block_unlocked"] += 1

    def _cache(self, request: Any, context: grpc.ServicerContext) -> Any:
        return block_worker_pb2.CacheResponse()

    def _load(self, request: Any, context: grpc.ServicerContext) -> Any:
        return block_worker_pb2.LoadResponse(status=block_worker_pb2.SUCCESS)

    def _read_block(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        request = self.receive_first("ReadBlock", requests, context)
        seen = ReadSeen(request)
        self.reads.append(seen)
        fault = self.read_faults.popleft() if self.read_faults else ReadFault()
        if request.length <= 0 or request.offset < 0:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "offset or length")
        if request.chunk_size <= 0:
            self.done["hung_for_chunk_size"] += 1
            self._hang(context)
            return
        data = self.blocks.get(request.block_id)
        if data is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"block {request.block_id} is not here")
            return
        finished = threading.Event()
        cancelled = threading.Event()
        watcher = threading.Thread(
            target=_watch_requests,
            args=(requests, seen, finished, cancelled),
            name="scripted-alluxio-acks",
            daemon=True,
        )
        watcher.start()
        try:
            yield from self._send(data, request, fault, seen, finished, cancelled, context)
        finally:
            finished.set()

    def _send(
        self,
        data: bytes,
        request: Any,
        fault: ReadFault,
        seen: ReadSeen,
        finished: threading.Event,
        cancelled: threading.Event,
        context: grpc.ServicerContext,
    ) -> Iterator[Any]:
        end = min(request.offset + request.length, len(data))
        size = fault.chunk_bytes or min(request.chunk_size, 2 << 20)
        position = request.offset
        empty = fault.empty_chunks
        while empty and context.is_active():
            self.done["empty_chunk"] += 1
            empty -= 1
            yield _chunk(b"")
        planned = {"cut": fault.cut_after, "failed": fault.fail_after, "stalled": fault.stall_after}
        soonest = sorted((after, deed) for deed, after in planned.items() if after is not None)
        after, deed = soonest[0] if soonest else (len(data), "")
        limit = request.offset + after
        while position < end:
            if cancelled.is_set():
                return
            stop = min(end, position + size, limit)
            piece = data[position:stop]
            if piece:
                position = stop
                seen.sent += len(piece)
                if position == end and fault.surplus:
                    self.done["surplus"] += 1
                    piece += fault.surplus
                if position == end:
                    finished.set()  # the client may end its side before this thread goes on behind the yield
                yield _chunk(piece)
            if position == limit and position < end:
                self.done[deed] += 1
                if deed == "failed":
                    context.abort(fault.code, "scripted")
                if deed == "stalled":
                    self._hang(context)
                return

    def _hang(self, context: grpc.ServicerContext) -> None:
        """Say nothing until the client has gone."""
        gone = threading.Event()
        if context.add_callback(gone.set):
            while not gone.wait(0.05) and not self.stopping.is_set():
                pass


class _Dispatch(grpc.GenericRpcHandler):
    """Routes every known method to `ScriptedAlluxio.answer`."""

    def __init__(self, server: ScriptedAlluxio) -> None:
        self._server = server

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        method = _METHODS.get(name)
        if method is None or method.path != path or (name == "authenticate" and not self._server.auth):
            return None

        def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
            return self._server.answer(name, request, context)

        make = grpc.unary_unary_rpc_method_handler
        if name in _STREAMED_ANSWERS:
            make = grpc.unary_stream_rpc_method_handler
        elif name in _CONVERSATIONS:
            make = grpc.stream_stream_rpc_method_handler
        return make(
            behaviour,
            request_deserializer=_REQUEST_TYPES[name].FromString,
            response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        )


def _watch_requests(
    requests: Iterator[Any], seen: ReadSeen, finished: threading.Event, cancelled: threading.Event
) -> None:
    """Collect acknowledgements; a half-close before the end means cancel, as Alluxio has it."""
    try:
        for message in requests:
            seen.acknowledged.append(message.offset_received)
    except Exception:  # noqa: BLE001  the stream was cancelled: grpc raises a bare Exception here
        return
    if not finished.is_set():
        seen.half_closed_early = True
        cancelled.set()


def _chunk(data: bytes) -> block_worker_pb2.ReadResponse:
    return block_worker_pb2.ReadResponse(chunk=block_worker_pb2.Chunk(data=data))


def _attribute_of(method: str) -> str:
    """GetStatus -> _get_status."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in method[0].upper() + method[1:])


def file_info(path: bytes, *, container: int, length: int, block_size: int = 64 << 20, **fields: Any) -> Any:
    """A completed, persisted file as a master describes it; `fields` replace what a test wants wrong."""
    file_id = container << 24 | FILE_SEQUENCE
    count = -(-length // block_size) if length > 0 and block_size > 0 else 0
    values: dict[str, Any] = {
        "fileId": file_id,
        "name": path.rpartition(b"/")[2],
        "path": path,
        "ufsPath": b"/ufs" + path,
        "length": length,
        "blockSizeBytes": block_size,
        "completed": True,
        "folder": False,
        "persisted": True,
        "persistenceState": b"PERSISTED",
        "blockIds": [block_id_of(file_id, index) for index in range(count)],
        "lastModificationTimeMs": 1_700_000_000_000,
        "owner": b"alice",
        "group": b"staff",
        "mode": 0o644,
        "mountId": 1,
    }
    return file_system_master_pb2.FileInfo(**{**values, **fields})


def folder_info(path: bytes, *, file_id: int, children: int = 0, **fields: Any) -> Any:
    """A folder as a master describes it: its `length` is the number of its children."""
    values: dict[str, Any] = {
        "fileId": file_id,
        "name": path.rpartition(b"/")[2],
        "path": path,
        "ufsPath": b"/ufs" + path,
        "length": children,
        "completed": True,
        "folder": True,
        "persisted": True,
        "persistenceState": b"PERSISTED",
        "lastModificationTimeMs": 1_700_000_000_000,
        "owner": b"alice",
        "group": b"staff",
        "mode": 0o755,
        "mountId": 1,
    }
    return file_system_master_pb2.FileInfo(**{**values, **fields})
