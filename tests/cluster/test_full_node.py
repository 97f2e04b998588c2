"""The node with the data is full: the pod goes to the next best or to the scheduler's choice, and why is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import node
from tests.cluster.api import Object
from tests.cluster.installation import REPORT_INTERVAL_S, training_pod
from tests.cluster.simulated_nodes import GPUS
from tests.cluster.stories import Stories
from tests.support.simulated_reporter import SimulatedNodes

pytestmark = pytest.mark.timeout(600)

NEXT_BEST = "simulated-007"


def with_gpus(pod: Object, count: int) -> Object:
    """The pod, asking for GPUs."""
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(count)}}
    return pod


@pytest.fixture
def full(stories: Stories) -> Iterator[Stories]:
    """The real node holds set-2 and has no GPU left."""
    stories.make_warm("set-2", node.NAME)
    hog = with_gpus(training_pod("hog", "set-2", ["sleep", "infinity"]), GPUS)
    hog["metadata"]["labels"] = {}
    hog["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.NAME}
    stories.create(hog)
    # The fault happened: the scheduler has given all of them away.
    assert stories.wait_bound("hog") == node.NAME
    yield stories
    stories.delete("hog")


def refusal(stories: Stories, pod: Object) -> str:
    """Why the real node was refused, as written on the pod."""
    refused = {one["node"]: one["because"] for one in stories.decision(pod)["refused"]}
    return str(refused[node.NAME])


def test_the_scheduler_chooses_when_nobody_else_has_the_data(full: Stories) -> None:
    full.create(with_gpus(training_pod("late", "set-2", ["true"]), 1))
    assert full.wait_bound("late") != node.NAME
    late = full.read("late")
    assert full.decision(late)["state"] == "released"
    assert "nvidia.com/gpu" in refusal(full, late)
    full.delete("late")


def test_the_next_best_node_is_taken_when_it_has_some(full: Stories) -> None:
    address = full.installation.controller_address
    with SimulatedNodes(address, [NEXT_BEST], interval_s=REPORT_INTERVAL_S) as reporters:
        reporters.set_bytes(NEXT_BEST, "set-2", 100, total_bytes=150_006)
        full.wait_held("set-2", NEXT_BEST, 100)
        full.create(with_gpus(training_pod("second", "set-2", ["true"]), 1))
        assert full.wait_bound("second") == NEXT_BEST
    second = full.read("second")
    assert (full.decision(second)["state"], full.decision(second)["node"]) == ("placed", NEXT_BEST)
    assert "nvidia.com/gpu" in refusal(full, second)
    full.delete("second")
