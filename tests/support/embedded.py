"""Embedded servers for tests: on a free port, over a folder of the test, and a client that speaks plain gRPC.

`embedded_server(...)` is a context manager.
`WireClient` has no retries and no checks: it shows what is on the wire, and is not the client under test.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import queue
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from fusecache.embedded.server import EmbeddedServer
from fusecache.pb.alluxio import (
    block_master_pb2_grpc,
    block_worker_pb2_grpc,
    file_system_master_pb2_grpc,
    meta_master_pb2_grpc,
    sasl_server_pb2_grpc,
    version_pb2_grpc,
)
from fusecache.pb.alluxio.block_master_pb2 import GetWorkerInfoListPOptions
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest, ReadResponse
from fusecache.pb.alluxio.common_pb2 import FREE
from fusecache.pb.alluxio.file_system_master_pb2 import (
    ONCE,
    FileInfo,
    FileSystemMasterCommonPOptions,
    GetStatusPOptions,
    GetStatusPRequest,
    ListStatusPOptions,
    ListStatusPRequest,
)
from fusecache.pb.alluxio.protocol_pb2 import OpenUfsBlockOptions
from fusecache.pb.alluxio.sasl_server_pb2 import CHALLENGE, SIMPLE, SaslMessage


@contextlib.contextmanager
def embedded_server(folder: Path, state: Path, **options: Any) -> Iterator[EmbeddedServer]:
    """A running server; `options` are those of EmbeddedServer."""
    with EmbeddedServer(folder, state, **options) as running:
        yield running


def replace(path: Path, data: bytes) -> None:
    """New content under an old name the careful way: a new file, renamed over the old one."""
    fresh = path.with_name(f".{uuid.uuid4().hex}.new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until a condition holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"condition did not hold within {timeout_s} s"
        time.sleep(0.01)


def common_options(sync_interval_ms: int = -1) -> FileSystemMasterCommonPOptions:
    """The options every metadata call must carry."""
    return FileSystemMasterCommonPOptions(syncIntervalMs=sync_interval_ms, ttl=-1, ttlAction=FREE)


class WireClient:
    """One authenticated channel to a master or block worker, with the generated stubs."""

    def __init__(self, target: str, *, auth: bool = True, sasl: SaslMessage | None = None) -> None:
        """`sasl` replaces the first message of the handshake."""
        self.channel = grpc.insecure_channel(target, [("grpc.max_receive_message_length", 100 << 20)])
        self.files = file_system_master_pb2_grpc.FileSystemMasterClientServiceStub(self.channel)
        self.ids = file_system_master_pb2_grpc.FileSystemMasterWorkerServiceStub(self.channel)
        self.blocks = block_master_pb2_grpc.BlockMasterClientServiceStub(self.channel)
        self.meta = meta_master_pb2_grpc.MetaMasterClientServiceStub(self.channel)
        self.configuration = meta_master_pb2_grpc.MetaMasterConfigurationServiceStub(self.channel)
        self.versions = version_pb2_grpc.ServiceVersionClientServiceStub(self.channel)
        self.worker = block_worker_pb2_grpc.BlockWorkerStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._handshake: queue.SimpleQueue[SaslMessage | None] = queue.SimpleQueue()
        if auth:
            channel_id = str(uuid.uuid4())
            first = sasl or SaslMessage(
                messageType=CHALLENGE,
                authenticationScheme=SIMPLE,
                clientId=channel_id.encode(),
                channelRef=b"test",
                message=b"\0%s\0noPassword" % getpass.getuser().encode(),
            )
            self._handshake.put(first)
            try:
                # Kept: a call object that is collected is cancelled, and the server forgets the channel.
                self.handshake = sasl_server_pb2_grpc.SaslAuthenticationServiceStub(self.channel).authenticate(
                    iter(self._handshake.get, None)
                )
                self.handshake_answer: SaslMessage = next(self.handshake)
            except grpc.RpcError:
                self.close()
                raise
            self.metadata = (("channel-id", first.clientId.decode()),)

    def __enter__(self) -> WireClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the handshake stream and the channel."""
        self._handshake.put(None)
        self.channel.close()

    def stat(self, path: bytes, *, sync_interval_ms: int = -1, load: int = ONCE) -> FileInfo:
        """GetStatus."""
        options = GetStatusPOptions(
            loadMetadataType=load,  # type: ignore[arg-type]
            commonOptions=common_options(sync_interval_ms),
            updateTimestamps=False,
        )
        answer = self.files.GetStatus(GetStatusPRequest(path=path, options=options), metadata=self.metadata)
        info: FileInfo = answer.fileInfo
        return info

    def messages(self, path: bytes, *, sync_interval_ms: int = -1, load: int = ONCE, **more: bool) -> list[Any]:
        """ListStatus, message by message."""
        options = ListStatusPOptions(
            loadMetadataType=load,  # type: ignore[arg-type]
            commonOptions=common_options(sync_interval_ms),
            **more,
        )
        return list(self.files.ListStatus(ListStatusPRequest(path=path, options=options), metadata=self.metadata))

    def entries(self, path: bytes, *, sync_interval_ms: int = -1, load: int = ONCE, **more: bool) -> list[FileInfo]:
        """ListStatus, all entries."""
        return [
            info
            for message in self.messages(path, sync_interval_ms=sync_interval_ms, load=load, **more)
            for info in message.fileInfos
        ]

    def worker_targets(self) -> list[str]:
        """host:port of every block worker."""
        answer = self.blocks.GetWorkerInfoList(GetWorkerInfoListPOptions(), metadata=self.metadata)
        addresses = [info.address for info in answer.workerInfos]
        return [f"{address.host.decode()}:{address.rpcPort}" for address in addresses]

    def read(self, request: ReadRequest, *, half_close_after: int | None = None) -> list[bytes]:
        """ReadBlock: the chunks received. Half-closes after so many bytes, or when all asked for have come."""
        requests: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        requests.put(request)
        answers: Iterator[ReadResponse] = self.worker.ReadBlock(iter(requests.get, None), metadata=self.metadata)
        enough = request.length if half_close_after is None else half_close_after
        chunks: list[bytes] = []
        received = 0
        closed = False
        try:
            for answer in answers:
                chunks.append(answer.chunk.data)
                received += len(answer.chunk.data)
                if received >= enough and not closed:
                    requests.put(None)
                    closed = True
        finally:
            requests.put(None)
        return chunks


def read_request(
    info: FileInfo,
    block: int = 0,
    offset: int = 0,
    length: int | None = None,
    *,
    chunk_size: int = 1 << 20,
    from_ufs: bool = True,
    no_cache: bool = False,
) -> ReadRequest:
    """A request for a piece of a block as a client makes it from the file's status."""
    block_length = min(info.blockSizeBytes, info.length - block * info.blockSizeBytes)
    options = OpenUfsBlockOptions(
        ufs_path=info.ufsPath,
        offset_in_file=block * info.blockSizeBytes,
        block_size=block_length,
        maxUfsReadConcurrency=2147483647,
        mountId=info.mountId,
        no_cache=no_cache,
    )
    return ReadRequest(
        block_id=info.blockIds[block],
        offset=offset,
        length=block_length - offset if length is None else length,
        chunk_size=chunk_size,
        open_ufs_block_options=options if from_ufs else None,
    )
