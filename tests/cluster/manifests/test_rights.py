"""What the accounts of deploy/ may do, as a real API server lists it and as it answers attempts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.cluster.api import JSON_PATCH, NODES, STRATEGIC_PATCH, Api, Refused, pods
from tests.cluster.manifests.actions import GATE, UNGATE, acting_as, create_pod, pod
from tests.cluster.world import World


class Right(NamedTuple):
    """One thing that one may do in a namespace, or to what lies in none."""

    group: str
    resource: str
    name: str
    """Empty: whatever its name."""
    verb: str


READS = {Right("", resource, "", verb) for resource in ("pods", "nodes") for verb in ("get", "list", "watch")}
PLACES = {Right("", "pods", "", "patch"), Right("", "pods/status", "", "patch"), Right("", "events", "", "create")}
LEASES = ("coordination.k8s.io", "leases")
LEASE = {Right(*LEASES, "fusecache-controller", "get"), Right(*LEASES, "fusecache-controller", "update")}
LEASE |= {Right(*LEASES, "", "create")}

RIGHTS = {
    ("controller", "fusecache"): READS | LEASE,
    ("controller", "training"): READS | PLACES,
    ("controller", "training-restricted"): READS | PLACES,
    ("controller", "opted-out"): READS,
    ("controller", "kube-system"): READS,
    ("node", "fusecache"): set(),
    ("node", "training"): set(),
}
"""(account, namespace) -> what it may do there and an account without any rights may not."""


def rights(world: World, account: str, namespace: str) -> set[Right]:
    """Everything a service account of namespace fusecache may do in a namespace."""
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    review = acting_as(world, account).create(path, {"spec": {"namespace": namespace}})
    return {
        Right(group, resource, name, verb)
        for rule in review["status"]["resourceRules"]
        for group in rule.get("apiGroups", ())
        for resource in rule.get("resources", ())
        for name in rule.get("resourceNames") or ("",)
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(("account", "namespace"), RIGHTS)
def test_account_may_do_exactly_this(world: World, account: str, namespace: str) -> None:
    of_everybody = rights(world, "default", namespace)
    assert Right("authentication.k8s.io", "selfsubjectreviews", "", "create") in of_everybody  # it is a whole list
    assert rights(world, account, namespace) - of_everybody == RIGHTS[account, namespace]


ATTEMPTS: dict[str, Callable[[Api, str], object]] = {
    "delete a pod": lambda api, name: api.delete(pods("training", name)),
    "evict a pod": lambda api, name: api.create(pods("training", name) + "/eviction", {"metadata": {"name": name}}),
    "create a pod": lambda api, name: api.create(pods("training"), pod("made")),
    "bind a pod": lambda api, name: api.create(
        pods("training", name) + "/binding", {"metadata": {"name": name}, "target": {"name": "simulated-000"}}
    ),
    "read secrets": lambda api, name: api.get("/api/v1/namespaces/training/secrets"),
    "read configuration": lambda api, name: api.get("/api/v1/namespaces/fusecache/configmaps"),
    "label a node": lambda api, name: api.patch(f"{NODES}/simulated-000", {"metadata": {"labels": {"a": "b"}}}),
    "opt a namespace in": lambda api, name: api.patch(
        "/api/v1/namespaces/opted-out", {"metadata": {"labels": {"a": "b"}}}
    ),
    "get another's token": lambda api, name: api.create(
        "/api/v1/namespaces/fusecache/serviceaccounts/node/token", {"spec": {}}
    ),
    "another Lease": lambda api, name: api.get("/apis/coordination.k8s.io/v1/namespaces/fusecache/leases/other"),
    "release a pod where nobody opted in": lambda api, name: api.patch(pods("opted-out", name), UNGATE, JSON_PATCH),
}


@pytest.mark.parametrize("what", ATTEMPTS)
def test_controller_is_refused(world: World, controller: Api, what: str) -> None:
    namespace = "opted-out" if "nobody opted in" in what else "training"
    name = create_pod(world, pod("waiting", GATE), namespace)
    with pytest.raises(Refused) as caught:
        ATTEMPTS[what](controller, name)
    assert caught.value.status == 403
    assert "RBAC" in caught.value.message or "cannot" in caught.value.message


def test_controller_reads_pods_of_every_namespace_and_keeps_its_lease(world: World, controller: Api) -> None:
    name = create_pod(world, pod("waiting", GATE), "opted-out")
    assert controller.get(pods("opted-out", name))["metadata"]["name"] == name
    assert name in [item["metadata"]["name"] for item in controller.get("/api/v1/pods")["items"]]
    assert controller.get(NODES)["items"]


GRANTED = "granted-by-mistake"
EPHEMERAL = {"spec": {"ephemeralContainers": [{"name": "intruder", "image": "evil"}]}}


@pytest.fixture
def too_many_rights(world: World) -> str:
    """A namespace in which somebody made the controller an administrator of everything."""
    world.api.create("/api/v1/namespaces", {"metadata": {"name": GRANTED}})
    binding = {
        "metadata": {"name": "mistake"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "controller", "namespace": "fusecache"}],
    }
    world.api.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{GRANTED}/rolebindings", binding)
    secrets = f"/api/v1/namespaces/{GRANTED}/secrets"
    world.wait_until(lambda: _may_read(acting_as(world, "controller"), secrets), "the binding is not in force")
    return GRANTED


def _may_read(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except Refused:
        return False
    return True


def test_fence_holds_for_pods_even_when_somebody_grants_more(
    world: World, controller: Api, too_many_rights: str
) -> None:
    name = create_pod(world, pod("there", GATE), too_many_rights)
    attempts: list[Callable[[], object]] = [
        lambda: controller.delete(pods(too_many_rights, name)),
        lambda: controller.create(pods(too_many_rights), pod("made")),
        lambda: controller.create(pods(too_many_rights, name) + "/eviction", {"metadata": {"name": name}}),
        lambda: controller.patch(pods(too_many_rights, name) + "/ephemeralcontainers", EPHEMERAL, STRATEGIC_PATCH),
    ]
    for attempt in attempts:
        with pytest.raises(Refused, match=r"fusecache-fence.*only patches pods and their status"):
            attempt()
    assert world.api.exists(pods(too_many_rights, name))
