"""The mount of a node dies: the node stops counting at once, comes back by itself, and pods read again."""

from __future__ import annotations

import pytest

from tests.cluster import node
from tests.cluster.installation import MOUNT, MOUNTS, training_pod
from tests.cluster.stories import Stories, reads_all, sums_of

pytestmark = pytest.mark.timeout(600)

IN_POD = f"/mnt/fusecache/{MOUNT}/set-1"


def kill_mount(stories: Stories) -> None:
    """SIGKILL the mount's supervisor, which takes all parts with it; afterwards it is surely dead."""
    killed = stories.kill("fusecache: supervisor")
    stories.wait(lambda: killed not in stories.world.box.processes(), "the mount's process is gone")


def test_a_killed_mount_is_noticed_and_comes_back(stories: Stories) -> None:
    sums = sums_of(stories.installation.served / "set-1")
    size_bytes = stories.make_warm("set-1", node.NAME)
    # A pod that has the volume before, during and after.
    stories.create(training_pod("witness", "set-1", ["sleep", "infinity"]))
    assert stories.wait_bound("witness") == node.NAME
    stories.wait_phase("witness", "Running")
    assert stories.run_in("witness", reads_all(IN_POD)) == sums

    restarts = stories.node_restarts()
    kill_mount(stories)
    stories.wait(lambda: stories.node_restarts() == restarts + 1, "the node's container was started again")
    stories.wait(stories.is_mounted, "the data is mounted again")
    stories.wait(stories.node_is_ready, "the node's pod is ready again")

    # A second death makes the kubelet wait before it starts the container once more: time to look.
    kill_mount(stories)
    assert stories.world.box.run("stat", f"{MOUNTS}/{MOUNT}/set-1", check=False).returncode != 0
    stories.wait(lambda: stories.held_bytes("set-1", node.NAME) == 0, "the node counts for nothing")
    stories.create(training_pod("elsewhere", "set-1", ["true"]))
    decision = stories.wait(lambda: stories.written(stories.read("elsewhere")), "the controller has decided")
    assert (decision["state"], decision["node"]) == ("released", "")
    assert stories.node_restarts() == restarts + 1  # still the time of the fault
    stories.delete("elsewhere")

    stories.wait(lambda: stories.node_restarts() == restarts + 2, "the node's container was started once more")
    stories.wait_held("set-1", node.NAME, size_bytes)
    assert stories.run_in("witness", reads_all(IN_POD)) == sums
    stories.delete("witness")
