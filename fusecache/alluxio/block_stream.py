"""The bytes of one range of one block, from whichever source has them, exact or an error.

`BlockStream.read` opens a ReadBlock call at the current position on the best source, takes chunks, and acknowledges
each, so that the server's window stays open. When a source fails, stalls, lies or ends early, the next one is
opened at the first byte that is missing; bytes are counted everywhere, because a block worker that drops out ends
a stream with status OK and too little data. When all sources have failed, they are tried again after a pause (with
locations fresh from the master) until the budget ends, unless every failure was final.

The request side of a ReadBlock call must stay open until the last byte has come: a block worker takes half-closing
for cancelling, and then ends the stream with OK.

Does not choose an order (`placement`), does not cache bytes, does not know files.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import grpc

from fusecache.alluxio.connection import AnswerStream, Connection, OpenCall
from fusecache.alluxio.decode import Rejected
from fusecache.alluxio.methods import READ_BLOCK
from fusecache.alluxio.model import Block
from fusecache.alluxio.placement import Source, readable_from_ufs
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.status import is_temporary, to_error
from fusecache.clock import Clock
from fusecache.errors import AuthenticationFailed, NotFound, ProtocolError, Unavailable, UpstreamError
from fusecache.pb.alluxio.block_worker_pb2 import ReadRequest, ReadResponse
from fusecache.pb.alluxio.protocol_pb2 import OpenUfsBlockOptions
from fusecache.rpc.budget import Budget
from fusecache.rpc.retry import pause_s
from fusecache.rpc.stall_watch import NEVER, StallWatch

MAX_CHUNK_BYTES = 2 << 20
"""A block worker sends no larger chunks, whatever is asked (alluxio.worker.network.reader.max.chunk.size.bytes)."""

MAX_EMPTY_CHUNKS = 16
"""Chunks without a byte that one call may send; a sender of endless ones is dropped."""

ATTEMPT_S = 900.0
"""Deadline of one ReadBlock call, whoever forgets it: after it the stream resumes with another call."""

LAST_WORD_S = 5.0
"""How long the end of a call is awaited after its last byte, as Alluxio's own client does: the block worker commits
a block that it has just read from the under storage before it ends the call."""

LAST_WORD_OF_HOLDER_S = 1.0
"""The same when there is nothing to commit: only a server that is in trouble needs as long."""

UNLIMITED_UFS_READS = 2**31 - 1
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0
"""Pauses between rounds over all sources (alluxio.user.block.read.retry.*)."""


class ReadOptions(NamedTuple):
    """What every stream of a client has in common."""

    chunk_bytes: int
    stall_s: float
    connect_s: float
    store: bool
    """True: block workers store what they read from the under storage (read type CACHE)."""


class Sources(Protocol):
    """Where a stream finds who to ask (`alluxio.client` implements it)."""

    def find(self, block: Block, budget: Budget, *, fresh: bool) -> Iterator[Source]:
        """Sources in order; `fresh`: ask the master where the block is now, its hints have failed."""
        ...

    def connection(self, source: Source, budget: Budget) -> Connection:
        """A connection to the source's block worker."""
        ...

    def failed(self, source: Source, error: UpstreamError) -> None:
        """The source failed; `error` says how."""
        ...

    def served(self, source: Source, block: Block, *, stored: bool) -> None:
        """The range has come, the last bytes of it from `source`; `stored`: it keeps the block by itself."""
        ...


class SourceFailed(Exception):
    """One source did not deliver; carries our error. Never leaves this module."""

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


class _Requests:
    """The request side of a call: the request, then acknowledgements, until `end`."""

    __slots__ = ("_queue",)

    def __init__(self, request: ReadRequest) -> None:
        self._queue: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        self._queue.put(request)

    def __iter__(self) -> Iterator[ReadRequest]:
        return self

    def __next__(self) -> ReadRequest:
        message = self._queue.get()
        if message is None:
            raise StopIteration
        return message

    def acknowledge(self, offset: int) -> None:
        self._queue.put(ReadRequest(offset_received=offset))

    def end(self) -> None:
        self._queue.put(None)


class _Attempt:
    """One ReadBlock call: [offset, end) of the block from one source."""

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
    ) -> None:
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
        self._requests = _Requests(request)
        self._name = f"block {block.block_id} from {connection.target}"
        stream, call = connection.converse(
            READ_BLOCK, self._requests, login_s=budget.per_try_s(options.connect_s), timeout_s=ATTEMPT_S
        )
        self._stream: AnswerStream[ReadResponse] = stream
        self._call: OpenCall = call
        self._watched = watch.add(stream.cancel)

    def next_chunk(self, budget: Budget) -> bytes:
        """The next bytes, never empty, never beyond the end. SourceFailed."""
        limit_s = self._clock.now() + min(self._options.stall_s, budget.remaining_s())
        self._watched.deadline = limit_s
        try:
            while True:
                message = next(self._stream, None)
                if message is None:
                    self._over = True
                    self._call.succeeded()
                    raise SourceFailed(
                        ProtocolError(f"{self._name}: stream ended {self._end - self._position} bytes too early"),
                        final=True,
                    )
                data = message.chunk.data
                if data:
                    break
                self._empty += 1
                if self._empty > MAX_EMPTY_CHUNKS:
                    raise self._lie("empty_chunks", "endless empty chunks")
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            self._watched.deadline = NEVER
        if len(data) > self._chunk_limit:
            raise self._lie("chunk", f"chunk of {len(data)} bytes, {self._chunk_limit} were allowed")
        if len(data) > self._end - self._position:
            raise self._lie("chunk", "more bytes than were asked for")
        self._position += len(data)
        if self._position < self._end:
            self._requests.acknowledge(self._position)
        return data

    def finish(self, budget: Budget) -> bool:
        """All bytes have come: end the request side, and let the server end the call. True when it did so with OK."""
        self._requests.end()
        limit_s = LAST_WORD_S if self.stores else LAST_WORD_OF_HOLDER_S
        self._watched.deadline = self._clock.now() + min(limit_s, budget.remaining_s())
        try:
            surplus = next(self._stream, None)
        except grpc.RpcError as error:
            # The bytes are there and counted: how the call ended matters to the statistics and to the session only.
            self._over = True
            with contextlib.suppress(UpstreamError):
                self._call.failed(error)
            return False
        else:
            if surplus is None:
                self._over = True
                self._call.succeeded()
            return surplus is None
        finally:
            self.abort()

    def abort(self) -> None:
        """Nobody wants more bytes. Idempotent."""
        self._watch.remove(self._watched)
        self._requests.end()
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


class BlockStream:
    """Bytes [offset, offset + length) of a block, in order. One thread reads; any thread may close."""

    def __init__(
        self,
        block: Block,
        offset: int,
        length: int,
        *,
        sources: Sources,
        options: ReadOptions,
        watch: StallWatch,
        meter: RpcMeter,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """No I/O. ValueError for a range that is not within the block."""
        if not 0 <= offset <= offset + length <= block.length:
            raise ValueError(f"range {offset}+{length} is not within block {block.block_id} of {block.length} bytes")
        self.position = offset
        """Block offset of the next byte that `read` gives."""
        self.end = offset + length
        self.source = "block_worker"
        """Where the bytes came from: block_worker, or ufs once any of them came from there."""
        self._block = block
        self._sources = sources
        self._options = options
        self._watch = watch
        self._meter = meter
        self._clock = clock
        self._rng = rng
        self._attempt: _Attempt | None = None
        self._rest: list[memoryview] = []
        self._received = offset
        self._candidates: Iterator[Source] | None = None
        self._rounds = 0
        self._errors: list[SourceFailed] = []
        self._last_reason = "no source answered"
        self._may_come_back = False
        self._renewed: set[int] = set()
        self._closed = threading.Event()

    def start(self, budget: Budget) -> None:
        """Send the first request, so that bytes are on their way when `read` comes. Raises nothing: a failure is
        remembered and `read` goes on from there."""
        if self._attempt is not None or self.position == self.end:
            return
        with contextlib.suppress(UpstreamError):
            candidates = self._candidates = self._sources.find(self._block, budget, fresh=False)
            source = next(candidates, None)
            if source is not None:
                try:
                    self._attempt = self._open(source, budget)
                except SourceFailed as failure:
                    self._source_failed(source, failure)

    def read(self, size: int, budget: Budget) -> bytes:
        """Exactly min(size, end - position) bytes. After an error the position is where it was.

        Unavailable when no source delivered within the budget, or nobody has the block and it may not be read from the
        under storage; NotFound when the under storage's file is gone; another UpstreamError when every source, asked
        again with fresh locations, refused for good or ended early without giving another byte.
        """
        wanted = min(size, self.end - self.position)
        if wanted <= 0:
            return b""
        parts: list[bytes | memoryview] = []
        missing = wanted
        while self._rest and missing:
            part = self._rest.pop(0)
            if len(part) > missing:
                self._rest.insert(0, part[missing:])
                part = part[:missing]
            parts.append(part)
            missing -= len(part)
        try:
            while missing:
                chunk = self._next_chunk(budget)
                if len(chunk) > missing:
                    view = memoryview(chunk)
                    parts.append(view[:missing])
                    self._rest.append(view[missing:])
                    missing = 0
                else:
                    parts.append(chunk)
                    missing -= len(chunk)
        except BaseException:
            self._rewind()
            raise
        self.position += wanted
        if self._received == self.end and self._attempt is not None:
            self._complete(self._attempt, budget)
        if len(parts) == 1 and isinstance(parts[0], bytes):
            return parts[0]
        return b"".join(parts)

    def close(self) -> None:
        """Abandon what has not been read. Idempotent."""
        self._closed.set()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abort()

    def _next_chunk(self, budget: Budget) -> bytes:
        while True:
            if self._closed.is_set():
                raise Unavailable(f"block {self._block.block_id}: stream was closed")
            if budget.spent():
                raise self._too_late(budget)
            source: Source | None = None
            try:
                if self._attempt is None:
                    source = self._next_source(budget)
                    self._attempt = self._open(source, budget)
                if self._closed.is_set():
                    self.close()
                    continue
                source = self._attempt.source
                chunk = self._attempt.next_chunk(budget)
            except SourceFailed as failure:
                if self._closed.is_set() or source is None:
                    continue
                if budget.spent():
                    # Our own time is over: that is not the source's failure.
                    self._last_reason = str(failure)
                    raise self._too_late(budget) from failure
                if isinstance(failure.error, AuthenticationFailed) and source.worker.worker_id not in self._renewed:
                    self._ask_again(source)
                    continue
                self._source_failed(source, failure)
                continue
            self._received += len(chunk)
            if source.ufs:
                self.source = source.kind
            # Who gives bytes is worth asking again: only rounds without a byte lead to an error.
            self._errors.clear()
            self._renewed.clear()
            self._rounds = 0
            self._may_come_back = False
            return chunk

    def _open(self, source: Source, budget: Budget) -> _Attempt:
        try:
            connection = self._sources.connection(source, budget)
            return _Attempt(
                self._block,
                source,
                self._received,
                self.end,
                connection,
                options=self._options,
                watch=self._watch,
                clock=self._clock,
                budget=budget,
            )
        except grpc.RpcError as error:
            name = f"block worker {source.worker.address.target}"
            raise SourceFailed(to_error(error, name), final=not is_temporary(error)) from error
        except UpstreamError as error:
            raise SourceFailed(error, final=not is_temporary(error)) from error

    def _next_source(self, budget: Budget) -> Source:
        """The next candidate; after the last one, a pause and a new round, or the end."""
        while True:
            if self._candidates is None:
                self._candidates = self._sources.find(self._block, budget, fresh=self._rounds > 0)
            source = next(self._candidates, None)
            if source is not None:
                return source
            if not self._errors and (self._block.locations or readable_from_ufs(self._block)):
                # Somebody had it or may read it, and is not in the cluster at the moment.
                self._may_come_back = True
            self._end_round(budget)

    def _end_round(self, budget: Budget) -> None:
        """Every candidate of this round failed (or there was none). Raises when another round can't help.

        The first round used the hints of an old listing; the second one asks the master. Only then is "nobody has it"
        or "everybody refuses" an answer, and not while a source that was there may come back.
        """
        self._candidates = None
        self._rounds += 1
        if self._rounds >= 2:
            if not self._may_come_back and all(failure.final for failure in self._errors):
                raise self._verdict()
            pause = pause_s(self._rounds - 1, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            self._clock.sleep(min(budget.remaining_s(), pause))
            self._errors.clear()
        if budget.spent():
            raise self._too_late(budget)

    def _ask_again(self, source: Source) -> None:
        """The source did not know our session any more (it has restarted). The connection has dropped that session and
        logs in again: once per source, the same one is asked before any other."""
        self._renewed.add(source.worker.worker_id)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abort()
        self._candidates = itertools.chain((source,), self._candidates or ())

    def _source_failed(self, source: Source, failure: SourceFailed) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abort()
        if isinstance(failure.error, Rejected):
            self._meter.rejected(failure.error.what)
        self._meter.source_failed(source.kind)
        self._errors.append(failure)
        self._last_reason = str(failure)
        if not failure.final:
            self._may_come_back = True
        self._sources.failed(source, failure.error)

    def _verdict(self) -> UpstreamError:
        """What to raise when every source refused for good."""
        for failure in self._errors:
            if not isinstance(failure.error, NotFound):
                return failure.error
        if self._errors and readable_from_ufs(self._block):
            return self._errors[-1].error
        return Unavailable(
            f"block {self._block.block_id}: no block worker holds it, and it may not be read from the under storage"
        )

    def _too_late(self, budget: Budget) -> Unavailable:
        return Unavailable(
            f"block {self._block.block_id}: nothing within {budget.total_s:g} s at byte {self._received}:"
            f" {self._last_reason}"
        )

    def _complete(self, attempt: _Attempt, budget: Budget) -> None:
        self._attempt = None
        ended_well = attempt.finish(budget)
        self._sources.served(attempt.source, self._block, stored=attempt.stores and ended_well)

    def _rewind(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abort()
        self._rest.clear()
        self._received = self.position
