"""Nodes without a machine: any number of them in this process, through the real reporter over real gRPC.

    with SimulatedNodes(address, [f"sim-{n}" for n in range(49)]) as nodes:
        nodes.set_bytes("sim-7", "imagenet", 500, total_bytes=1000)
        nodes.set_ready("sim-8", False, "its process ended with SIGKILL")
        nodes.stop("sim-9")         # dies: no last word
        nodes.start("sim-9")        # is back, as a reporter that was started anew

Each node has one mount that is ready, and the data sets the test gave it; a change is reported at once. What is
simulated is the node, not the protocol: state machine, stream, reconnecting and metrics are fusecache's own
(`fusecache.locality`). The nodes share one thread and its loop; calls come from any other thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from types import TracebackType

from fusecache.clock import SystemClock
from fusecache.locality.holdings import DatasetHolding, Holdings, MountState, TierRoom
from fusecache.locality.report_state import ReportState
from fusecache.locality.reporter import Reporter
from fusecache.metrics import Metrics
from tests.support.loop_thread import LoopThread

MOUNTPOINT = "/var/lib/fusecache/mounts/data"
CAPACITY_BYTES = 1 << 40
VERSION = "simulated"


class _Node:
    """What one node holds; replaced values only, so that the loop may read while a test writes."""

    def __init__(self) -> None:
        self.datasets: dict[str, DatasetHolding] = {}
        self.mount = MountState(MOUNTPOINT, True, "")
        self.reporter: Reporter | None = None
        self.task: asyncio.Task[None] | None = None

    def holdings(self) -> Holdings:
        """As `serve` would put it together."""
        datasets = dict(self.datasets)
        used_bytes = sum(dataset.tiers["local_block_worker"] for dataset in datasets.values())
        return Holdings(
            (self.mount,),
            {name: dataset._replace(ready=self.mount.ready) for name, dataset in datasets.items()},
            {"local_block_worker": TierRoom(CAPACITY_BYTES, max(0, CAPACITY_BYTES - used_bytes))},
        )


class SimulatedNodes:
    """See the module. A context manager."""

    def __init__(self, address: str, names: Iterable[str], *, interval_s: float = 5.0) -> None:
        """`address`: host:port of the controller. `interval_s`: between two reports."""
        self._address = address
        self._interval_s = interval_s
        self._nodes = {name: _Node() for name in names}
        self._loop = LoopThread("simulated-nodes")
        self.metrics = Metrics()

    def __enter__(self) -> SimulatedNodes:
        self._loop.start()
        for name in self._nodes:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.do(self._cancel_all)
        self._loop.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """All nodes, stopped ones too."""
        return tuple(self._nodes)

    def set_bytes(
        self, node: str, dataset: str, local_bytes: int, *, total_bytes: int | None = None, listed_whole: bool = True
    ) -> None:
        """The node's block worker holds so much of a data set. `total_bytes` unset: as before, or no more than that."""
        found = self._nodes[node]
        if total_bytes is None:
            before = found.datasets.get(dataset)
            total_bytes = max(local_bytes, before.total_bytes if before is not None else 0)
        holding = DatasetHolding(dataset, True, total_bytes, listed_whole, {"local_block_worker": local_bytes})
        found.datasets = {**found.datasets, dataset: holding}
        self.report_now(node)

    def drop_dataset(self, node: str, dataset: str) -> None:
        """The node's configuration does not have the data set any longer."""
        found = self._nodes[node]
        found.datasets = {name: holding for name, holding in found.datasets.items() if name != dataset}
        self.report_now(node)

    def set_ready(self, node: str, ready: bool, reason: str = "the test says so") -> None:
        """Whether reads through the node's mount work."""
        self._nodes[node].mount = MountState(MOUNTPOINT, ready, "" if ready else reason)
        self.report_now(node)

    def report_now(self, node: str) -> None:
        """Report without waiting for the interval."""
        reporter = self._nodes[node].reporter
        if reporter is not None:
            self._loop.soon(reporter.report_now)

    def start(self, node: str) -> None:
        """A node (again): a reporter with a session of its own."""

        async def begin() -> None:
            found = self._nodes[node]
            assert found.task is None or found.task.done(), f"{node} is running"
            found.reporter = Reporter(
                self._address,
                ReportState(node, session=random.getrandbits(64) or 1, version=VERSION),
                found.holdings,
                interval_s=self._interval_s,
                metrics=self.metrics,
                clock=SystemClock(),
                rng=random.Random(),
            )
            found.task = asyncio.create_task(found.reporter.run(), name=node)

        self._loop.do(begin)

    def stop(self, node: str) -> None:
        """The node dies: its connection ends, without a last report."""

        async def cancel() -> None:
            await self._cancel(self._nodes[node])

        self._loop.do(cancel)

    def end(self, node: str, reason: str = "the node's daemon ends") -> None:
        """The node ends in order: its last report says that nothing is served any longer."""

        async def finish() -> None:
            found = self._nodes[node]
            if found.reporter is not None and found.task is not None:
                found.reporter.end(reason)
                await found.task

        self._loop.do(finish)

    async def _cancel_all(self) -> None:
        for node in self._nodes.values():
            await self._cancel(node)

    async def _cancel(self, node: _Node) -> None:
        if node.task is not None:
            node.task.cancel()
            await asyncio.gather(node.task, return_exceptions=True)
            node.task = node.reporter = None
