"""F06: no master can be reached. What was listed goes on being served, everything else is EIO in time, and it heals."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from fusecache.alluxio.sasl import Login, SaslSession
from fusecache.cache import tree
from fusecache.errors import Unavailable
from fusecache.rpc.channel import make_channel
from tests.faults.waiting import refused, until
from tests.support.below_kernel import BelowKernel, MovableClock, below_kernel, cluster_of
from tests.support.embedded import embedded_server
from tests.support.faulty_proxy import FaultyProxy

BUDGET_S = 2.0
REFRESH_S = 600.0
BACK_S = 7.0
"""Promised are 5 s; the rest is for a slow machine."""
STALE = "fusecache_metadata_lookups_total{result=stale}"

FAULTS: dict[str, Callable[[FaultyProxy], None]] = {
    "black_hole": FaultyProxy.black_hole,
    "reset": FaultyProxy.reset,
    "down": FaultyProxy.down,
}


class Scene(NamedTuple):
    mount: BelowKernel
    proxy: FaultyProxy
    clock: MovableClock
    source: Path


@asynccontextmanager
async def scene(tmp_path: Path, **settings: object) -> AsyncIterator[Scene]:
    """A mount whose only master is behind a proxy; folder `listed` is known, folder `unknown` is not."""
    source = tmp_path / "source"
    for folder in ("listed", "unknown"):
        (source / folder).mkdir(parents=True)
        (source / folder / "file").write_bytes(b"content")
    clock = MovableClock()
    chosen = {
        "metadata_budget_s": BUDGET_S, "rpc_try_s": 1.0, "connect_s": 1.0, "refresh_s": REFRESH_S,
        "sync_interval_s": 0.0, **settings,
    }  # fmt: skip
    with (
        embedded_server(source, tmp_path / "server") as server,
        FaultyProxy(server.master_target) as proxy,
    ):
        async with below_kernel(cluster_of(server, proxy.target), tmp_path / "state", clock=clock, **chosen) as mount:
            assert await mount.names() == [b"listed", b"unknown"]
            assert await mount.names(b"/listed") == [b"file"]
            yield Scene(mount, proxy, clock, source)


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon says that no master answers, after a few tries; how many there are depends on time. It finds out well
    within the small budget of these tests, as it does within the real one."""
    expected_logs("master does not answer", optional=True)
    monkeypatch.setattr(tree, "NO_ANSWER_S", BUDGET_S / 4)


def happened(proxy: FaultyProxy, fault: str) -> bool:
    """Whether the proxy has really done it to somebody."""
    if fault == "black_hole":
        return proxy.swallowed_bytes > 0
    if fault == "reset":
        return proxy.resets > 0
    return proxy.refusing_since_s is not None


@pytest.mark.parametrize("fault", FAULTS)
async def test_master_unreachable_known_names_are_served_stale_and_counted(tmp_path: Path, fault: str) -> None:
    """S21: look-ups, attributes and listings go on past their time, each counted as stale."""
    async with scene(tmp_path) as (mount, proxy, clock, _):
        FAULTS[fault](proxy)
        clock.advance(REFRESH_S + 1)
        with trio.fail_after(BUDGET_S + 5):
            assert (await mount.stat(b"/listed/file")).st_size == 7
        assert happened(proxy, fault)
        stale = mount.count(STALE)
        assert stale > 0
        # Only the first request paid for finding out.
        with trio.fail_after(BUDGET_S):
            for _ in range(50):
                assert (await mount.stat(b"/listed/file")).st_size == 7
                assert await mount.names(b"/listed") == [b"file"]
        assert mount.count(STALE) > stale


@pytest.mark.parametrize("fault", FAULTS)
async def test_master_unreachable_unknown_folder_is_eio_when_the_budget_ends(
    tmp_path: Path, fault: str, expected_logs: Callable[..., None]
) -> None:
    """S19: a request that needs a master ends with EIO after its budget, neither at the first failure nor later."""
    expected_logs("request failed")
    async with scene(tmp_path) as (mount, proxy, _, _):
        FAULTS[fault](proxy)
        started = trio.current_time()
        with trio.fail_after(BUDGET_S + 5), refused(errno.EIO):
            await mount.names(b"/unknown")
        assert happened(proxy, fault)
        assert trio.current_time() - started >= BUDGET_S * 0.9
        if fault != "black_hole":  # there the one call lasts as long as the budget: a listing may be slow
            assert mount.count("fusecache_rpc_retries_total{method=ListStatus}") > 0


async def test_master_unreachable_past_stale_if_error_is_eio(
    tmp_path: Path, expected_logs: Callable[..., None]
) -> None:
    """S21: `stale_if_error_s` is a limit: what is older is not served any more."""
    expected_logs("request failed")
    async with scene(tmp_path, stale_if_error_s=100.0) as (mount, proxy, clock, _):
        proxy.reset()
        clock.advance(REFRESH_S + 50)
        assert await mount.names(b"/listed") == [b"file"]
        assert happened(proxy, "reset")
        clock.advance(51)
        with trio.fail_after(BUDGET_S + 5), refused(errno.EIO):
            await mount.names(b"/listed")


@pytest.mark.parametrize("fault", FAULTS)
async def test_master_unreachable_then_back_new_names_are_seen(tmp_path: Path, fault: str) -> None:
    async with scene(tmp_path, metadata_budget_s=20.0) as (mount, proxy, clock, source):
        FAULTS[fault](proxy)
        clock.advance(REFRESH_S + 1)
        (source / "listed" / "new").write_bytes(b"")
        attempts = proxy.connections
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(mount.names, b"/listed")
            await until(lambda: happened(proxy, fault), 5, "the fault")
            # Long enough for several tries; `down` shows no attempts, because nobody listens.
            await until(lambda: trio.current_time() - began > 4, 6, "time for retries")
            assert proxy.connections - attempts <= (trio.current_time() - began) + 1, "more than one attempt a second"
            proxy.heal()

            async def seen() -> bool:
                return await mount.names(b"/listed") == [b"file", b"new"]

            await until(seen, BACK_S, "the new name after the master is back")


async def test_master_unreachable_from_the_start_is_an_error_in_time(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with embedded_server(source, tmp_path / "server") as server, FaultyProxy(server.master_target) as proxy:
        proxy.black_hole()
        with trio.fail_after(8):
            with pytest.raises(Unavailable, match=proxy.target):
                async with below_kernel(cluster_of(server, proxy.target), tmp_path / "state", connect_s=2.0):
                    pytest.fail("connected through a black hole")
        assert happened(proxy, "black_hole")


@pytest.mark.parametrize("fault", ["reset", "down"])
async def test_login_to_a_server_that_refuses_connections_fails_at_once(tmp_path: Path, fault: str) -> None:
    """Regression: the opening was never sent, its thread never resumed, and the login waited out its whole limit."""
    limit_s = 30.0
    with FaultyProxy("127.0.0.1:9") as proxy:
        FAULTS[fault](proxy)
        channel = make_channel(proxy.target, tls=None)
        try:
            session = SaslSession(channel, Login("user", "", "simple"), lambda _: None)
            with trio.fail_after(limit_s / 2), pytest.raises(Unavailable, match="login failed"):
                await trio.to_thread.run_sync(session.wait, limit_s, proxy.target)
            assert happened(proxy, fault)
        finally:
            channel.close()
