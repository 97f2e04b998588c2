"""The mount of a node dies: the node stops counting at once, comes back by itself, and pods read again."""

from __future__ import annotations

import pytest

from tests.cluster import node
from tests.cluster.installation import MOUNT, MOUNTS, training_pod
from tests.cluster.stories import Stories, reads_all, sums_of

pytestmark = pytest.mark.timeout(600)


def test_a_killed_mount_is_noticed_and_comes_back(stories: Stories) -> None:
    size_bytes = stories.make_warm("set-1", node.NAME)
    # A pod that has the volume before, during and after.
    witness = training_pod("witness", "set-1", ["sleep", "infinity"])
    stories.create(witness)
    assert stories.wait_bound("witness") == node.NAME
    stories.wait_phase("witness", "Running")
    assert stories.run_in("witness", reads_all(f"/mnt/fusecache/{MOUNT}/set-1")) == sums_of(
        stories.installation.served / "set-1"
    )

    killed = stories.kill("fusecache.daemon.mount_child")
    # The fault happened: the process is gone, and the mount with it, or dead.
    stories.wait(lambda: killed not in stories.world.box.processes(), "the mount's process is gone")
    assert stories.world.box.run("stat", f"{MOUNTS}/{MOUNT}/set-1", check=False).returncode != 0

    stories.wait(lambda: stories.held_bytes("set-1", node.NAME) == 0, "the node counts for nothing")
    stories.create(training_pod("elsewhere", "set-1", ["true"]))
    decision = stories.wait(lambda: stories.written(stories.read("elsewhere")), "the controller has decided")
    assert decision["node"] != node.NAME
    stories.delete("elsewhere")

    stories.wait(stories.node_is_ready, "the node's pod is ready again")
    stories.wait_held("set-1", node.NAME, size_bytes)
    assert stories.run_in("witness", reads_all(f"/mnt/fusecache/{MOUNT}/set-1")) == sums_of(
        stories.installation.served / "set-1"
    )
    stories.delete("witness")
