"""Tells the controller what this node holds: one stream of reports up, directives down, for as long as it runs.

    holdings() -> report_state -> stream -> controller
                       ^------------------- directives

A report each interval, whether anything changed or not: the controller forgets a node after three silent ones. A stream
that ends, is refused (an instance that is not the leader says UNAVAILABLE) or takes no report any more is replaced by
a new one, on a new connection so that a Service may choose another instance, after a pause that grows and is partly
random. Nothing of this reaches the mounts: without a controller the node works alone.

Which report comes next and what a directive means is decided in `locality.report_state`; what the node holds, by
whoever gives `holdings`. `Reporter` runs in an asyncio loop, any number of them in one; `ReportingThread` runs one for
a program without a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from typing import Final

import grpc
import structlog

from fusecache.clock import Clock
from fusecache.locality.holdings import Holdings, not_ready
from fusecache.locality.report_state import ReportState, Verdict
from fusecache.metrics import Metrics
from fusecache.pb.locality import locality_pb2_grpc
from fusecache.pb.locality.locality_pb2 import Directive, NodeReport
from fusecache.rpc.channel import make_controller_channel
from fusecache.rpc.retry import pause_s

log = structlog.get_logger(__name__)

CONNECT_S: Final = 10.0
"""Deadline of one attempt to reach the controller."""

WRITE_S: Final = 10.0
"""A stream that has not taken a report for so long is given up. (A controller whose machine is gone is noticed by the
connection's own pings, see `rpc.channel`.)"""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
"""Between attempts; below the three intervals after which a node counts for nothing, so that a controller's restart
costs one attempt. Half of it is random: some thousand nodes lose one controller in the same moment."""

LAST_REPORT_S: Final = 0.5
"""How long the last report, which says that this node serves no longer, may hold up the end of the program."""

MIN_GAP_S: Final = 0.05
"""Between two reports of one stream, however often a controller asks for full ones."""

_Stream = grpc.aio.StreamStreamCall[NodeReport, Directive]


class Reporter:
    """One node. Loop thread only, but for what says otherwise."""

    def __init__(
        self,
        address: str,
        state: ReportState,
        holdings: Callable[[], Holdings],
        *,
        interval_s: float,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """`address`: host:port of the controller. `holdings` must not block."""
        self._address = address
        self._state = state
        self._holdings = holdings
        self._interval_s = interval_s
        self._clock = clock
        self._rng = rng
        self._wake = asyncio.Event()
        """A report is due, or the stream ended."""
        self._ending = ""
        """Why the node ends; "" while it does not."""
        self._ended = asyncio.Event()
        self._in_trouble = False
        """The last attempt failed, and that was logged."""
        self._up = metrics.gauge("fusecache_locality_stream_up", controller=address)
        self._full = metrics.counter("fusecache_locality_reports_total", kind="full")
        self._delta = metrics.counter("fusecache_locality_reports_total", kind="delta")

    async def run(self) -> None:
        """Report until `end`, or until cancelled."""
        failures = 0
        while not self._ended.is_set():
            began_s = self._clock.now()
            reason = await self._one_stream()
            self._up.set(0)
            if self._ended.is_set():
                return
            # A stream that lived is no failed attempt.
            failures = 1 if self._clock.now() - began_s > 2 * LONGEST_PAUSE_S else failures + 1
            if not self._in_trouble:
                self._in_trouble = True
                log.warning("controller_stream_failed", address=self._address, reason=reason)
            await _wait(self._ended, pause_s(failures, self._rng, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S))

    def report_now(self) -> None:
        """Something changed that must not wait for the interval."""
        self._wake.set()

    def end(self, reason: str) -> None:
        """Send one more report, which says that no mount of this node serves any longer, and let `run` return. Called
        again: nothing."""
        self._ending = self._ending or reason
        self._ended.set()
        self._wake.set()

    async def _one_stream(self) -> str:
        """One connection and stream, to its end; returns why it ended."""
        channel = make_controller_channel(self._address)
        call: _Stream | None = None
        reading: asyncio.Task[None] | None = None
        try:
            call = locality_pb2_grpc.LocalityStub(channel).Report()
            async with asyncio.timeout(CONNECT_S):
                await call.wait_for_connection()
            reading = asyncio.create_task(self._read(call))
            reading.add_done_callback(lambda _: self._wake.set())
            return await self._report_through(call, reading)
        except TimeoutError:
            return "it does not answer"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError:  # written to after it ended
            return "the stream ended" if call is None else f"{(await call.code()).name}: {await call.details()}"
        except Exception:
            # A bug of ours: reporting begins anew, as after any other failure.
            log.exception("report_failed")
            return "an unexpected error"
        finally:
            if call is not None:
                call.cancel()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)  # what it met was told above
            await channel.close()

    async def _report_through(self, call: _Stream, reading: asyncio.Task[None]) -> str:
        self._state.begin_stream()
        while True:
            self._wake.clear()
            ending = self._ending
            holdings = self._holdings()
            report = self._state.next_report(not_ready(holdings, ending) if ending else holdings, self._clock.now())
            async with asyncio.timeout(LAST_REPORT_S if ending else WRITE_S):
                await call.write(report)
                if ending:
                    await call.done_writing()
                    await asyncio.wait({reading})  # until the controller has taken it and ended the stream
            (self._full if report.full else self._delta).inc()
            if ending:
                return ending
            await asyncio.sleep(min(MIN_GAP_S, self._interval_s))
            await _wait(self._wake, self._interval_s)
            if reading.done():
                reading.result()
                return "it ended the stream"
            if not self._up.value:
                self._up.set(1)
                self._in_trouble = False
                log.info("controller_reached", address=self._address)

    async def _read(self, call: _Stream) -> None:
        async for directive in call:
            verdict = self._state.receive(directive, self._clock.now())
            if verdict is Verdict.TAKEN:
                self._wake.set()
            else:
                log.info(
                    "directive_not_followed",
                    id=directive.id,
                    lease_transitions=directive.lease_transitions,
                    reason=verdict.value,
                )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class ReportingThread:
    """A `Reporter` in a thread of its own. Made, started and stopped by one thread."""

    def __init__(self, make: Callable[[], Reporter]) -> None:
        """`make` is called in the new thread, inside its loop."""
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reporter: Reporter | None = None
        self._task: asyncio.Task[None] | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="locality-reports", daemon=True)

    def start(self) -> None:
        """Returns when `report_now` and `stop` may be called."""
        self._thread.start()
        self._running.wait()

    def report_now(self) -> None:
        """From any thread: something changed that must not wait for the interval."""
        self._tell(lambda reporter: reporter.report_now())

    def end(self, reason: str) -> None:
        """From any thread: report that this node serves no longer, because of `reason`, and end. Does not wait."""
        self._tell(lambda reporter: reporter.end(reason))

    def stop(self) -> None:
        """Wait for the end that was asked for, and make it one: takes a second at most."""
        self._thread.join(LAST_REPORT_S)
        if self._thread.is_alive() and self._task is not None:
            # It waits for a controller that does not answer.
            self._tell(lambda _: self._task is not None and self._task.cancel())
            self._thread.join(LAST_REPORT_S)

    def _tell(self, what: Callable[[Reporter], object]) -> None:
        loop, reporter = self._loop, self._reporter
        if loop is not None and reporter is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(what, reporter)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._report())

    async def _report(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            self._reporter = self._make()
        finally:
            self._running.set()
        await self._reporter.run()
