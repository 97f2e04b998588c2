"""The cluster the stories run on is a real one: pods run, know who they are, and reach Services."""

from __future__ import annotations

import pytest

from tests.cluster import node
from tests.cluster.api import pods
from tests.cluster.world import World

pytestmark = pytest.mark.timeout(600)


def test_a_pod_runs_on_the_real_node(world: World) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "first"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node.NAME},
            "containers": [{"name": "c", "image": node.PAUSE_IMAGE, "imagePullPolicy": "Never"}],
        },
    }
    world.api.create(pods("default"), manifest)

    def running() -> bool:
        return bool(world.api.get(pods("default", "first"))["status"]["phase"] == "Running")

    world.wait_until(running, "the pod does not run")
    assert world.api.get(pods("default", "first"))["spec"]["nodeName"] == node.NAME
    assert any(line.endswith("/pause") for line in world.box.processes().values())
    world.api.delete(pods("default", "first"), grace_period_s=0)
