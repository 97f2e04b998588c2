"""What a mount does beside answering: the cluster's capacity for statfs, and touching blocks that are read directly.

Block files read without a call are invisible to their block worker's eviction: with 25 hot and 25 cold blocks and room
for 50, the hot ones went first; touched by OpenLocalBlock, 25 of 25 stayed. So blocks served since the last round are
touched, at most `touch_calls_per_s` a second.

Both go on failing quietly while no server answers; reads never wait for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from fusecache.alluxio.client import AlluxioClient
from fusecache.alluxio.model import Capacity
from fusecache.clock import Clock
from fusecache.config.settings import Settings
from fusecache.errors import UpstreamError
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

CAPACITY_REFRESH_S = 60.0
"""df(1) shows a figure up to this old; the master's own is 10 s old."""

UPKEEP_BUDGET_S = 30.0


class Upkeep:
    """Background rounds of one mount."""

    def __init__(
        self,
        client: AlluxioClient,
        take_served: Callable[[int], Awaitable[list[int]]],
        settings: Settings,
        *,
        metrics: Metrics,
        clock: Clock,
        limiter: trio.CapacityLimiter,
    ) -> None:
        """`take_served` gives up to so many ids of blocks that were read directly since it was last called."""
        self._client = client
        self._take_served = take_served
        self._settings = settings
        self._clock = clock
        self._limiter = limiter
        self._capacity = Capacity(0, 0)
        self._capacity_bytes = metrics.gauge("fusecache_cluster_capacity_bytes")
        self._used_bytes = metrics.gauge("fusecache_cluster_used_bytes")
        self._touched = metrics.counter("fusecache_touched_blocks_total")

    def capacity(self) -> Capacity:
        """The cluster's cache as last heard; zeros before the first answer."""
        return self._capacity

    async def run(self) -> None:
        """Both rounds until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_capacity)
            nursery.start_soon(self._touch_served)

    async def refresh_capacity(self) -> None:
        """Ask once; keeps the old figure when nobody answers."""
        try:
            capacity = await in_thread(
                self._client.capacity, Budget(self._clock, UPKEEP_BUDGET_S), limiter=self._limiter
            )
        except UpstreamError as error:
            log.info("capacity not known", error=str(error))
            return
        self._capacity = capacity
        self._capacity_bytes.set(capacity.capacity_bytes)
        self._used_bytes.set(capacity.used_bytes)

    async def _watch_capacity(self) -> None:
        while True:
            await self.refresh_capacity()
            await trio.sleep(CAPACITY_REFRESH_S)

    async def _touch_served(self) -> None:
        interval_s = self._settings.touch_interval_s
        most = max(1, int(interval_s * self._settings.touch_calls_per_s))
        while True:
            await trio.sleep(interval_s)
            served = await self._take_served(most)
            pause_s = 1.0 / self._settings.touch_calls_per_s
            for block_id in served:
                try:
                    touched = await in_thread(
                        self._client.touch, [block_id], Budget(self._clock, UPKEEP_BUDGET_S), limiter=self._limiter
                    )
                except UpstreamError as error:
                    log.info("blocks not touched", error=str(error))
                    break
                self._touched.inc(touched)
                await trio.sleep(pause_s)
