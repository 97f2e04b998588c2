"""Without a controller pods start as if it had never been there."""

from __future__ import annotations

import pytest

from tests.cluster.installation import training_pod
from tests.cluster.stories import DECISION, Stories, gates

pytestmark = pytest.mark.timeout(600)


def test_pods_start_ungated_and_unplaced(stories: Stories) -> None:
    stories.scale_controller(0)
    try:
        # The fault happened: nobody is there and nobody holds the Lease, or its time is over.
        assert stories.controller_pods() == []
        stories.wait(lambda: not stories.lease_is_fresh(), "nobody holds a fresh Lease")

        created = stories.create(training_pod("alone", "imagenet", ["true"]))
        assert gates(created) == []
        assert stories.wait_bound("alone")
        assert DECISION not in stories.read("alone")["metadata"]["annotations"]
        stories.delete("alone")
    finally:
        stories.scale_controller(1)

    again = stories.wait(lambda: stories.gated_at_creation("guarded"), "new pods are gated again")
    assert gates(again) == ["fusecache.io/locality"]


def test_pods_that_were_waiting_when_it_was_killed_are_released_by_the_next_one(stories: Stories) -> None:
    held = training_pod("orphan", "imagenet", ["true"])
    # Other gates hold it too, so that the controller surely did not release it before its death.
    held["spec"]["schedulingGates"] = [{"name": "example.com/not-yet"}]
    stories.create(held)
    before = stories.lease()["holderIdentity"]
    killed = stories.kill("python /opt/fusecache/bin/fusecache controller")
    stories.wait(lambda: killed not in stories.world.box.processes(), "the controller's process is gone")
    gated = stories.read("orphan")
    assert "fusecache.io/locality" in gates(gated)

    stories.wait(
        lambda: stories.lease_is_fresh() and stories.lease()["holderIdentity"] != before, "another instance leads"
    )
    stories.remove_gate("orphan", "example.com/not-yet")
    assert stories.wait_bound("orphan")
    assert stories.decision(stories.read("orphan"))["state"] in ("placed", "released")
    stories.delete("orphan")
