"""Holding the Lease over HTTP: two candidates, a server that fails, giving back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusecache.controller.kube import KubeApi
from fusecache.controller.lease import LeaseHolder
from fusecache.metrics import Metrics
from tests.support import log_noise
from tests.support.clocks import LoopClock
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.rig import run

LEASE = "/apis/coordination.k8s.io/v1/namespaces/fusecache/leases/fusecache-controller"
KEY = "fusecache/fusecache-controller"
DURATION_S = 1.0
"""Renewals come five times a second; the clock by which they age is the test's."""


@pytest.fixture(autouse=True)
def busy_machine(expected_logs: log_noise.Declare) -> None:
    """A renewal has 0.2 s here; where the machine is busy one may fail, which changes nothing."""
    expected_logs("lease_not_renewed.*no answer within", optional=True)


@asynccontextmanager
async def connected(api: ApiDouble, folder: Path) -> AsyncIterator[KubeApi]:
    async with await KubeApi.connect(api.kubeconfig(folder), Metrics(show_unused=False)) as kube:
        yield kube


class Candidate:
    """One holder, running."""

    def __init__(self, kube: KubeApi, name: str, clock: LoopClock) -> None:
        self.told: list[bool] = []
        self.metrics = Metrics(show_unused=False)
        self.holder = LeaseHolder(
            kube, "fusecache", "fusecache-controller", name, DURATION_S, clock, self.metrics, self.told.append
        )

    async def until(self, leads: bool) -> None:
        async with asyncio.timeout(20):
            while not self.told or self.told[-1] is not leads:
                await asyncio.sleep(0.01)
        assert self.metrics.gauge("fusecache_controller_leader").value == (1 if leads else 0)


@asynccontextmanager
async def candidate(kube: KubeApi, name: str, clock: LoopClock) -> AsyncIterator[Candidate]:
    made = Candidate(kube, name, clock)
    task = asyncio.create_task(made.holder.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_only_one_of_two_leads(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        clock = LoopClock()  # it stands still, so nothing runs out
        async with (
            connected(api, tmp_path) as kube,
            candidate(kube, "a", clock) as first,
            candidate(kube, "b", clock) as second,
        ):
            async with asyncio.timeout(20):
                while not first.told and not second.told:
                    await asyncio.sleep(0.01)
            reads = api.calls.count(("GET", LEASE))
            await asyncio.to_thread(api.wait_for_calls, "GET", LEASE, reads + 6)
            assert sorted((first.told, second.told)) == [[], [True]]
            spec = api.get("leases", KEY)["spec"]
            assert spec["holderIdentity"] == ("a" if first.told else "b")
            assert spec["leaseTransitions"] == 0

    run(story)


def test_given_back_lease_is_taken_over_at_once(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        clock = LoopClock()
        async with connected(api, tmp_path) as kube:
            async with candidate(kube, "first", clock) as first:
                await first.until(True)
            await first.holder.give_back()
            await first.until(False)
            assert api.get("leases", KEY)["spec"]["renewTime"].startswith("1970-01-01T00:00:00")
            async with candidate(kube, "second", clock) as second:
                await second.until(True)
                assert api.get("leases", KEY)["spec"]["holderIdentity"] == "second"
                assert second.holder.epoch == 1
                assert first.told == [True, False]

    run(story)


def test_holder_that_can_not_renew_stops_leading_and_comes_back(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("lease_not_renewed.*503")

    async def story() -> None:
        clock = LoopClock()
        async with connected(api, tmp_path) as kube, candidate(kube, "only", clock) as only:
            await only.until(True)
            api.refuse("GET", LEASE, 503, 1000)
            left = api.refusals_left()
            while api.refusals_left() > left - 2:
                await asyncio.sleep(0.01)
            assert only.holder.leads()  # a failed renewal or two is no reason
            clock.time_s += DURATION_S * 2 / 3 + 0.01
            assert not only.holder.leads()  # at once, without waiting for the loop
            await only.until(False)
            api.allow_all()
            await only.until(True)

    run(story)


def test_lease_of_a_dead_holder_runs_out_by_the_own_clock(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        clock = LoopClock()
        api.create(
            "leases",
            {
                "metadata": {"name": "fusecache-controller", "namespace": "fusecache"},
                "spec": {"holderIdentity": "dead", "leaseDurationSeconds": 15, "renewTime": "2099-01-01T00:00:00Z"},
            },
        )
        async with connected(api, tmp_path) as kube, candidate(kube, "new", clock) as new:
            await asyncio.to_thread(api.wait_for_calls, "GET", LEASE, 2)
            clock.time_s += 14.9
            reads = api.calls.count(("GET", LEASE))
            await asyncio.to_thread(api.wait_for_calls, "GET", LEASE, reads + 2)
            assert new.told == []
            clock.time_s += 0.1
            await new.until(True)
            assert api.get("leases", KEY)["spec"]["holderIdentity"] == "new"

    run(story)
