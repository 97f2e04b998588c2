"""One block worker: bytes of blocks from its block files, or from the source when nobody has them.

A read's way: `ReadBlock` -> a complete block file of this worker, else the source file the request names ->
chunks -> when the block was read from its first byte to its last, it is committed as a block file before the
stream ends. As a real block worker, this one knows nothing of files: what to read for an unknown block is
what the request says (checked only to lie in the served folder), so a changed source is read as it is now,
under whatever id was asked for.

Half-closing a ReadBlock means cancel: the stream ends with OK and less data. Chunk size 0 gets no answer at
all. Both as the real one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import structlog

from fusecache.embedded.block_store import BlockStore, BlockWriter
from fusecache.embedded.rpc_methods import code_of, one_answer, two_streams
from fusecache.embedded.source import SourceFolder
from fusecache.errors import FusecacheError, InvalidRequest, NotFound, Unavailable, UpstreamError
from fusecache.pb.alluxio import block_worker_pb2 as pb
from fusecache.pb.alluxio.common_pb2 import BlockLocation, LocalityTier, TieredIdentity, WorkerNetAddress
from fusecache.pb.alluxio.protocol_pb2 import OpenUfsBlockOptions

log = structlog.get_logger(__name__)

MAX_CHUNK_BYTES = 2 << 20
"""Alluxio's alluxio.worker.network.reader.max.chunk.size.bytes."""


MOUNT_ID = 1
"""Alluxio's id of the root mount, the only one here."""


class AlreadyHeld(FusecacheError):
    """Load of a block that is complete here: a failure with code INTERNAL, as with a real block worker."""


class BlockWorker:
    """The BlockWorker service over one block store."""

    def __init__(
        self,
        worker_id: int,
        host: str,
        store: BlockStore,
        source: SourceFolder,
        *,
        background: ThreadPoolExecutor,
        peers: Callable[[], Sequence[BlockWorker]],
    ) -> None:
        """`background` runs asynchronous Cache requests and listens for half-closes; `peers` are all workers."""
        self.worker_id = worker_id
        self.host = host
        self.port = 0
        self.store = store
        self._source = source
        self._background = background
        self._peers = peers

    def address(self) -> WorkerNetAddress:
        """Where this worker listens."""
        host = self.host.encode()
        return WorkerNetAddress(
            host=host,
            rpcPort=self.port,
            dataPort=self.port,
            webPort=0,
            tieredIdentity=TieredIdentity(
                tiers=[LocalityTier(tierName=b"node", value=host), LocalityTier(tierName=b"rack")]
            ),
        )

    def location(self) -> BlockLocation:
        """This worker as the place of a block."""
        return BlockLocation(workerId=self.worker_id, workerAddress=self.address(), tierAlias=b"SSD", mediumType=b"SSD")

    def service(self) -> grpc.GenericRpcHandler:
        """The gRPC service."""
        return grpc.method_handlers_generic_handler(
            "alluxio.grpc.block.BlockWorker",
            {
                "ReadBlock": two_streams(self.read_block, pb.ReadRequest),
                "OpenLocalBlock": two_streams(self.open_local_block, pb.OpenLocalBlockRequest),
                "Cache": one_answer(self.cache, pb.CacheRequest),
                "Load": one_answer(self.load, pb.LoadRequest),
            },
        )

    # -- ReadBlock -----------------------------------------------------------------------------------------

    def read_block(self, requests: Iterator[pb.ReadRequest], _context: Any) -> Iterator[pb.ReadResponse]:
        """Bytes of one block from `offset`; later requests are acknowledgements."""
        request = next(requests, None)
        if request is None:
            return
        if request.block_id < 0 or request.offset < 0 or request.length <= 0:
            raise InvalidRequest(
                f"Invalid read request: block id {request.block_id}, offset {request.offset}, length {request.length}"
            )
        if request.chunk_size <= 0:
            for _ in requests:
                pass
            return
        pieces = self._pieces(request)
        cancelled: threading.Event | None = None
        remaining = request.length
        for piece in pieces:
            if cancelled is not None and cancelled.is_set():
                pieces.close()
                return
            yield pb.ReadResponse(chunk=pb.Chunk(data=piece))
            remaining -= len(piece)
            if cancelled is None and remaining > 0:
                # Only now, though a real block worker notices a half-close before the first chunk too: another
                # thread for each small file made reads of them half as fast (450/s became 210/s).
                cancelled = self._watch_for_half_close(requests)

    def _watch_for_half_close(self, requests: Iterator[pb.ReadRequest]) -> threading.Event:
        closed = threading.Event()

        def watch() -> None:
            try:
                for _ in requests:
                    pass
            except Exception as exc:  # noqa: BLE001 - grpc raises a bare Exception when the call is over
                log.debug("request stream ended", reason=str(exc))
            closed.set()

        self._background.submit(watch)
        return closed

    def _pieces(self, request: pb.ReadRequest) -> Generator[bytes, None, None]:
        chunk = min(request.chunk_size, MAX_CHUNK_BYTES)
        opened = self.store.open(request.block_id)
        if opened is not None:
            descriptor, length = opened
            try:
                yield from _chunks(descriptor, request.offset, min(request.offset + request.length, length), 0, chunk)
            finally:
                os.close(descriptor)
            return
        options = request.open_ufs_block_options
        descriptor = self._open_source(request.block_id, options)
        try:
            yield from self._pieces_of_source(request, options, descriptor, chunk)
        finally:
            os.close(descriptor)

    def _pieces_of_source(
        self, request: pb.ReadRequest, options: OpenUfsBlockOptions, descriptor: int, chunk: int
    ) -> Iterator[bytes]:
        """Bytes from the source, committed as a block when they are all of it."""
        length = options.block_size
        end = min(request.offset + request.length, length)
        found = os.fstat(descriptor)
        if request.offset < end and options.offset_in_file + request.offset > found.st_size:
            raise Unavailable(f"Failed to read from UFS, blockId={request.block_id}, offset={request.offset}")
        caching = request.offset == 0 and not options.no_cache
        link = caching and self.store.may_link(found, options.offset_in_file, length)
        writer: BlockWriter | None = None
        if caching and not link:
            writer = self.store.writer(request.block_id, length)
        sent = request.offset
        try:
            for piece in _chunks(descriptor, request.offset, end, options.offset_in_file, chunk):
                if writer is not None:
                    writer.write(piece)
                sent += len(piece)
                if sent == length:
                    # The last chunk: a client may go away as soon as it has it, so commit first.
                    if writer is not None:
                        writer.commit(mtime_ns=found.st_mtime_ns)
                        writer = None
                    elif link:
                        self.store.copy(request.block_id, descriptor, 0, length)
                yield piece
        finally:
            if writer is not None:
                writer.abandon()

    def _open_source(self, block_id: int, options: OpenUfsBlockOptions) -> int:
        if not options.ufs_path:
            raise NotFound(f"BlockMeta not found for blockId {block_id}")
        if options.mountId != MOUNT_ID:
            raise Unavailable(f"Failed to read from UFS, blockId={block_id}: no mount {options.mountId}")
        if options.offset_in_file < 0 or options.block_size <= 0:
            raise InvalidRequest(
                f"Invalid UFS options of block {block_id}: offset {options.offset_in_file}, length {options.block_size}"
            )
        return self._source.open(options.ufs_path)

    # -- the others ----------------------------------------------------------------------------------------

    def open_local_block(
        self, requests: Iterator[pb.OpenLocalBlockRequest], _context: Any
    ) -> Iterator[pb.OpenLocalBlockResponse]:
        """Path of a block file; the stream stays open until the client half-closes."""
        request = next(requests, None)
        if request is None:
            return
        opened = self.store.open(request.block_id)
        if opened is None:
            raise NotFound(f"BlockMeta not found for blockId {request.block_id}")
        os.close(opened[0])
        yield pb.OpenLocalBlockResponse(path=os.fsencode(self.store.path(request.block_id)))
        for _ in requests:
            pass

    def cache(self, request: pb.CacheRequest, _context: Any) -> pb.CacheResponse:
        """Make a block local: from the source when this worker is its own source, else from that worker.

        An asynchronous request is answered at once; its failure is only logged, as with the real one.
        """
        if getattr(request, "async"):
            self._background.submit(self._cache_quietly, request)
        else:
            try:
                self._cache(request)
            except FusecacheError as exc:
                raise UpstreamError(f"{type(exc).__name__}: {exc}") from exc
        return pb.CacheResponse()

    def _cache_quietly(self, request: pb.CacheRequest) -> None:
        try:
            self._cache(request)
        except (FusecacheError, OSError) as exc:
            log.info("asynchronous caching failed", block_id=request.block_id, reason=str(exc))

    def _cache(self, request: pb.CacheRequest) -> None:
        if self.store.holds(request.block_id):
            return
        host, port = request.source_host.decode(errors="replace"), request.source_port
        options = request.open_ufs_block_options
        if host == self.host:
            self._cache_from_source(request.block_id, options, options.block_size)
            return
        for peer in self._peers():
            if (peer.host, peer.port) == (host, port):
                # The peer is asked as by a reader: what it does not hold, it reads from the source and keeps.
                peer._cache_from_source(request.block_id, options, options.block_size)
                opened = peer.store.open(request.block_id)
                if opened is None:
                    raise NotFound(f"BlockMeta not found for blockId {request.block_id}")
                descriptor, length = opened
                try:
                    self._keep(request.block_id, descriptor, 0, length)
                finally:
                    os.close(descriptor)
                return
        raise Unavailable(f"No block worker listens at {host}:{port}.")

    def load(self, request: pb.LoadRequest, _context: Any) -> pb.LoadResponse:
        """Make many blocks local; those that failed are listed."""
        failed: list[pb.BlockStatus] = []
        for block in request.blocks:
            options = OpenUfsBlockOptions(
                ufs_path=block.ufs_path,
                offset_in_file=block.offset_in_file,
                block_size=block.length,
                mountId=block.mountId,
            )
            try:
                if self.store.holds(block.block_id):
                    raise AlreadyHeld(
                        f"Temp blockId {block.block_id} is not available, because it is already committed"
                    )
                self._cache_from_source(block.block_id, options, block.length)
            except (FusecacheError, OSError) as exc:
                code: int = code_of(exc).value[0]
                failed.append(
                    pb.BlockStatus(
                        block=block, code=code, message=str(exc).encode(), retryable=isinstance(exc, Unavailable)
                    )
                )
        if not failed:
            return pb.LoadResponse(status=pb.SUCCESS)
        status = pb.FAILURE if len(failed) == len(request.blocks) else pb.PARTIAL_FAILURE
        return pb.LoadResponse(status=status, block_status=failed)

    def _cache_from_source(self, block_id: int, options: OpenUfsBlockOptions, length: int) -> None:
        if self.store.holds(block_id):
            return
        descriptor = self._open_source(block_id, options)
        try:
            self._keep(block_id, descriptor, options.offset_in_file, length)
        finally:
            os.close(descriptor)

    def _keep(self, block_id: int, descriptor: int, offset: int, length: int) -> None:
        """Commit a piece of a file as a block. Unavailable when it is not held afterwards."""
        if not self.store.copy(block_id, descriptor, offset, length):
            raise Unavailable(f"Block {block_id} can't be kept now: no space for it, or somebody else is writing it")


def _chunks(descriptor: int, position: int, end: int, shift: int, chunk: int) -> Iterator[bytes]:
    """File bytes [position+shift, end+shift) in chunks; ends early, silently, where the file does."""
    while position < end:
        data = os.pread(descriptor, min(chunk, end - position), position + shift)
        if not data:
            return
        yield data
        position += len(data)
