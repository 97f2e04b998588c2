"""F09: masters change or restart while a large folder is listed. A listing is whole or
an error, and the next one is whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from pyfuse3 import FUSEError

from fusecache.config.settings import ClusterConfig
from fusecache.embedded.faults import FaultPlan
from tests.faults.waiting import until
from tests.support.below_kernel import BelowKernel, below_kernel
from tests.support.embedded import embedded_server
from tests.support.faulty_proxy import FaultyProxy

ENTRIES = 20_000
MANY_ENTRIES = 100_000
SETTINGS: dict[str, object] = {"metadata_budget_s": 30.0, "connect_s": 1.0, "rpc_try_s": 5.0}


def names(count: int) -> list[bytes]:
    return [b"%06d.jpg" % number for number in range(count)]


def filled(folder: Path, count: int) -> Path:
    """A folder of so many empty files."""
    for name in names(count):
        os.close(os.open(os.fsencode(folder) + b"/" + name, os.O_CREAT | os.O_WRONLY, 0o644))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("source"), ENTRIES)


@pytest.fixture(autouse=True)
def told(expected_logs: Callable[..., None]) -> None:
    """A listing that broke off is EIO and said; how many tries there are depends on time."""
    expected_logs("request failed|master does not answer", optional=True)


@contextmanager
def two_masters(target: str) -> Iterator[tuple[FaultyProxy, FaultyProxy]]:
    """Two addresses of one master: whichever answers is the primary."""
    with FaultyProxy(target) as first, FaultyProxy(target) as second:
        second.down()
        yield first, second


def cluster_behind(*proxies: FaultyProxy) -> ClusterConfig:
    return ClusterConfig(name="test", masters=tuple(proxy.target for proxy in proxies))


async def whole_or_error(mount: BelowKernel, count: int = ENTRIES) -> bool:
    """One listing: True when it came, and then it is whole, without a gap or a double; False for an error."""
    try:
        found = await mount.listing()
    except FUSEError:
        return False
    assert len(found) == count, f"{len(found)} entries taken for all"
    assert sorted(name for name, _ in found) == names(count)
    assert len({attributes.st_ino for _, attributes in found}) == count, "ids came twice"
    return True


async def whole_in_the_end(mount: BelowKernel, count: int = ENTRIES) -> None:
    """The cluster is healthy: listings are whole again, soon."""

    async def whole() -> bool:
        return await whole_or_error(mount, count)

    await until(whole, 20, "a whole listing")


async def test_leader_changes_during_a_listing_it_is_whole_or_an_error(source: Path, tmp_path: Path) -> None:
    """The primary's connections end in the middle of its answer; the other master is primary from then on."""
    with (
        embedded_server(source, tmp_path / "server", entries_per_message=1000) as server,
        two_masters(server.master_target) as (first, second),
    ):
        async with below_kernel(cluster_behind(first, second), tmp_path / "state", **SETTINGS) as mount:
            first.limit(1_000_000)  # the listing has some 3 MB
            second.heal()
            came = await whole_or_error(mount)
            assert first.cut > 0, "the listing was not interrupted"
            assert not came, "half a listing can't be whole"
            first.down()
            await whole_in_the_end(mount)
            assert second.connections > 0


@pytest.mark.parametrize("fault", ["drop_connection", "UNAVAILABLE"])
async def test_listing_cut_by_its_master_is_whole_or_an_error(source: Path, tmp_path: Path, fault: str) -> None:
    """Cut between two messages, by a status and with the connection; what came before is not taken for all."""
    plan = FaultPlan()
    with embedded_server(source, tmp_path / "server", entries_per_message=1000, faults=plan) as server:
        cluster = ClusterConfig(name="test", masters=(server.master_target,))
        async with below_kernel(cluster, tmp_path / "state", **SETTINGS) as mount:
            rule = (
                plan.on("ListStatus", nth=1).drop_connection(messages=7)
                if fault == "drop_connection"
                else plan.on("ListStatus", nth=1).cut_after(messages=7, code=fault)
            )
            assert not await whole_or_error(mount)
            assert rule.injected == 1
            await whole_in_the_end(mount)


async def test_all_masters_restart_during_a_listing_it_is_whole_or_an_error(tmp_path: Path) -> None:
    """The server ends for real while it sends 100,000 entries, and comes back with its ids."""
    (tmp_path / "many").mkdir()
    source = filled(tmp_path / "many", MANY_ENTRIES)
    with FaultyProxy("127.0.0.1:9") as proxy:
        plan = FaultPlan()
        held = plan.on("ListStatus", nth=1).stall(messages=20)
        with embedded_server(source, tmp_path / "server", entries_per_message=1000, faults=plan) as server:
            proxy.lead_to(server.master_target)
            async with below_kernel(cluster_behind(proxy), tmp_path / "state", **SETTINGS) as mount:
                came: list[bool] = []

                async def list_once() -> None:
                    came.append(await whole_or_error(mount, MANY_ENTRIES))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(list_once)
                    await until(lambda: held.injected == 1, 20, "the listing is under way")
                    await trio.to_thread.run_sync(server.stop)
                assert came == [False]
                with embedded_server(source, tmp_path / "server", entries_per_message=1000) as again:
                    proxy.lead_to(again.master_target)
                    await whole_in_the_end(mount, MANY_ENTRIES)
