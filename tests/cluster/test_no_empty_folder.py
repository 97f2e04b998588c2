"""A training pod never sees an empty folder where its data should be: it waits, or it is not placed there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster import node
from tests.cluster.installation import MOUNT, MOUNTS, training_pod
from tests.cluster.stories import DAEMON_SET, Stories, gates, reads_all, sums_of

pytestmark = pytest.mark.timeout(600)

NOWHERE = {"fusecache.io/no-such-node": "true"}


@contextmanager
def without_mount(stories: Stories) -> Iterator[None]:
    """The DaemonSet stays away from every node; afterwards its mount is back."""
    stories.api.patch(DAEMON_SET, {"spec": {"template": {"spec": {"nodeSelector": NOWHERE}}}})
    try:
        stories.wait(lambda: not stories.is_mounted(), "nothing is mounted on the node")
        yield
    finally:
        removed = dict.fromkeys(NOWHERE)
        stories.api.patch(DAEMON_SET, {"spec": {"template": {"spec": {"nodeSelector": removed}}}})
        stories.wait(stories.node_is_ready, "the node's pod is ready")
        stories.wait(stories.is_mounted, "the data is mounted on the node")


def test_a_pod_that_is_early_waits_for_the_mount(stories: Stories) -> None:
    # Without the label nobody looks after it: it names the node itself, as a pod from before would.
    early = training_pod("early", "imagenet", reads_all(f"/mnt/fusecache/{MOUNT}/imagenet"))
    early["metadata"]["labels"] = {}
    early["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.NAME}
    with without_mount(stories):
        # The fault happened: the folder is there and empty.
        assert stories.world.box.run("ls", "-A", f"{MOUNTS}/{MOUNT}").stdout == ""
        stories.create(early)
        stories.wait(lambda: stories.container_runs("early", "wait-for-data"), "the init container runs")
        waiting = stories.read("early")
        assert waiting["spec"]["nodeName"] == node.NAME
        assert "running" not in waiting["status"]["containerStatuses"][0]["state"]
    stories.wait_phase("early", "Succeeded")
    assert stories.log("early") == sums_of(stories.installation.served / "imagenet")
    stories.delete("early")


def test_a_pod_that_requires_the_data_is_held_until_it_is_mounted(stories: Stories) -> None:
    stories.make_warm("set-0", node.NAME)
    held = training_pod("held", "set-0", reads_all(f"/mnt/fusecache/{MOUNT}/set-0"))
    held["metadata"]["annotations"] |= {"fusecache.io/placement": "require", "fusecache.io/max-wait": "10m"}
    with without_mount(stories):
        stories.wait(lambda: stories.held_bytes("set-0", node.NAME) == 0, "the node counts for nothing")
        stories.create(held)
        reason = stories.wait(lambda: stories.written(stories.read("held")), "the controller has said why it waits")
        assert reason["state"] == "waiting"
        assert gates(stories.read("held")) == ["fusecache.io/locality"]
    stories.wait_phase("held", "Succeeded")
    assert stories.read("held")["spec"]["nodeName"] == node.NAME
    assert stories.log("held") == sums_of(stories.installation.served / "set-0")
    stories.delete("held")
