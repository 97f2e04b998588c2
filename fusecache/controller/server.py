"""The gRPC service: nodes report, people ask. One asyncio loop, a coroutine per stream.

Only the instance that leads answers; any other ends every call with UNAVAILABLE, and does so with open streams in the
moment it stops leading: a node must never report to an instance that nobody listens to. A stream that is silent for
longer than a report counts is ended too (its node may have vanished without a goodbye).

Limits: MESSAGE_BYTES a message, MAX_STREAMS open streams. What a report says is checked in `reports`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import structlog

from fusecache.clock import Clock
from fusecache.controller import inventory
from fusecache.controller.reconcile import Explanation
from fusecache.controller.reports import Outcome, Reports, Stream
from fusecache.errors import StateError
from fusecache.metrics import Metrics
from fusecache.pb.locality import locality_pb2 as pb
from fusecache.pb.locality import locality_pb2_grpc

log = structlog.get_logger(__name__)

MESSAGE_BYTES = 1 << 20
"""Largest message accepted: 1,000 data sets with long names."""

ANSWER_BYTES = 64 << 20
"""Largest answer sent: every data set on every node of a large cluster."""

MAX_STREAMS = 20_000
STREAMS_PER_CONNECTION = 64
MAX_CANDIDATES = 10_000

STOP_S = 1.0
"""Seconds that calls may take to end when the server stops."""

_CODES = {
    Outcome.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Outcome.GAP: grpc.StatusCode.FAILED_PRECONDITION,
    Outcome.SUPERSEDED: grpc.StatusCode.FAILED_PRECONDITION,
    Outcome.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", ANSWER_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    # Nodes ping idle streams (rpc.channel.KEEPALIVE_S); the default calls that an attack after the third.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Two controllers on one port would each get half of the nodes.
    ("grpc.so_reuseport", 0),
]


class LocalityService(locality_pb2_grpc.LocalityServicer):
    """The calls."""

    def __init__(
        self,
        reports: Reports,
        leads: Callable[[], bool],
        epoch: Callable[[], int],
        explain: Callable[[str, str], Explanation | None],
        on_report: Callable[[], None],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._reports = reports
        self._leads = leads
        self._epoch = epoch
        self._explain = explain
        self._on_report = on_report
        self._clock = clock
        self._metrics = metrics
        self._streams = 0
        self._open_streams = metrics.gauge("fusecache_controller_streams")
        self._lead_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lead_changed(self, leading: bool) -> None:
        """End every stream when the lead is lost; what the nodes said is forgotten with it."""
        if not leading:
            self._lead_ended.set_result(None)
            self._lead_ended = asyncio.get_running_loop().create_future()
        self._reports.clear()

    async def Report(self, requests: AsyncIterator[pb.NodeReport], context: Any) -> AsyncIterator[pb.Directive]:
        """A node's stream."""
        await self._admit(context)
        if self._streams >= MAX_STREAMS:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams are open already")
        self._streams += 1
        self._open_streams.set(self._streams)
        stream = Stream()
        lead_ended = self._lead_ended
        try:
            while True:
                message = await self._next_report(requests, lead_ended, context)
                if message is None:
                    return
                receipt = self._reports.receive(stream, message, self._clock.now())
                self._metrics.counter("fusecache_controller_reports_total", result=receipt.outcome.value).inc()
                match receipt.outcome:
                    case Outcome.TAKEN:
                        self._on_report()
                    case Outcome.REPORT_FULLY:
                        yield self._report_fully(stream)
                    case refused:
                        # Gaps and old streams belong to connections that break; what can't be true is somebody's fault.
                        tell = log.info if refused in (Outcome.GAP, Outcome.SUPERSEDED) else log.warning
                        tell("report_refused", peer=context.peer(), node=stream.node_name, why=receipt.reason)
                        await _abort(context, _CODES[refused], receipt.reason)
        finally:
            self._reports.close(stream)
            self._streams -= 1
            self._open_streams.set(self._streams)

    async def ListLocality(self, request: pb.ListLocalityRequest, context: Any) -> pb.ListLocalityResponse:
        """Who holds how much."""
        await self._admit(context)
        now_s = self._clock.now()
        return pb.ListLocalityResponse(
            rows=[
                pb.DatasetOnNode(
                    dataset=row.dataset,
                    node_name=row.node_name,
                    tier=pb.Tier.Name(row.tier),
                    bytes=row.held_bytes,
                    total_bytes=row.total_bytes,
                    listed_whole=row.listed_whole,
                    ready=row.ready,
                    age_ms=max(0, int(row.age_s * 1000)),
                    counts=row.counts,
                )
                for row in inventory.rows(self._reports, now_s, request.dataset)
            ],
            nodes_reporting=sum(1 for _ in self._reports.counting(now_s)),
        )

    async def ExplainPod(self, request: pb.ExplainPodRequest, context: Any) -> pb.ExplainPodResponse:
        """Why here, why not there."""
        await self._admit(context)
        explanation = self._explain(request.namespace, request.pod)
        if explanation is None:
            await _abort(
                context, grpc.StatusCode.NOT_FOUND, f"no pod {request.pod!r} in namespace {request.namespace!r}"
            )
        return pb.ExplainPodResponse(
            namespace=explanation.pod.namespace,
            pod=explanation.pod.name,
            uid=explanation.pod.uid,
            state=explanation.state,
            reason=explanation.reason,
            placement=explanation.wish.placement,
            datasets=explanation.wish.datasets,
            node_name=explanation.node_name,
            candidates=[
                pb.Candidate(
                    node_name=candidate.node_name,
                    feasible=candidate.feasible,
                    refused_because=candidate.refused_because,
                    bytes=candidate.held_bytes,
                    report_age_ms=(
                        max(0, int(explanation.report_age_s[candidate.node_name] * 1000))
                        if candidate.node_name in explanation.report_age_s
                        else None
                    ),
                )
                for candidate in explanation.candidates[:MAX_CANDIDATES]
            ],
        )

    async def _admit(self, context: Any) -> None:
        if not self._leads():
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this instance does not lead")

    async def _next_report(
        self, requests: AsyncIterator[pb.NodeReport], lead_ended: asyncio.Future[None], context: Any
    ) -> pb.NodeReport | None:
        """The next message; None at the end of the stream. Aborts when the lead is lost or the node is silent."""
        next_message = asyncio.ensure_future(anext(requests, None))
        try:
            await asyncio.wait(
                (next_message, lead_ended), timeout=self._reports.counts_for_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            arrived = next_message.done()
            if not arrived:
                # Ended before the call is: grpc would leave its exception to nobody.
                next_message.cancel()
                await asyncio.wait((next_message,))
        if lead_ended.done():
            await _abort(context, grpc.StatusCode.UNAVAILABLE, "this instance does not lead any more")
        if not arrived:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"no report for {self._reports.counts_for_s:g} s")
        return next_message.result()

    def _report_fully(self, stream: Stream) -> pb.Directive:
        return pb.Directive(
            lease_transitions=self._epoch(),
            id=f"report-fully-{stream.sequence}",
            report_fully=pb.ReportFully(),
        )


async def start(address: str, service: LocalityService) -> tuple[grpc.aio.Server, int]:
    """Bind and serve; the server and its port. StateError when the address can't be bound."""
    server = grpc.aio.server(options=_OPTIONS)
    locality_pb2_grpc.add_LocalityServicer_to_server(service, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as failure:
        raise StateError(f"listen_address {address!r} can't be used: {failure}") from None
    await server.start()
    return server, port


async def _abort(context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
    """End the call; grpc raises to leave the handler."""
    await context.abort(code, reason)
    raise AssertionError("abort returned")
