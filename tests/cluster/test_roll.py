"""The node's DaemonSet is rolled, and processes of its mount are killed, while a pod reads: no read fails."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.cluster import node
from tests.cluster.installation import MOUNT, training_pod
from tests.cluster.stories import Stories, sums_of

pytestmark = pytest.mark.timeout(900)

ROLLS = int(os.environ.get("TEST_CLUSTER_ROLLS", "3"))
"""More of them, for a longer look: TEST_CLUSTER_ROLLS=10 make test-cluster."""

FOLDER = f"/mnt/fusecache/{MOUNT}/imagenet"

READS_ON = """
cd FOLDER || exit 1
passes=0
while [ ! -e /tmp/stop ]; do
    for file in *.bin; do
        # nocache: the pages are given back, so that the next pass asks the mount again.
        sum=$(dd if="$file" bs=1M iflag=nocache status=none | sha256sum) || exit 2
        echo "${sum%-}./$file"
    done > /tmp/sums || exit 3
    cmp /tmp/sums /tmp/first || { echo "pass $passes: other bytes"; exit 4; }
    passes=$((passes + 1))
    echo $passes > /tmp/passes
done
echo "$passes passes without an error"
"""
KILLED = ("fusecache: worker 0 ", "fusecache: gate ", "fusecache: agent ")


def test_a_node_is_rolled_and_its_processes_die_under_a_reading_pod(stories: Stories) -> None:
    sums = sums_of(stories.installation.served / "imagenet")
    stories.make_warm("imagenet", node.NAME)
    first = f"printf %s {shlex.quote(sums)} > /tmp/first;" + READS_ON.replace("FOLDER", FOLDER)
    stories.create(training_pod("reading", "imagenet", ["sh", "-c", first]))
    assert stories.wait_bound("reading") == node.NAME
    stories.wait_phase("reading", "Running")

    def passes() -> int:
        assert stories.read("reading")["status"]["phase"] == "Running", stories.log("reading")
        return int(stories.run_in("reading", ["sh", "-c", "cat /tmp/passes 2>/dev/null || echo 0"]) or 0)

    def wait_for_another_pass() -> None:
        before = passes()
        stories.wait(lambda: passes() >= before + 2, "the pod reads on")

    wait_for_another_pass()
    restarts = stories.node_restarts()
    names = {pod["metadata"]["name"] for pod in stories.node_pods()}
    for number in range(ROLLS):
        stamp = {"metadata": {"annotations": {"rolled": str(number)}}}
        names.add(stories.roll({"spec": {"template": stamp}}))
        wait_for_another_pass()
    assert len(names) == ROLLS + 1, "each roll made a new pod"
    assert stories.node_restarts() == restarts == 0
    for part in KILLED:
        killed = stories.kill(part)
        stories.wait(
            lambda part=part, killed=killed: any(
                part in line and pid != killed for pid, line in stories.world.box.processes().items()
            ),
            f"another {part}runs",
        )
        wait_for_another_pass()
    assert stories.node_restarts() == 0

    stories.run_in("reading", ["touch", "/tmp/stop"])
    stories.wait_phase("reading", "Succeeded")
    assert "passes without an error" in stories.log("reading")
    stories.delete("reading")
