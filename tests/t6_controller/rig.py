"""The loop of the controller with its real parts around it, against the double of the API, on a clock of the test's.

Everything is real but three things: the API server, the clock, and who leads (no Lease). Reports are put into the table
directly; their way over gRPC has its own tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fusecache.config.co_scheduling import PlacementConfig
from fusecache.controller.kube import NODES, PODS, KubeApi
from fusecache.controller.mirror import Mirror
from fusecache.controller.model import Node, Pod, node_from_json, pod_from_json
from fusecache.controller.reconcile import Reconciler
from fusecache.controller.reports import Reports, Stream
from fusecache.metrics import Metrics
from tests.support.clocks import LoopClock
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.objects import report

LIMIT_S = 30.0


class SlowClock(LoopClock):
    """Stands still until the test moves it, or looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0
        """Passes with every look at the clock: a machine that is slow."""

    def now(self) -> float:
        self.time_s += self.step_s
        return self.time_s


class Rig:
    """One controller's loop; made by `running`."""

    def __init__(self, api: ApiDouble, kube: KubeApi, **placement: Any) -> None:
        self.api = api
        self.kube = kube
        self.clock = SlowClock()
        self.metrics = Metrics(show_unused=False)
        self.settings = PlacementConfig(**placement)
        self.reports = Reports(self.settings.report_interval_s)
        self.leading = False
        self.pods: Mirror[Pod] = Mirror(
            kube, PODS, pod_from_json, lambda: self.loop.wake(), self.metrics, lambda pod: pod.waiting
        )
        self.nodes: Mirror[Node] = Mirror(kube, NODES, node_from_json, lambda: self.loop.wake(), self.metrics)
        self.loop = Reconciler(
            kube,
            self.pods,
            self.nodes,
            self.reports,
            self.settings,
            lambda: self.leading,
            self.clock,
            self.metrics,
            "rig",
        )
        self._streams: dict[str, Stream] = {}

    def report(self, held: dict[str, int], dataset: str = "imagenet", *, ready: bool = True) -> None:
        """Full reports: node -> bytes of one data set."""
        for name, held_bytes in held.items():
            stream = self._streams.setdefault(name, Stream())
            message = report(name, {dataset: held_bytes}, sequence=stream.sequence + 1, ready=ready)
            assert self.reports.receive(stream, message, self.clock.now()).outcome.value == "taken"
        self.loop.wake()

    def lead(self) -> None:
        self.leading = True
        self.loop.lead_changed(True)

    def pass_time(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.loop.wake()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait on the event loop, so that the controller goes on."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def gate_gone(self, key: str = "default/p") -> dict[str, Any]:
        """The pod once our gate is off it and its event is written."""
        gates = ("fusecache.io/locality",)
        await self.until(
            f"{key} is let go",
            lambda: all(gate["name"] not in gates for gate in self.pod(key)["spec"].get("schedulingGates") or ()),
        )
        name = key.partition("/")[2]
        await self.until("its event", lambda: any(e["involvedObject"]["name"] == name for e in self.events()))
        return self.pod(key)

    def pod(self, key: str = "default/p") -> dict[str, Any]:
        return self.api.get("pods", key)

    def events(self) -> list[dict[str, Any]]:
        return self.api.all("events")

    async def rounds(self, count: int = 3) -> None:
        """Let so many rounds go by."""
        for _ in range(count):
            self.loop.wake()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(api: ApiDouble, folder: Path, *, lead: bool = True, **placement: Any) -> AsyncIterator[Rig]:
    """A rig whose pods and nodes are listed; it leads, and has led for long, unless told otherwise."""
    metrics = Metrics(show_unused=False)
    async with await KubeApi.connect(api.kubeconfig(folder), metrics) as kube:
        rig = Rig(api, kube, **placement)
        tasks = [asyncio.create_task(work) for work in (rig.pods.run(), rig.nodes.run(), rig.loop.run())]
        try:
            await rig.pods.synced.wait()
            await rig.nodes.synced.wait()
            if lead:
                rig.lead()
                rig.pass_time(1000.0)
            yield rig
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            api.drop_watches()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


def run(test: Callable[[], Awaitable[None]]) -> None:
    """A coroutine on asyncio, within a limit; the tests' default is trio."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())
