"""The gRPC service over a real connection: reports in, directives and answers out, limits, the end of the lead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from fusecache.controller import server
from fusecache.controller.reports import Reports
from fusecache.errors import StateError
from fusecache.metrics import Metrics
from fusecache.pb.locality import locality_pb2 as pb
from fusecache.pb.locality import locality_pb2_grpc
from tests.support import log_noise
from tests.support.clocks import LoopClock
from tests.t6_controller.objects import report


class Running:
    """A server and a channel to it."""

    def __init__(self, interval_s: float) -> None:
        self.clock = LoopClock()
        self.metrics = Metrics(show_unused=False)
        self.reports = Reports(interval_s)
        self.leading = True
        self.woken = asyncio.Event()
        self.service = server.LocalityService(
            self.reports,
            lambda: self.leading,
            lambda: 7,
            lambda namespace, name: None,
            self.woken.set,
            self.clock,
            self.metrics,
        )

    async def taken(self, count: int) -> None:
        """Until so many reports were taken."""
        cell = self.metrics.counter("fusecache_controller_reports_total", result="taken")
        while cell.value < count:
            self.woken.clear()
            await self.woken.wait()

    def counting(self) -> dict[str, dict[str, int]]:
        return {
            name: {dataset: holding.served_bytes for dataset, holding in state.holdings.items()}
            for name, state in self.reports.counting(self.clock.now())
        }


@asynccontextmanager
async def running(interval_s: float = 5.0) -> AsyncIterator[tuple[Running, locality_pb2_grpc.LocalityStub]]:
    made = Running(interval_s)
    listening, port = await server.start("127.0.0.1:0", made.service)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield made, locality_pb2_grpc.LocalityStub(channel)
    finally:
        await listening.stop(0.5)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: grpc.aio's poller is one of the process, with sockets of its own, and calls back
    into a loop that is closed."""
    with asyncio.Runner() as runner:

        async def start_poller() -> None:
            grpc.aio.init_grpc_aio()

        runner.run(start_poller())
        yield runner
        grpc.aio.shutdown_grpc_aio()


def on_loop(test: Callable[[], Awaitable[None]]) -> Callable[[asyncio.Runner], None]:
    """Run a coroutine test on asyncio; the tests' default is trio."""

    def run(loop: asyncio.Runner) -> None:
        async def limited() -> None:
            async with asyncio.timeout(30):
                await test()

        loop.run(limited())

    run.__name__ = test.__name__
    return run


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


@on_loop
async def test_reports_are_taken_and_listed() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("n", {"a": 5}, total_bytes=10))
        await call.write(report("n", {"b": 1}, total_bytes=10, sequence=2, full=False))
        await made.taken(2)
        made.clock.time_s += 1.5
        answer = await stub.ListLocality(pb.ListLocalityRequest())
        assert answer.nodes_reporting == 1
        assert [(row.dataset, row.node_name, row.tier, row.bytes, row.age_ms, row.counts) for row in answer.rows] == [
            ("a", "n", pb.TIER_LOCAL_BLOCK_WORKER, 5, 1500, True),
            ("b", "n", pb.TIER_LOCAL_BLOCK_WORKER, 1, 1500, True),
        ]
        assert len((await stub.ListLocality(pb.ListLocalityRequest(dataset="a"))).rows) == 1
        made.clock.time_s += 14.0
        late = await stub.ListLocality(pb.ListLocalityRequest())
        assert late.nodes_reporting == 0
        assert [row.counts for row in late.rows] == [False, False]
        call.cancel()


def test_report_that_can_not_be_true_ends_the_stream(loop: asyncio.Runner, expected_logs: log_noise.Declare) -> None:
    expected_logs(r"report_refused.*is not the name of a node", count=1)
    loop.run(refused_report())


async def refused_report() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("not a node"))
        assert await ended(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "node_name 'not a node' is not the name of a node",
        )
        assert made.counting() == {}


@on_loop
async def test_gap_ends_the_stream_and_a_new_one_begins_anew() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("n", {"a": 5}))
        await call.write(report("n", {"a": 6}, sequence=3, full=False))
        assert await ended(call) == (grpc.StatusCode.FAILED_PRECONDITION, "report 3 came after 1")
        again = stub.Report()
        await again.write(report("n", {"a": 7}))
        await made.taken(2)
        assert made.counting() == {"n": {"a": 7}}
        again.cancel()


@on_loop
async def test_delta_on_nothing_is_answered_with_report_fully() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("n", {"a": 5}))
        await made.taken(1)
        await call.write(report("n", {"a": 6}, sequence=2, full=False, session=99))
        directive = await call.read()
        assert directive.WhichOneof("action") == "report_fully"
        assert directive.lease_transitions == 7
        await call.write(report("n", {"a": 7}, sequence=3, session=99))
        await made.taken(2)
        assert made.counting() == {"n": {"a": 7}}
        call.cancel()


@on_loop
async def test_message_beyond_the_limit_ends_the_stream() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("n", {f"{'d' * 400}{number}": 1 for number in range(4000)}))
        code, _ = await ended(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert made.counting() == {}


@on_loop
async def test_streams_beyond_the_limit_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "MAX_STREAMS", 1)
        async with running() as (made, stub):
            first = stub.Report()
            await first.write(report("n", {"a": 5}))
            await made.taken(1)
            second = stub.Report()
            code, _ = await ended(second)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            first.cancel()


@on_loop
async def test_instance_that_does_not_lead_refuses_everything() -> None:
    async with running() as (made, stub):
        made.leading = False
        assert (await ended(stub.Report()))[0] is grpc.StatusCode.UNAVAILABLE
        for call in (
            stub.ListLocality(pb.ListLocalityRequest()),
            stub.ExplainPod(pb.ExplainPodRequest(namespace="x", pod="y")),
        ):
            with pytest.raises(grpc.RpcError) as failure:
                await call
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


@on_loop
async def test_losing_the_lead_ends_idle_streams_and_forgets_reports() -> None:
    async with running() as (made, stub):
        call = stub.Report()
        await call.write(report("n", {"a": 5}))
        await made.taken(1)
        made.leading = False
        made.service.lead_changed(False)
        assert await ended(call) == (grpc.StatusCode.UNAVAILABLE, "this instance does not lead any more")
        assert made.counting() == {}
        made.leading = True
        made.service.lead_changed(True)
        again = stub.Report()
        await again.write(report("n", {"a": 6}))
        await made.taken(2)
        assert made.counting() == {"n": {"a": 6}}
        again.cancel()


@on_loop
async def test_silent_stream_is_ended() -> None:
    async with running(interval_s=0.1) as (made, stub):
        call = stub.Report()
        await call.write(report("n", {"a": 5}))
        assert await ended(call) == (grpc.StatusCode.UNAVAILABLE, "no report for 0.3 s")
        assert made.metrics.gauge("fusecache_controller_streams").value == 0


@on_loop
async def test_explain_of_an_unknown_pod_is_not_found() -> None:
    async with running() as (_, stub):
        with pytest.raises(grpc.RpcError) as failure:
            await stub.ExplainPod(pb.ExplainPodRequest(namespace="x", pod="y"))
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        assert failure.value.details() == "no pod 'y' in namespace 'x'"


def test_address_that_is_taken_is_an_error_of_the_start(loop: asyncio.Runner, expected_logs: log_noise.Declare) -> None:
    expected_logs(r"add_port.*Address already in use")

    async def start_twice() -> None:
        async with running() as (made, _):
            first, port = await server.start("127.0.0.1:0", made.service)
            try:
                with pytest.raises(StateError, match="listen_address"):
                    await server.start(f"127.0.0.1:{port}", made.service)
            finally:
                await first.stop(0)

    loop.run(start_twice())
