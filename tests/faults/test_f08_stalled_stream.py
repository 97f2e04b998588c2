"""F08: a stream that stalls, or trickles at 1 KB/s, is left for another source in time; other files don't notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from fusecache.embedded.faults import FaultPlan
from tests.faults.block_worker_scene import CONTENT, failures, scene
from tests.faults.reading import check_at, check_whole
from tests.faults.waiting import until

STALL_S = 2.0
"""Long enough for several passes over another file meanwhile."""

TRICKLE_BYTES_PER_S = 1 << 10


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None]) -> None:
    """A block worker that did not answer is named."""
    expected_logs("block worker failed|block worker list not refreshed", optional=True)


async def test_f08_stalled_stream_goes_on_elsewhere_and_holds_up_no_other_file(tmp_path: Path) -> None:
    """S20: the bytes are right; while one reader waits for the stall deadline, another one reads on."""
    plan = FaultPlan()
    async with scene(tmp_path, faults=plan, stall_s=STALL_S) as (mount, _, _):
        await check_whole(mount, b"/other", CONTENT, random.Random(1))
        rule = plan.on("ReadBlock", nth=1).stall(bytes=1000)
        before = failures(mount)
        passes = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_whole, mount, b"/file", CONTENT, random.Random(2))
            await until(lambda: rule.injected == 1, 10, "the stream stalls")
            while failures(mount) == before:
                await check_whole(mount, b"/other", CONTENT, random.Random(passes))
                passes += 1
        assert passes >= 2, "the other file was held up too"


async def test_f08_trickling_stream_is_left_at_the_stall_deadline(tmp_path: Path) -> None:
    """S20: bytes that trickle make no message; a stream without one for `stall_s` counts as silent."""
    async with scene(tmp_path, proxied=True) as (mount, _, proxies):
        await check_whole(mount, b"/other", CONTENT, random.Random(1))
        for proxy in proxies:
            proxy.trickle(TRICKLE_BYTES_PER_S)
        handle = await mount.open(b"/file")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_at, mount, handle, CONTENT, 0, 300_000)
            await until(lambda: failures(mount) > 0, 10, "the stall deadline")
            assert sum(proxy.trickled_bytes for proxy in proxies) > 0
            for proxy in proxies:
                proxy.heal()
        await mount.release(handle)
        await check_whole(mount, b"/file", CONTENT, random.Random(2))
