"""Who leads, by one Lease: taken, renewed, lost, taken over, given back."""

from __future__ import annotations

import calendar
import time
from typing import Any

from fusecache.controller.election import Election

NOW = "2026-01-01T00:00:00.000000Z"


def candidate(name: str) -> Election:
    return Election("fusecache", "fusecache-controller", name, 15.0)


def taken(election: Election, lease: dict[str, Any] | None, now_s: float) -> dict[str, Any] | None:
    """What is written, as if the API server took it at once."""
    wanted = election.next_lease(lease, now_s, f"at {now_s}")
    if wanted is not None:
        election.written(wanted, now_s)
    return wanted


def test_first_candidate_makes_the_lease_and_leads() -> None:
    first = candidate("a")
    assert not first.leads(0.0)
    lease = taken(first, None, 0.0)
    assert lease is not None
    assert lease["metadata"] == {"name": "fusecache-controller", "namespace": "fusecache"}
    assert lease["spec"]["holderIdentity"] == "a"
    assert lease["spec"]["leaseDurationSeconds"] == 15
    assert first.leads(0.0)
    assert first.transitions == 0


def test_holder_trusts_a_renewal_for_two_thirds_of_its_duration() -> None:
    first = candidate("a")
    lease = taken(first, None, 0.0)
    assert first.leads(9.9)
    assert not first.leads(10.0)
    assert taken(first, lease, 10.0) is not None
    assert first.leads(19.9)


def test_renewing_keeps_the_time_of_acquiring() -> None:
    first = candidate("a")
    lease = taken(first, None, 0.0)
    renewed = taken(first, lease, 3.0)
    assert renewed is not None
    assert (renewed["spec"]["acquireTime"], renewed["spec"]["renewTime"]) == ("at 0.0", "at 3.0")


def test_second_takes_over_only_after_the_first_was_silent_for_the_whole_duration() -> None:
    first, second = candidate("a"), candidate("b")
    lease = taken(first, None, 0.0)
    assert taken(second, lease, 1.0) is None
    assert taken(second, lease, 15.9) is None
    renewed = taken(first, lease, 15.95)
    assert taken(second, renewed, 16.0) is None  # a renewal starts the time anew
    assert taken(second, renewed, 30.9) is None
    assert not first.leads(30.9)  # long before anybody else may begin
    lease = taken(second, renewed, 31.0)
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1
    assert second.leads(31.0)
    assert taken(first, lease, 32.0) is None
    assert not first.leads(32.0)


def test_clocks_of_two_machines_need_not_agree() -> None:
    # renewTime is a text that changes or not; nobody computes with it.
    second = candidate("b")
    lease = {"metadata": {}, "spec": {"holderIdentity": "a", "renewTime": "2099-01-01T00:00:00Z"}}
    assert taken(second, lease, 1e6) is None
    assert taken(second, lease, 1e6 + 15.0) is not None


def test_given_back_lease_is_free_at_once_and_gates_nothing() -> None:
    first, second = candidate("a"), candidate("b")
    lease = taken(first, None, 0.0)
    assert lease is not None
    given_back = first.given_back(lease)
    assert given_back is not None
    assert not first.leads(0.0)
    assert given_back["spec"]["holderIdentity"] == ""
    renewed = time.strptime(given_back["spec"]["renewTime"], "%Y-%m-%dT%H:%M:%S.%fZ")
    assert calendar.timegm(renewed) == 0
    assert taken(second, given_back, 0.1) is not None


def test_lease_of_another_is_not_given_back() -> None:
    second = candidate("b")
    assert second.given_back({"metadata": {}, "spec": {"holderIdentity": "a"}}) is None
