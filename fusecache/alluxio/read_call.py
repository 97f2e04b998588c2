"""One ReadBlock call: a range of a block from one block worker, chunk by chunk, checked and counted.

The request side of a call must stay open until the last byte has come: a block worker takes half-closing for
cancelling, and then ends the stream with OK. Each chunk is acknowledged, so that the server's window stays open.
Chunks that are too large, empty without end, or beyond the range end the call (`SourceFailed`), as does silence.

Which block worker, and what to do when it fails, is `block_stream`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import grpc

from fusecache.alluxio.connection import Connection, OpenCall
from fusecache.alluxio.decode import Rejected
from fusecache.alluxio.methods import READ_BLOCK
from fusecache.alluxio.model import Block
from fusecache.alluxio.placement import Source, readable_from_ufs
from fusecache.alluxio.status import is_temporary, to_error
from fusecache.clock import Clock
from fusecache.errors import ProtocolError, Unavailable, UpstreamError
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest
from fusecache.pb.alluxio.protocol_pb2 import OpenUfsBlockOptions
from fusecache.rpc.budget import Budget
from fusecache.rpc.conversation import Conversation
from fusecache.rpc.stall_watch import NEVER, StallWatch

MAX_CHUNK_BYTES = 2 << 20
"""A block worker sends no larger chunks, whatever is asked (alluxio.worker.network.reader.max.chunk.size.bytes)."""

MAX_EMPTY_CHUNKS = 16
"""Chunks without a byte that one call may send; a sender of endless ones is dropped."""

ATTEMPT_S = 900.0
"""Deadline of one ReadBlock call, whoever forgets it: after it the stream resumes with another call."""

LAST_WORD_S = 5.0
"""How long the end of a call is awaited after its last byte: the block worker commits a block that it has just read
from the under storage before it ends the call. Alluxio's own client lets the reader wait for that; here nobody does."""

LAST_WORD_OF_HOLDER_S = 1.0
"""The same when there is nothing to commit: only a server that is in trouble needs as long."""

UNLIMITED_UFS_READS = 2**31 - 1


class ReadOptions(NamedTuple):
    """What every stream of a client has in common."""

    chunk_bytes: int
    stall_s: float
    connect_s: float
    store: bool
    """True: block workers store what they read from the under storage (read type CACHE)."""


class SourceFailed(Exception):
    """One source did not deliver; carries our error. Never leaves `block_stream`."""

    def __init__(self, error: UpstreamError, *, final: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.final = final
        """Asking the same source again can't help."""


def read_request(block: Block, offset: int, length: int, options: ReadOptions, *, ufs: bool) -> ReadRequest:
    """The first message of a ReadBlock call. Pure.

    `ufs`: the under storage is meant, and its options are sent. A holder gets none: one that has evicted the block
    must say NOT_FOUND, not quietly fetch bytes that may be a newer version's (the caller confirms what came from the
    under storage, so it has to know). The worker stores a block it reads only when it is read whole; asking for that
    with a part would make it write a temporary block and throw it away.
    """
    request = ReadRequest(
        block_id=block.block_id,
        offset=offset,
        length=length,
        promote=False,
        chunk_size=max(1, min(options.chunk_bytes, MAX_CHUNK_BYTES)),
        position_short=False,
    )
    if ufs and readable_from_ufs(block):
        whole = offset == 0 and length == block.length
        request.open_ufs_block_options.CopyFrom(ufs_options(block, no_cache=not (options.store and whole)))
    return request


def ufs_options(block: Block, *, no_cache: bool) -> OpenUfsBlockOptions:
    """How a block worker finds the block in the under storage. Pure."""
    options = OpenUfsBlockOptions(
        offset_in_file=block.ufs_offset,
        block_size=block.length,  # the block's own length, whatever the field is called
        maxUfsReadConcurrency=UNLIMITED_UFS_READS,
        mountId=block.mount_id,
        no_cache=no_cache,
    )
    if block.in_ufs_tier:
        options.block_in_ufs_tier = True
        options.offset_in_file = 0
    elif block.ufs_path is not None:
        options.ufs_path = block.ufs_path
    return options


class ReadCall:
    """[offset, end) of a block from one source. Made by sending the request; grpc.RpcError or our errors when the login
    that may be needed fails."""

    def __init__(
        self,
        block: Block,
        source: Source,
        offset: int,
        end: int,
        connection: Connection,
        *,
        options: ReadOptions,
        watch: StallWatch,
        clock: Clock,
        budget: Budget,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        """`on_answer`: nothing is waited for, not even a login, and it is called when `next_answer` would not wait
        either (`rpc.conversation.converse`)."""
        self.source = source
        self._position = offset
        self._end = end
        self._options = options
        self._clock = clock
        self._watch = watch
        self._empty = 0
        self._over = False
        request = read_request(block, offset, end - offset, options, ufs=source.ufs)
        self._chunk_limit = request.chunk_size
        self.stores = bool(request.HasField("open_ufs_block_options") and not request.open_ufs_block_options.no_cache)
        self._name = f"block {block.block_id} from {connection.target}"
        stream, call = connection.converse(
            READ_BLOCK,
            request,
            login_s=budget.per_try_s(options.connect_s) if on_answer is None else 0.0,
            timeout_s=ATTEMPT_S,
            on_answer=on_answer,
        )
        self._stream: Conversation[ReadRequest, memoryview | bytes] = stream
        self._call: OpenCall = call
        self._watched = watch.add(stream.cancel)
        if on_answer is not None:
            self._watched.deadline = self._limit_s(budget)

    def next_chunk(self, budget: Budget) -> memoryview | bytes:
        """The next bytes, never empty, never beyond the end. SourceFailed."""
        self._watched.deadline = self._limit_s(budget)
        while not (data := self.next_answer()):
            pass
        return data

    def next_answer(self) -> memoryview | bytes:
        """The bytes of the next answer, which may have none; otherwise as `next_chunk`."""
        try:
            data = next(self._stream, None)
        except grpc.RpcError as error:
            self._watched.deadline = NEVER
            raise self._failure(error) from error
        if data is None:
            self._over = True
            self._watched.deadline = NEVER
            self._call.succeeded()
            raise SourceFailed(
                ProtocolError(f"{self._name}: stream ended {self._end - self._position} bytes too early"), final=True
            )
        if not data:
            self._empty += 1
            if self._empty > MAX_EMPTY_CHUNKS:
                self._watched.deadline = NEVER
                raise self._lie("empty_chunks", "endless empty chunks")
            return data
        self._watched.deadline = NEVER
        if len(data) > self._chunk_limit:
            raise self._lie("chunk", f"chunk of {len(data)} bytes, {self._chunk_limit} were allowed")
        if len(data) > self._end - self._position:
            raise self._lie("chunk", "more bytes than were asked for")
        self._position += len(data)
        if self._position < self._end:
            self._stream.send(ReadRequest(offset_received=self._position))
        return data

    def _limit_s(self, budget: Budget) -> float:
        return self._clock.now() + min(self._options.stall_s, budget.remaining_s())

    def finish(self, on_end: Callable[[bool], None]) -> None:
        """All bytes have come: end the request side, and let the server end the call.

        Returns at once. `on_end(ended well)` is called when the server has ended it or its time is over (not when the
        client is closed meanwhile), in a thread that must not be held up: every stream of the connection waits for it.
        """
        self._over = True
        self._stream.end()
        self._watched.deadline = self._clock.now() + (LAST_WORD_S if self.stores else LAST_WORD_OF_HOLDER_S)
        self._stream.when_over(lambda error: self._ended(error, on_end))

    def _ended(self, error: grpc.RpcError | None, on_end: Callable[[bool], None]) -> None:
        """The bytes are there and counted: how the call ended matters to the statistics and to the session only."""
        self._watch.remove(self._watched)
        if error is None:
            self._call.succeeded()
        elif self._watched.fired:
            self._call.cancelled()
        else:
            with contextlib.suppress(UpstreamError):
                self._call.failed(error)
        if not self._watch.closed:
            on_end(error is None)

    def abort(self) -> None:
        """Nobody wants more bytes. Idempotent."""
        self._watch.remove(self._watched)
        self._stream.cancel()
        if not self._over:
            self._over = True
            self._call.cancelled()

    def _failure(self, error: grpc.RpcError) -> SourceFailed:
        self._over = True
        if self._watched.fired:
            self._call.cancelled()
            return SourceFailed(Unavailable(f"{self._name}: no bytes for {self._options.stall_s:g} s"), final=False)
        try:
            self._call.failed(error)
        except UpstreamError as refused:
            return SourceFailed(refused, final=True)
        return SourceFailed(to_error(error, self._name), final=not is_temporary(error))

    def _lie(self, what: str, text: str) -> SourceFailed:
        return SourceFailed(Rejected(what, f"{self._name}: {text}"), final=True)
