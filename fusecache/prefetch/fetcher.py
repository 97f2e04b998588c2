"""Gets ranges of blocks from block workers, each byte once: the slow half of a read.

A read that no local block file can answer asks `read(block, start, end)`. Bytes already fetched come from the
`ReadBuffer`; a range in flight is waited for; anything else starts a fetch of its `FetchWindow`, in a task of the
fetcher's own nursery, so that a caller that goes away takes nothing from the others. A range that comes in one answer
of a block worker that is known and connected needs no thread; everything else happens in one of the data pool.
Sequential readers keep a `BlockStream` open to the block's end and go on reading from it: the block worker sends
ahead, and a block read from byte 0 to its end is stored in Alluxio without another call.

After bytes came from the under storage the id is confirmed (`confirm`, one GetStatus): a file that Alluxio has
seen replaced would otherwise answer with the new file's bytes under the old id.

Does not know files, paths or FUSE, and does not open local block files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog
import trio

from fusecache.alluxio.model import Block
from fusecache.clock import Clock
from fusecache.config.settings import Settings
from fusecache.errors import FusecacheError, Unavailable, UpstreamError
from fusecache.metrics import Metrics
from fusecache.prefetch.read_buffer import Extent, ReadBuffer
from fusecache.prefetch.window import Fetch, FetchWindow
from fusecache.rpc.budget import Budget
from fusecache.threads import NO_THREAD, in_thread, is_refused

log = structlog.get_logger(__name__)

MAX_IDLE_STREAMS = 64
"""Open streams kept for sequential readers; each holds up to 4 MiB in gRPC's buffers, and a block worker's thread."""

ASK_AFTER_S = 5.0
"""When no source has delivered for this long, the master is asked whether the file is still there."""

PROMPT_S = 1.0
"""How long the event loop waits for a first answer before a thread does: that one asks elsewhere in time."""

IDLE_STREAM_S = 10.0
"""A stream nobody read from for this long is closed."""


class Stream(Protocol):
    """What is used of `alluxio.block_stream.BlockStream`."""

    source: str

    def read(self, size: int, budget: Budget) -> memoryview | bytes:
        """Exactly `size` bytes or an error."""
        ...

    def read_ready(self, budget: Budget) -> memoryview | bytes | None:
        """After `on_answer`: all bytes of the stream if they are there, else None. Does not wait."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Confirm(Protocol):
    """Whether the file that bytes are fetched for is still the one its path names; blocking, called in threads."""

    def __call__(self, limit_s: float | None = None, *, compare: bool = False) -> None:
        """StaleId when it is not; Unavailable when nobody says so within `limit_s` (None: a request's budget).

        `limit_s` 0: nobody is asked, and nothing waited for; Unavailable when it is not known.
        `compare`: Alluxio looks at the under storage first. Dear, hence only after bytes did not come as they should.
        """
        ...


class BlockSource(Protocol):
    """What is used of `alluxio.client.AlluxioClient`."""

    def open_stream(self, block: Block, offset: int, length: int, budget: Budget) -> Stream:
        """Start reading a range; blocking, called in threads."""
        ...

    def start_read(
        self, block: Block, offset: int, length: int, budget: Budget, on_answer: Callable[[], None]
    ) -> Stream | None:
        """The same without waiting, None when that can't be. `on_answer` is called once, in another thread, when
        `read_ready` may give the bytes."""
        ...


class _Slot:
    """A stream kept open for a sequential reader."""

    __slots__ = ("lock", "promised", "stream", "used_at")

    def __init__(self, promised: int, now: float) -> None:
        self.promised = promised
        """Block offset where the stream stands once all fetches queued on it are done."""
        self.stream: Stream | None = None
        self.lock = trio.Lock()
        self.used_at = now


class Fetcher:
    """One per mount. `run` must be running while `read` is called."""

    def __init__(
        self,
        source: BlockSource,
        settings: Settings,
        *,
        metrics: Metrics,
        clock: Clock,
        limiter: trio.CapacityLimiter,
    ) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._limiter = limiter
        self.buffer = ReadBuffer(settings.read_buffer_bytes)
        self._windows: dict[int, FetchWindow] = {}
        self._slots: dict[int, list[_Slot]] = {}
        self._slot_count = 0
        self._nursery: trio.Nursery | None = None
        self._bytes = {
            name: metrics.counter("fusecache_read_bytes_total", source=name)
            for name in ("read_buffer", "block_worker", "ufs")
        }

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the fetches; closes idle streams; ends when cancelled, with every stream closed."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                while True:
                    await trio.sleep(IDLE_STREAM_S / 2)
                    self._close_idle(self._clock.now() - IDLE_STREAM_S)
        finally:
            self._nursery = None
            for slots in self._slots.values():
                for slot in slots:
                    if slot.stream is not None:
                        slot.stream.close()
            self._slots.clear()

    async def read(self, block: Block, start: int, end: int, budget: Budget, confirm: Confirm) -> bytes | memoryview:
        """Bytes [start, end) of `block`, 0 <= start < end <= block.length; UpstreamError when no source has them.

        `confirm` is called in a thread after bytes came from the under storage; it raises StaleId.
        """
        pieces: list[bytes | memoryview] = []
        position = start
        while position < end:
            extent = self.buffer.covering(block.block_id, position)
            joined = extent is not None
            if extent is None:
                extent = self._begin(block, position, end, budget, confirm)
            elif extent.data is not None:
                self._bytes["read_buffer"].inc(min(end, extent.end) - position)
            if extent.data is None:
                with trio.move_on_after(budget.remaining_s()):
                    await extent.done.wait()
                if joined and isinstance(extent.error, Unavailable) and not budget.spent():
                    continue  # it ended with the budget of whoever began it; this read still has time of its own
                if extent.error is not None:
                    raise extent.error
                if extent.data is None:
                    raise UpstreamError(f"block {block.block_id}: no byte within {budget.total_s:g} s")
            stop = min(end, extent.end)
            pieces.append(memoryview(extent.data)[position - extent.start : stop - extent.start])
            position = stop
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def forget(self, block_id: int) -> None:
        """Nobody has the block open any more, or it is a local file now: drop its bytes and streams."""
        self.buffer.drop_block(block_id)
        self._windows.pop(block_id, None)
        for slot in self._slots.pop(block_id, ()):
            self._slot_count -= 1
            self._close(slot)

    def _begin(self, block: Block, position: int, end: int, budget: Budget, confirm: Confirm) -> Extent:
        window = self._windows.get(block.block_id)
        if window is None:
            window = self._windows[block.block_id] = FetchWindow(block.length, self._settings.fetch_bytes)
        fetch = window.fetch_for(position, end)
        start, stop = fetch.start, fetch.end
        if self.buffer.covering(block.block_id, start) is not None:
            start = position  # the rounding ran into bytes that are there already
        limit = self.buffer.next_start(block.block_id, position)
        if limit is not None:
            stop = min(stop, limit)
        extent = self.buffer.begin(block.block_id, start, stop)
        if self._nursery is None:
            raise UpstreamError("the mount is being shut down")
        self._nursery.start_soon(self._fetch, block, extent, fetch, budget, confirm)
        return extent

    async def _fetch(self, block: Block, extent: Extent, fetch: Fetch, budget: Budget, confirm: Confirm) -> None:
        stream: Stream | None = None
        try:
            slot = self._slot_for(block, extent, fetch)
            if slot is None:
                stream, ready = await self._fetch_promptly(block, extent, budget)
                if stream is None or ready is None:
                    data, source = await in_thread(
                        self._fetch_once, block, extent, budget, confirm, stream, limiter=self._limiter
                    )
                else:
                    data, source = ready, stream.source
                    if source == "ufs":
                        await self._confirmed(confirm)
            else:
                async with slot.lock:
                    data, source = await in_thread(
                        self._fetch_on, slot, block, extent, budget, confirm, limiter=self._limiter
                    )
        except FusecacheError as error:
            self.buffer.fail(extent, error)
        except trio.Cancelled:
            self.buffer.fail(extent, UpstreamError("the mount is being shut down"))
            raise
        except Exception as error:  # a bug here must fail these reads, not the whole mount
            if isinstance(error, RuntimeError) and is_refused(error):
                error = Unavailable(NO_THREAD)
            else:
                log.exception("fetch failed unexpectedly", block_id=block.block_id)
            self.buffer.fail(extent, error)
        else:
            self._bytes[source].inc(len(data))
            self.buffer.finish(extent, data)
            for _ in range(2):  # whoever waits for the bytes gives them to the kernel first
                await trio.lowlevel.cancel_shielded_checkpoint()
        finally:
            if stream is not None:
                stream.close()

    async def _fetch_promptly(
        self, block: Block, extent: Extent, budget: Budget
    ) -> tuple[Stream | None, memoryview | bytes | None]:
        """One range without a thread: a stream, if it could be started without waiting, and its bytes, if they came in
        one answer. What is missing is a thread's to do, on the same stream."""
        length = extent.end - extent.start
        if length > self._settings.chunk_bytes:
            return None, None
        try:
            self._limiter.acquire_nowait()
        except trio.WouldBlock:
            return None, None
        stream: Stream | None = None
        try:
            answered = trio.Event()
            tell = partial(_tell, trio.lowlevel.current_trio_token(), answered)
            stream = self._source.start_read(block, extent.start, length, budget, tell)
            if stream is None:
                return None, None
            with trio.move_on_after(PROMPT_S):
                await answered.wait()
            data = stream.read_ready(budget) if answered.is_set() else None
        except BaseException:
            if stream is not None:
                stream.close()
            raise
        finally:
            self._limiter.release()
        return stream, data

    async def _confirmed(self, confirm: Confirm) -> None:
        """StaleId, or Unavailable when nobody knows."""
        try:
            confirm(0.0)
        except Unavailable:
            await in_thread(confirm, limiter=self._limiter)

    def _fetch_once(
        self, block: Block, extent: Extent, budget: Budget, confirm: Confirm, stream: Stream | None
    ) -> tuple[memoryview | bytes, str]:
        """In a thread: one range by a stream of its own, which may have been started already."""
        if stream is None:
            stream = self._source.open_stream(block, extent.start, extent.end - extent.start, budget)
        try:
            data = _read(stream, extent.end - extent.start, budget, confirm)
        finally:
            stream.close()
        if stream.source == "ufs":
            confirm()
        return data, stream.source

    def _fetch_on(
        self, slot: _Slot, block: Block, extent: Extent, budget: Budget, confirm: Confirm
    ) -> tuple[memoryview | bytes, str]:
        """In a thread, holding the slot's lock: the next range of a stream that stays open."""
        stream = slot.stream
        if stream is None:
            stream = self._source.open_stream(block, extent.start, block.length - extent.start, budget)
            slot.stream = stream
        try:
            data = _read(stream, extent.end - extent.start, budget, confirm)
        except BaseException:
            stream.close()
            slot.stream = None
            slot.promised = -1  # nobody continues it
            raise
        if stream.source == "ufs":
            confirm()
        if extent.end == block.length:
            stream.close()
            slot.stream = None
        return data, stream.source

    def _slot_for(self, block: Block, extent: Extent, fetch: Fetch) -> _Slot | None:
        slots = self._slots.setdefault(block.block_id, [])
        now = self._clock.now()
        for slot in slots:
            if slot.promised == extent.start:
                slot.promised = extent.end
                slot.used_at = now
                return slot
        if not fetch.sequential or extent.end == block.length:
            if not slots:
                del self._slots[block.block_id]
            return None
        if self._slot_count >= MAX_IDLE_STREAMS:
            self._close_idle(now)
        slot = _Slot(extent.end, now)
        slots.append(slot)
        self._slot_count += 1
        return slot

    def _close_idle(self, before: float) -> None:
        for block_id, slots in list(self._slots.items()):
            for slot in list(slots):
                if slot.used_at <= before and not slot.lock.locked():
                    slots.remove(slot)
                    self._slot_count -= 1
                    self._close(slot)
            if not slots:
                del self._slots[block_id]

    def _close(self, slot: _Slot) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._close_in_thread, slot)

    async def _close_in_thread(self, slot: _Slot) -> None:
        async with slot.lock:  # a fetch may still be reading from it
            stream, slot.stream = slot.stream, None
            slot.promised = -1
            if stream is not None:
                try:
                    await in_thread(stream.close, limiter=self._limiter)
                except Unavailable:
                    stream.close()  # waits for a moment at most; an open stream would hold its block for longer


def _tell(token: trio.lowlevel.TrioToken, event: trio.Event) -> None:
    """In any thread: set an event of the event loop, if that still runs."""
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(event.set)


def _read(stream: Stream, size: int, budget: Budget, confirm: Confirm) -> memoryview | bytes:
    """Exactly `size` bytes. While no source delivers them, asks now and then whether the file is still there: a block
    worker can't tell a file that was replaced, whose bytes will never come, from an under storage that is down.

    The pauses double, because a try that ends begins anew: with equal ones a source of less than a fetch unit a pause
    (4 MiB in 5 s) would never get to the end.
    """
    pause_s = ASK_AFTER_S
    while True:
        part = budget.part(pause_s)
        try:
            return stream.read(size, part)
        except Unavailable:
            if budget.spent() or not part.spent():
                raise
        try:
            confirm(ASK_AFTER_S, compare=True)
        except Unavailable as error:
            # Nobody knows. Bytes need no master, so the sources are tried again.
            log.debug("not known whether the file is still there", reason=str(error))
        pause_s *= 2
