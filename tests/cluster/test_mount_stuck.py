"""The mount of a node hangs: nobody touches it, it stops counting, and the kubelet's probe brings another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import node
from tests.cluster.api import JSON_PATCH
from tests.cluster.installation import MOUNT, MOUNTS
from tests.cluster.stories import DAEMON_SET, Stories
from tests.support.process_tree import signal_all

pytestmark = pytest.mark.timeout(600)

THRESHOLD = "/spec/template/spec/containers/0/livenessProbe/failureThreshold"


@contextmanager
def quick_to_judge(stories: Stories) -> Iterator[None]:
    """A new pod of the node whose liveness probe fails twice instead of six times; the next one is as before."""
    before = stories.api.get(DAEMON_SET)["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]
    stories.roll([{"op": "replace", "path": THRESHOLD, "value": 2}], JSON_PATCH)
    try:
        yield
    finally:
        stories.roll([{"op": "replace", "path": THRESHOLD, "value": before["failureThreshold"]}], JSON_PATCH)


def mount_process(stories: Stories) -> int:
    (pid,) = (pid for pid, line in stories.world.box.processes().items() if "fusecache: supervisor" in line)
    return pid


def test_a_mount_that_hangs_is_not_counted_and_is_replaced(stories: Stories) -> None:
    with quick_to_judge(stories):
        size_bytes = stories.make_warm("set-1", node.NAME)
        stuck = mount_process(stories)
        signal_all(stuck, signal.SIGSTOP)  # the supervisor and all parts
        stories.wait(lambda: "State:\tT" in Path(f"/proc/{stuck}/status").read_text(), "the process is stopped")

        stories.wait(lambda: stories.held_bytes("set-1", node.NAME) == 0, "the node counts for nothing")
        assert stories.is_mounted()
        assert stories.node_restarts() == 0  # it still hung when it no longer counted
        stories.wait(lambda: not stories.node_is_ready(), "the node's pod is not ready")

        stories.wait(lambda: stories.node_restarts() == 1, "its container was started again")
        stories.wait(stories.node_is_ready, "the node's pod is ready again")
        assert mount_process(stories) != stuck
        lines = stories.world.box.run("cat", "/proc/self/mountinfo").stdout.splitlines()
        assert [line.split()[4] for line in lines].count(f"{MOUNTS}/{MOUNT}") == 1  # not on top of the one that hung
        stories.wait_held("set-1", node.NAME, size_bytes)
