"""A training pod goes to the node that has its data, and reads exactly that data."""

from __future__ import annotations

import pytest

from tests.cluster import node
from tests.cluster.installation import MOUNT, MOUNTS, training_pod
from tests.cluster.stories import DATASETS, GATE, Stories, gates, reads_all, sums_of

pytestmark = pytest.mark.timeout(600)


def test_a_gated_pod_is_released_to_the_node_with_the_data_and_reads_it(stories: Stories) -> None:
    source = stories.installation.served / "imagenet"
    files, size_bytes = DATASETS["imagenet"]
    # The node holds the data: somebody on it has read it.
    assert stories.read_on_node("imagenet") == sums_of(source)
    stories.wait_held("imagenet", node.NAME, files * size_bytes)

    created = stories.create(training_pod("reader", "imagenet", reads_all(f"/mnt/fusecache/{MOUNT}/imagenet")))
    assert gates(created) == [GATE]  # by the policy: the manifest has none
    assert stories.wait_bound("reader") == node.NAME
    stories.wait_phase("reader", "Succeeded")

    assert stories.log("reader") == sums_of(source)
    ended = stories.read("reader")
    assert gates(ended) == []
    decision = stories.decision(ended)
    assert (decision["state"], decision["node"], decision["bytes"]) == ("placed", node.NAME, files * size_bytes)
    stories.delete("reader")


def test_the_node_sets_the_read_ahead_of_its_mount(stories: Stories) -> None:
    # What a container may write below /sys is the manifest's doing.
    lines = stories.world.box.run("cat", "/proc/self/mountinfo").stdout.splitlines()
    device = next(line.split()[2] for line in lines if line.split()[4] == f"{MOUNTS}/{MOUNT}")
    assert stories.world.box.run("cat", f"/sys/class/bdi/{device}/read_ahead_kb").stdout.strip() == "1024"
