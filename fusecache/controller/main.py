"""The controller's process: wires its parts, runs them on one event loop, ends in order.

    start   credentials; list pods and nodes; listen; only then try for the Lease: who holds it makes the policy gate
            new pods, so nobody may hold it who can't let them go
    run     mirrors, lease, loop; /metrics, /healthz and /readyz in a thread of their own
    end     (SIGTERM, SIGINT) no new writes; the Lease is given back; streams end with UNAVAILABLE

/readyz is fine only on the instance that leads, so that the Service leads nodes and people to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack

import structlog

from fusecache import __version__
from fusecache.clock import SystemClock
from fusecache.config.co_scheduling import PlacementConfig
from fusecache.controller import server
from fusecache.controller.kube import NODES, PODS, KubeApi
from fusecache.controller.lease import LeaseHolder
from fusecache.controller.mirror import Mirror
from fusecache.controller.model import node_from_json, pod_from_json
from fusecache.controller.reconcile import Reconciler
from fusecache.controller.reports import Reports
from fusecache.errors import ApiUnavailable
from fusecache.metrics import Metrics
from fusecache.status_http import StatusServer

log = structlog.get_logger(__name__)

FIRST_LIST_S = 60.0
"""Seconds that listing pods and nodes may take at the start; then the process ends and says why."""

TURN_S = 1.0
STUCK_S = 30.0
"""/healthz complains when the event loop did not turn for so long."""


def run(settings: PlacementConfig, metrics_address: str | None, ready: Callable[[str], None]) -> None:
    """Run until a signal. `ready` is called with the address once it listens.

    Errors of `fusecache.errors`: UsageError without credentials, StateError for an address that can't be bound,
    CoSchedulingError when the API server refuses or can't be reached at the start.
    """
    asyncio.run(_run(settings, metrics_address, ready))


async def _run(settings: PlacementConfig, metrics_address: str | None, ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics(show_unused=False)
    metrics.gauge("fusecache_build_info", version=__version__).set(1)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(await KubeApi.connect(settings.kubeconfig, metrics))
        controller = Controller(api, settings, metrics)
        if metrics_address is not None:
            status = StatusServer(
                metrics_address,
                exposition=metrics.exposition,
                health=controller.why_unhealthy,
                ready=controller.why_not_ready,
            )
            status.start()
            stack.callback(status.stop)
            log.info("status_http_listening", address=status.address)
        running = asyncio.ensure_future(controller.run(ready))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not running.done():
            log.info("stopping")
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Controller:
    """All parts of one instance."""

    def __init__(self, api: KubeApi, settings: PlacementConfig, metrics: Metrics) -> None:
        self._clock = SystemClock()
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._identity = f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"
        self._reports = Reports(settings.report_interval_s)
        self._pods = Mirror(api, PODS, pod_from_json, lambda: self._loop.wake(), metrics, lambda pod: pod.waiting)
        self._nodes = Mirror(api, NODES, node_from_json, lambda: self._loop.wake(), metrics)
        self._lease = LeaseHolder(
            api,
            settings.namespace,
            settings.lease_name,
            self._identity,
            settings.lease_duration_s,
            self._clock,
            metrics,
            self._lead_changed,
        )
        self._loop = Reconciler(
            api,
            self._pods,
            self._nodes,
            self._reports,
            settings,
            self._lease.leads,
            self._clock,
            metrics,
            self._identity,
        )
        self._service = server.LocalityService(
            self._reports,
            self._lease.leads,
            lambda: self._lease.epoch,
            self._loop.explain,
            self._loop.wake,
            self._clock,
            metrics,
        )
        self._turned_s = self._clock.now()

    async def run(self, ready: Callable[[str], None]) -> None:
        """Until cancelled, or until a part fails."""
        async with _tasks() as start:
            start(self._turn())
            start(self._pods.run())
            start(self._nodes.run())
            await self._listed()
            listening, port = await server.start(self._settings.listen_address, self._service)
            try:
                host = self._settings.listen_address.rpartition(":")[0]
                ready(f"{host}:{port}")
                start(self._loop.run())
                lease = start(self._lease.run())
                try:
                    await lease
                finally:
                    lease.cancel()
                    await self._lease.give_back()
            finally:
                await listening.stop(server.STOP_S)

    def why_unhealthy(self) -> str | None:
        """For /healthz. Called from another thread."""
        silent_s = self._clock.now() - self._turned_s
        return f"the event loop did not turn for {silent_s:.0f} s" if silent_s > STUCK_S else None

    def why_not_ready(self) -> str | None:
        """For /readyz. Called from another thread."""
        for what, mirror in (("pods", self._pods), ("nodes", self._nodes)):
            if not mirror.synced.is_set():
                return f"{what} are not listed yet{': ' + mirror.trouble if mirror.trouble else ''}"
        return None if self._lease.leads() else "another instance leads"

    def _lead_changed(self, leading: bool) -> None:
        self._service.lead_changed(leading)
        self._loop.lead_changed(leading)

    async def _listed(self) -> None:
        try:
            async with asyncio.timeout(FIRST_LIST_S):
                await self._pods.synced.wait()
                await self._nodes.synced.wait()
        except TimeoutError:
            trouble = self._pods.trouble or self._nodes.trouble or "it takes too long"
            raise ApiUnavailable(f"pods and nodes can't be listed within {FIRST_LIST_S:g} s: {trouble}") from None

    async def _turn(self) -> None:
        reporting = self._metrics.gauge("fusecache_controller_nodes_reporting")
        while True:
            self._turned_s = self._clock.now()
            self._reports.forget_silent(self._turned_s)
            reporting.set(sum(1 for _ in self._reports.counting(self._turned_s)))
            await asyncio.sleep(TURN_S)


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[Callable[[Coroutine[None, None, None]], asyncio.Task[None]]]:
    """Start tasks that end with the block; the first that fails ends the block with its own exception."""
    try:
        async with asyncio.TaskGroup() as group:
            started: list[asyncio.Task[None]] = []

            def start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
                task = group.create_task(work)
                started.append(task)
                return task

            try:
                yield start
            finally:
                for task in started:
                    task.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
