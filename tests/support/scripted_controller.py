"""A controller for tests of the node's side: it takes reports over real gRPC, keeps them, and does what it is told.

`ScriptedController` listens on loopback in a thread of its own (grpc.aio, as the real one). Each stream it accepts is
a `NodeStream` with the reports that came; the test waits for what it expects and sends directives, ends streams with a
status, goes silent, or stops and comes back at the same address.

It judges nothing: sequences, epochs and expiry are for the test to look at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TypeVar

import grpc

from fusecache.pb.locality import locality_pb2_grpc
from fusecache.pb.locality.locality_pb2 import DatasetReport, Directive, NodeReport, ReportFully
from tests.support.loop_thread import LoopThread

T = TypeVar("T")

WAIT_S = 20.0


class NodeStream:
    """One stream of a node."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        """Address of the node's end of the connection."""
        self.reports: list[NodeReport] = []
        self.ended = False
        """The node is gone, or we ended it."""
        self.orders: asyncio.Queue[Directive | tuple[grpc.StatusCode, str]] = asyncio.Queue()

    def known(self) -> dict[str, DatasetReport]:
        """The data sets as a controller knows them after all reports."""
        known: dict[str, DatasetReport] = {}
        for report in list(self.reports):
            if report.full:
                known = {}
            for name in report.removed_datasets:
                known.pop(name, None)
            known.update({dataset.name: dataset for dataset in report.datasets})
        return known

    def local_bytes(self, dataset: str) -> int | None:
        """Bytes of a data set in the node's block worker; None when it was not reported."""
        found = self.known().get(dataset)
        return None if found is None else sum(tier.bytes for tier in found.tiers)

    def not_ready(self) -> dict[str, str]:
        """Mount points that are not ready, with the reason, by the last report."""
        return {mount.mountpoint: mount.reason for mount in self.reports[-1].mounts if not mount.ready}


class ScriptedController(locality_pb2_grpc.LocalityServicer):
    """A context manager; `address` is where it listens."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self.streams: list[NodeStream] = []
        self.refuse_with: tuple[grpc.StatusCode, str] | None = None
        """Every new stream ends with this."""
        self._loop = LoopThread("scripted-controller")
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> ScriptedController:
        self._loop.start()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.stop()

    def start(self) -> None:
        """Listen (again)."""
        self._loop.do(self._start)

    def stop(self) -> None:
        """Cut every stream and stop listening."""
        self._loop.do(self._stop)

    def order(self, stream: NodeStream, order: Directive | tuple[grpc.StatusCode, str]) -> None:
        """Send a directive, or end the stream with a status."""
        self._loop.soon(lambda: stream.orders.put_nowait(order))

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
        """The first true value of `condition`; AssertionError with all reports when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s; {self.told()}"
            time.sleep(0.01)
        return value

    def stream(self, number: int = -1, *, reports: int = 1) -> NodeStream:
        """A stream, when it has so many reports."""

        def there() -> NodeStream | None:
            if len(self.streams) <= (number if number >= 0 else 0):
                return None
            found = self.streams[number]
            return found if len(found.reports) >= reports else None

        found = self.wait(there, f"stream {number} with {reports} reports")
        assert found is not None
        return found

    def told(self) -> str:
        """Everything that came, for a failure's text."""
        return (
            "\n".join(f"stream {number}: {stream.reports}" for number, stream in enumerate(self.streams)) or "nothing"
        )

    async def Report(
        self, requests: AsyncIterator[NodeReport], context: grpc.aio.ServicerContext[NodeReport, Directive]
    ) -> AsyncIterator[Directive]:
        stream = NodeStream(context.peer())
        self.streams.append(stream)
        if self.refuse_with is not None:
            await context.abort(*self.refuse_with)

        async def receive() -> None:
            async for report in requests:
                stream.reports.append(report)
            stream.orders.put_nowait((grpc.StatusCode.OK, ""))

        receiving = asyncio.create_task(receive())
        try:
            while True:
                order = await stream.orders.get()
                if isinstance(order, Directive):
                    yield order
                elif order[0] is grpc.StatusCode.OK:
                    return
                else:
                    await context.abort(*order)
        finally:
            stream.ended = True
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        locality_pb2_grpc.add_LocalityServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


def report_fully(*, epoch: int = 1, directive_id: str = "1", expires_after_ms: int = 0) -> Directive:
    """A directive that asks for a full report."""
    return Directive(
        lease_transitions=epoch, id=directive_id, expires_after_ms=expires_after_ms, report_fully=ReportFully()
    )
