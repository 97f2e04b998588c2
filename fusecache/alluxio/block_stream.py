"""The bytes of one range of one block, from whichever source has them, exact or an error.

`BlockStream.read` opens a ReadBlock call (`read_call`) at the current position on the best source. When a source fails,
stalls, lies or ends early, the next one is opened at the first byte that is missing; bytes are counted everywhere,
because a block worker that drops out ends a stream with status OK and too little data. When all sources have failed,
they are tried again after a pause (with locations fresh from the master) until the budget ends, unless every failure
was final.

Does not choose an order (`placement`), does not cache bytes, does not know files.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from fusecache.alluxio.connection import Connection
from fusecache.alluxio.decode import Rejected
from fusecache.alluxio.model import Block
from fusecache.alluxio.placement import Source, readable_from_ufs
from fusecache.alluxio.read_call import ReadCall, ReadOptions, SourceFailed
from fusecache.alluxio.rpc_meter import RpcMeter
from fusecache.alluxio.status import is_temporary, to_error
from fusecache.clock import Clock
from fusecache.errors import AuthenticationFailed, NotFound, Unavailable, UpstreamError
from fusecache.rpc.budget import Budget
from fusecache.rpc.retry import pause_s
from fusecache.rpc.stall_watch import StallWatch

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 2.0
"""Pauses between rounds over all sources (alluxio.user.block.read.retry.*)."""


class Sources(Protocol):
    """Where a stream finds who to ask (`block_sources` implements it)."""

    def find(self, block: Block, budget: Budget, *, fresh: bool) -> Iterator[Source]:
        """Sources in order; `fresh`: ask the master where the block is now, its hints have failed."""
        ...

    def ready(self, block: Block) -> tuple[Source, Connection, Iterator[Source]] | None:
        """The first source, its connection, and the others, if nothing has to be waited for."""
        ...

    def connection(self, source: Source, budget: Budget) -> Connection:
        """A connection to the source's block worker."""
        ...

    def failed(self, source: Source, error: UpstreamError) -> None:
        """The source failed; `error` says how."""
        ...

    def served(self, source: Source, block: Block, *, stored: bool) -> None:
        """The range has come, the last bytes of it from `source`; `stored`: it keeps the block by itself.

        Called in a thread of grpc's: must not wait for anything.
        """
        ...


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
        self._call: ReadCall | None = None
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
        if self._call is not None or self.position == self.end:
            return
        with contextlib.suppress(UpstreamError):
            candidates = self._candidates = self._sources.find(self._block, budget, fresh=False)
            source = next(candidates, None)
            if source is not None:
                try:
                    self._call = self._open(source, budget)
                except SourceFailed as failure:
                    self._source_failed(source, failure)

    def start_promptly(self, budget: Budget, on_answer: Callable[[], None]) -> bool:
        """As `start`, but never waits: False, and nothing done, when it would have to. `on_answer` is called, once and
        in a thread of grpc's, when `read_ready` is worth calling."""
        ready = self._sources.ready(self._block)
        if ready is None or self.position == self.end:
            return False
        source, connection, candidates = ready
        try:
            self._call = self._read_call(source, connection, budget, on_answer)
        except (grpc.RpcError, UpstreamError):
            return False  # `start` meets the same error, and has time to mend it
        self._candidates = candidates
        return True

    def read_ready(self, budget: Budget) -> memoryview | bytes | None:
        """All bytes of the stream if the first answer has them all; None when not: `read` goes on from there, and may
        wait. Only after `on_answer`; does not wait. Bytes given are the last: `close` is what ends the call well."""
        call = self._call
        if call is None:
            return None
        try:
            chunk = call.next_answer()
        except SourceFailed as failure:
            self._mend(call.source, failure, budget)
            return None
        if not chunk:
            return None
        self._accept(call.source, chunk)
        if self._received < self.end:
            self._rest.append(memoryview(chunk))
            return None
        self.position = self.end
        return chunk

    def read(self, size: int, budget: Budget) -> memoryview | bytes:
        """Exactly min(size, end - position) bytes. After an error the position is where it was.

        Unavailable when no source delivered within the budget, or nobody has the block and it may not be read from the
        under storage; NotFound when the under storage's file is gone; another UpstreamError when every source, asked
        again with fresh locations, refused for good or ended early without giving another byte.
        """
        wanted = min(size, self.end - self.position)
        if wanted <= 0:
            return b""
        parts: list[memoryview | bytes] = []
        missing = wanted
        whole = False
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
                    whole = len(chunk) == wanted
                    parts.append(chunk)
                    missing -= len(chunk)
        except BaseException:
            self._rewind()
            raise
        self.position += wanted
        if self._received == self.end and self._call is not None:
            self._complete(self._call)
        # A part of a chunk is copied: as a view it would keep the whole chunk in memory.
        return parts[0] if whole else b"".join(parts)

    def close(self) -> None:
        """Abandon what has not been read. Idempotent."""
        self._closed.set()
        call = self._call
        if call is not None and self.position == self.end:
            self._complete(call)
        elif call is not None:
            self._call = None
            call.abort()

    def _next_chunk(self, budget: Budget) -> memoryview | bytes:
        while True:
            if self._closed.is_set():
                raise Unavailable(f"block {self._block.block_id}: stream was closed")
            if budget.spent():
                raise self._too_late(budget)
            source: Source | None = None
            try:
                if self._call is None:
                    source = self._next_source(budget)
                    self._call = self._open(source, budget)
                if self._closed.is_set():
                    self.close()
                    continue
                source = self._call.source
                chunk = self._call.next_chunk(budget)
            except SourceFailed as failure:
                if not self._closed.is_set() and source is not None:
                    self._mend(source, failure, budget)
                continue
            self._accept(source, chunk)
            return chunk

    def _accept(self, source: Source, chunk: memoryview | bytes) -> None:
        self._received += len(chunk)
        if source.ufs:
            self.source = source.kind
        # Who gives bytes is worth asking again: only rounds without a byte lead to an error.
        self._errors.clear()
        self._renewed.clear()
        self._rounds = 0
        self._may_come_back = False

    def _mend(self, source: Source, failure: SourceFailed, budget: Budget) -> None:
        """After a failure: leave the source, or ask it again. Unavailable when there is no time left."""
        if budget.spent():
            # Our own time is over: that is not the source's failure.
            self._last_reason = str(failure)
            raise self._too_late(budget) from failure
        if isinstance(failure.error, AuthenticationFailed) and source.worker.worker_id not in self._renewed:
            self._ask_again(source)
        else:
            self._source_failed(source, failure)

    def _read_call(
        self, source: Source, connection: Connection, budget: Budget, on_answer: Callable[[], None] | None
    ) -> ReadCall:
        return ReadCall(
            self._block,
            source,
            self._received,
            self.end,
            connection,
            options=self._options,
            watch=self._watch,
            clock=self._clock,
            budget=budget,
            on_answer=on_answer,
        )

    def _open(self, source: Source, budget: Budget) -> ReadCall:
        try:
            return self._read_call(source, self._sources.connection(source, budget), budget, None)
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
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        self._candidates = itertools.chain((source,), self._candidates or ())

    def _source_failed(self, source: Source, failure: SourceFailed) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.abort()
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

    def _complete(self, call: ReadCall) -> None:
        self._call = None
        call.finish(
            lambda ended_well: self._sources.served(call.source, self._block, stored=call.stores and ended_well)
        )

    def _rewind(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        self._rest.clear()
        self._received = self.position
