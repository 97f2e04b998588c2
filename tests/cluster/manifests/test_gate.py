"""The gate: on pods that ask for it in namespaces that opted in, while the controller's Lease is fresh."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cluster.api import pods
from tests.cluster.manifests.actions import DEPLOY, GATE, OTHER_GATE, apply, create_pod, gates_of, pod
from tests.cluster.world import World

ASKS = {"fusecache.io/co-schedule": "true"}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/fusecache/leases/fusecache-controller"
LONG_S = 3600


def set_lease(world: World, *, age_s: float, duration_s: int, holder: str = "somebody") -> None:
    """The controller's Lease as if it had been renewed `age_s` seconds ago."""
    renewed = (datetime.now(UTC) - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "fusecache-controller", "namespace": "fusecache"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration_s, "renewTime": renewed},
    }
    world.kubectl("apply", "--server-side", "-f", "-", given=json.dumps(lease))


def gates_of_a_new_pod(world: World, namespace: str = "training", **changes: Any) -> list[str]:
    """Scheduling gates of a pod that is created now and taken away again."""
    stored = world.api.create(pods(namespace), pod("new", **({"labels": ASKS} | changes)))
    world.api.delete(pods(namespace, stored["metadata"]["name"]), grace_period_s=0)
    return gates_of(stored)


def wait_gated(world: World, wanted: bool) -> None:
    """Until new pods are (not) gated: the API server learns of a changed Lease a moment later."""
    expected = [GATE] if wanted else []
    world.wait_until(lambda: gates_of_a_new_pod(world) == expected, f"new pods do not have the gates {expected}", 60)


@pytest.fixture
def fresh(world: World) -> None:
    """A Lease that is good for an hour, and known to be."""
    set_lease(world, age_s=0, duration_s=LONG_S)
    wait_gated(world, True)


NOT_FRESH: dict[str, Callable[[World], None]] = {
    "not renewed in time": lambda world: set_lease(world, age_s=16, duration_s=15),
    "given up": lambda world: set_lease(world, age_s=0, duration_s=LONG_S, holder=""),
    "from the future": lambda world: set_lease(world, age_s=-600, duration_s=LONG_S),
    "missing": lambda world: world.api.delete(LEASE),
}


@pytest.mark.parametrize("lease", NOT_FRESH)
@pytest.mark.usefixtures("fresh")
def test_no_gate_when_the_lease_is(world: World, lease: str) -> None:
    NOT_FRESH[lease](world)
    wait_gated(world, False)
    assert gates_of_a_new_pod(world) == []
    set_lease(world, age_s=0, duration_s=LONG_S)
    wait_gated(world, True)


def test_gate_ends_by_itself_when_the_lease_is_not_renewed(world: World) -> None:
    set_lease(world, age_s=0, duration_s=5)
    wait_gated(world, True)
    wait_gated(world, False)
    assert world.api.get(LEASE)["spec"]["holderIdentity"] == "somebody"


@pytest.mark.usefixtures("fresh")
def test_gate_is_for_pods_that_ask_and_have_no_node_in_namespaces_that_opted_in(world: World) -> None:
    assert gates_of_a_new_pod(world, labels={}) == []
    assert gates_of_a_new_pod(world, labels={"fusecache.io/co-schedule": "false"}) == []
    assert gates_of_a_new_pod(world, "opted-out") == []
    assert gates_of_a_new_pod(world, nodeName="simulated-000", nodeSelector={}) == []
    assert gates_of_a_new_pod(world, schedulingGates=[{"name": OTHER_GATE}]) == [OTHER_GATE, GATE]
    assert gates_of_a_new_pod(world, schedulingGates=[{"name": GATE}]) == [GATE]
    assert gates_of_a_new_pod(world) == [GATE]  # all the while


@pytest.mark.parametrize("example", ["training", "training-restricted"])
@pytest.mark.usefixtures("fresh")
def test_pods_of_the_example_jobs_are_gated(world: World, example: str) -> None:
    world.kubectl("delete", "job", "-n", example, "train", "--wait=true")
    apply(world, DEPLOY / "examples" / example)

    def gates() -> list[list[str]]:
        found = world.api.get(f"{pods(example)}?labelSelector=job-name%3Dtrain")["items"]
        # The pod of the Job before stays where it is bound: no kubelet ends it.
        return [gates_of(item) for item in found if "deletionTimestamp" not in item["metadata"]]

    world.wait_until(lambda: gates() == [[GATE]], f"the Job's pod in {example} is not gated", 60)


@pytest.mark.usefixtures("fresh")
def test_gated_pod_is_freed_by_the_command_of_the_readme(world: World) -> None:
    name = create_pod(world, pod("left", OTHER_GATE, labels=ASKS))
    (line,) = (
        line
        for line in (DEPLOY.parent / "README.md").read_text().splitlines()
        if line.startswith("kubectl ") and "schedulingGates" in line
    )
    assert gates_of(world.api.get(pods("training", name))) == [OTHER_GATE, GATE]
    world.kubectl(*shlex.split(line.replace("POD", name))[1:])
    assert gates_of(world.api.get(pods("training", name))) == [OTHER_GATE]
