"""A control plane with everything of deploy/ in it and nobody to act on it: no controller answers, no pod ever runs.

So the Lease can be moved about, and what happens to a pod is the API server's doing alone. It lives for this folder's
tests only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.api import NODES, Api, Refused
from tests.cluster.manifests.actions import KUSTOMIZATIONS, acting_as, apply, patch_pod, waiting_pod
from tests.cluster.world import World


@pytest.fixture(scope="package")
def world(wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The cluster; `opted-out` is a namespace that did not opt in."""
    folder = Path(tmp_path_factory.getbasetemp().parent) / f"manifests-{os.getpid()}"
    with World(folder, real_node=False, simulated=1) as running:
        # As a kubelet labels its node; the DaemonSet selects on it.
        running.api.patch(f"{NODES}/simulated-000", {"metadata": {"labels": {"kubernetes.io/os": "linux"}}})
        for kustomization in KUSTOMIZATIONS:
            apply(running, kustomization)
        running.api.create("/api/v1/namespaces", {"metadata": {"name": "opted-out"}})
        yield running


@pytest.fixture(scope="package")
def controller(world: World) -> Api:
    """The API with a token of the controller's account, once its role and the fence are in force."""
    api = acting_as(world, "controller")
    name = waiting_pod(world)

    def fenced() -> bool:
        try:
            patch_pod(api, name, {"metadata": {"labels": {"a": "b"}}})
        except Refused as refusal:
            return "fusecache-fence" in refusal.message
        patch_pod(world.api, name, {"metadata": {"labels": {"a": None}}})
        return False

    world.wait_until(fenced, "the fence refuses nothing", 60)
    return api
