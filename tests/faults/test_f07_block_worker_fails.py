"""F07: a block worker dies, cuts its stream at any byte, or goes silent. The read goes on elsewhere at that very byte;
where there is no elsewhere it is EIO, and never a short read that looks like the end of the file."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from pyfuse3 import FUSEError

from fusecache.embedded.faults import FaultPlan, FaultRule
from tests.faults.block_worker_scene import BLOCK_BYTES, CONTENT, STALL_S, failures, scene
from tests.faults.reading import check_at, check_whole
from tests.faults.waiting import refused, until

ROUNDS = 100


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None]) -> None:
    """A block worker that did not answer is named; how often depends on time."""
    expected_logs("block worker failed|block worker list not refreshed", optional=True)


def spoil(plan: FaultPlan, rng: random.Random) -> FaultRule:
    """One fault at a random byte of a random ReadBlock call of whichever block worker comes first."""
    rule = plan.on("ReadBlock", nth=rng.randrange(1, 4))
    at = rng.randrange(BLOCK_BYTES // 2)
    match rng.randrange(5):
        case 0:
            return rule.cut_after(bytes=at)
        case 1:
            return rule.cut_after(bytes=at, code="OK")
        case 2:
            return rule.cut_after(bytes=at, code="INTERNAL")
        case 3:
            return rule.drop_connection(bytes=at)
        case _:
            return rule.error("UNAVAILABLE")


async def test_stream_cut_at_random_bytes_goes_on_at_the_exact_byte(tmp_path: Path) -> None:
    """S01, S20: cut with an error, without a word, or with its connection; the bytes are the same."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    plan = FaultPlan()
    async with scene(tmp_path, faults=plan) as (mount, _, _):
        happened = 0
        for _ in range(ROUNDS):
            plan.clear()
            rule = spoil(plan, rng)
            await check_whole(mount, b"/file", CONTENT, rng)
            happened += rule.injected
        assert happened > ROUNDS / 2, "hardly any fault happened"
        assert failures(mount) >= happened * 0.9


async def test_stream_that_goes_silent_is_left_for_another_source(tmp_path: Path) -> None:
    """S20: no byte for `stall_s` is a failure, at the start of a stream and in its middle."""
    plan = FaultPlan()
    async with scene(tmp_path, faults=plan) as (mount, _, _):
        for at in (0, 1, 100_000):
            plan.clear()
            rule = plan.on("ReadBlock", nth=1).stall(bytes=at)
            before = failures(mount)
            started = trio.current_time()
            await check_whole(mount, b"/file", CONTENT, random.Random(at))
            assert rule.injected == 1
            assert failures(mount) > before
            assert trio.current_time() - started >= STALL_S * 0.9


async def test_block_worker_dies_while_a_file_is_read_the_other_one_serves(tmp_path: Path) -> None:
    """S20: whichever dies, in the middle of the file."""
    for dying in (0, 1):
        async with scene(tmp_path / str(dying), proxied=True) as (mount, _, proxies):
            handle = await mount.open(b"/file")
            await check_at(mount, handle, CONTENT, 0, 300_000)
            proxies[dying].down()
            assert proxies[dying].refusing_since_s is not None
            for offset in range(300_000, len(CONTENT), 300_000):
                await check_at(mount, handle, CONTENT, offset, 300_000)
            await mount.release(handle)
            assert proxies[1 - dying].connections > 0


async def test_block_worker_falls_into_a_black_hole_the_other_one_serves(tmp_path: Path) -> None:
    """Which one gets the rest of the file is chance: until it was the one in the black hole."""
    for attempt in range(20):
        async with scene(tmp_path / str(attempt), proxied=True) as (mount, _, proxies):
            handle = await mount.open(b"/file")
            await check_at(mount, handle, CONTENT, 0, 4096)
            (serving,) = [proxy for proxy in proxies if proxy.connections]
            serving.black_hole()
            for offset in range(4096, len(CONTENT), 300_000):
                await check_at(mount, handle, CONTENT, offset, 300_000)
            await mount.release(handle)
            if serving.swallowed_bytes > 0 or failures(mount) > 0:
                return
    raise AssertionError("the black hole swallowed nothing in 20 attempts")


async def test_every_connection_is_cut_after_some_bytes_the_file_comes_whole(tmp_path: Path) -> None:
    """Both block workers behind a network that ends each connection: a read makes progress with every one."""
    async with scene(tmp_path, proxied=True) as (mount, _, proxies):
        await check_whole(mount, b"/file", CONTENT, random.Random(1))  # logged in, blocks stored
        for proxy in proxies:
            proxy.limit(700_000)
        await check_whole(mount, b"/file", CONTENT, random.Random(2))
        assert sum(proxy.cut for proxy in proxies) >= 2


async def test_no_other_source_is_eio_and_never_a_short_read(
    tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """S01, S19: the only block worker cuts every stream; what came before is not taken for the end of the file."""
    expected_logs("request failed")
    plan = FaultPlan()
    async with scene(tmp_path, workers=1, faults=plan, read_budget_s=1.5) as (mount, _, _):
        rules = [plan.on("ReadBlock").cut_after(bytes=1, code="OK")]
        handle = await mount.open(b"/file")
        with trio.fail_after(10), refused(errno.EIO):
            await mount.read(handle, 0, len(CONTENT))
        assert rules[0].injected > 0
        plan.clear()
        rules = [plan.on("ReadBlock").error("UNAVAILABLE")]
        with trio.fail_after(10), refused(errno.EIO):
            await mount.read(handle, 0, 4096)
        assert rules[0].injected > 0
        plan.clear()
        await check_at(mount, handle, CONTENT, 0, 300_000)
        await mount.release(handle)


async def test_all_block_workers_down_is_eio_and_heals(tmp_path: Path, expected_logs: Callable[..., None]) -> None:
    expected_logs("request failed")
    async with scene(tmp_path, proxied=True, read_budget_s=1.5) as (mount, _, proxies):
        handle = await mount.open(b"/file")
        for proxy in proxies:
            proxy.down()
        with trio.fail_after(10), refused(errno.EIO):
            await mount.read(handle, 0, 4096)
        assert all(proxy.refusing_since_s is not None for proxy in proxies)
        for proxy in proxies:
            proxy.heal()
        with trio.fail_after(10):
            while True:
                try:
                    await check_at(mount, handle, CONTENT, 0, 300_000)
                    break
                except FUSEError:
                    continue
        await mount.release(handle)


async def test_read_that_joins_a_failing_fetch_goes_on_with_its_own_budget(
    tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """Regression: a fetch began long ago fails with its own budget; whoever joined it late was given its EIO."""
    expected_logs("request failed", count=1)
    plan = FaultPlan()
    async with scene(tmp_path, workers=1, faults=plan, read_budget_s=3.0) as (mount, _, _):
        rule = plan.on("ReadBlock").error("UNAVAILABLE")
        handle = await mount.open(b"/file")

        async def first() -> None:
            with refused(errno.EIO):
                await mount.read(handle, 0, 4096)
            assert rule.injected > 0
            plan.clear()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await until(lambda: rule.injected >= 2, 10, "the first read is failing")
            await trio.sleep(1.5)  # so that the second one's budget is longer by this
            await check_at(mount, handle, CONTENT, 0, 4096)
        await mount.release(handle)
