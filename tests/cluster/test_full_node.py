"""The node with the data is full: the pod goes elsewhere, and why is written on it."""

from __future__ import annotations

import pytest

from tests.cluster import node
from tests.cluster.installation import training_pod
from tests.cluster.simulated_nodes import GPUS
from tests.cluster.stories import Stories

pytestmark = pytest.mark.timeout(600)


def gpus(count: int) -> dict[str, object]:
    """Resources of a container that wants GPUs."""
    return {"limits": {"nvidia.com/gpu": str(count)}}


def test_a_full_node_is_refused_with_the_reason(stories: Stories) -> None:
    stories.make_warm("set-2", node.NAME)
    hog = training_pod("hog", "set-2", ["sleep", "infinity"])
    hog["metadata"]["labels"] = {}
    hog["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.NAME}
    hog["spec"]["containers"][0]["resources"] = gpus(GPUS)
    stories.create(hog)
    # The fault happened: the node has no GPU left.
    assert stories.wait_bound("hog") == node.NAME

    late = training_pod("late", "set-2", ["true"])
    late["spec"]["containers"][0]["resources"] = gpus(1)
    stories.create(late)
    bound = stories.wait_bound("late")
    assert bound != node.NAME
    decision = stories.decision(stories.read("late"))
    refused = {one["node"]: one["because"] for one in decision["refused"]}
    assert "nvidia.com/gpu" in refused[node.NAME]
    for name in ("late", "hog"):
        stories.delete(name)
