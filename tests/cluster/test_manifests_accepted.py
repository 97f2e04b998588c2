"""What a real API server makes of deploy/: every object, everybody's rights, and what the two policies let through.

A cluster of its own without a real node: the Lease is moved about here, and no controller may answer. Requests "as the
controller" carry a token of its service account.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from kubernetes import client

from tests.cluster.world import World

pytestmark = pytest.mark.timeout(600)

DEPLOY = Path(__file__).parents[2] / "deploy"
GATE = "fusecache.io/locality"
LABELED = {"fusecache.io/co-schedule": "true"}

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"

Object = dict[str, Any]


@pytest.fixture(scope="module")
def world(wanted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A control plane with one simulated node and everything of deploy/ in it."""
    folder = Path(tmp_path_factory.getbasetemp().parent) / f"manifests-{os.getpid()}"
    with World(folder, real_node=False, simulated=1) as running:
        for kustomization in KUSTOMIZATIONS:
            apply(running, kustomization)
        running.core.create_namespace({"metadata": {"name": "opted-out"}})
        yield running


KUSTOMIZATIONS = (DEPLOY / "base", DEPLOY / "examples/training", DEPLOY / "examples/training-restricted")


def apply(world: World, kustomization: Path) -> str:
    """As a user does, with every unknown field and every warning an error."""
    arguments = ("--server-side", "--validate=strict", "--warnings-as-errors", "-k", str(kustomization))
    return world.kubectl("apply", *arguments)


# --- every object ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_every_object_is_there_and_applying_again_changes_nothing(world: World, kustomization: Path) -> None:
    objects = list(yaml.safe_load_all(world.kubectl("kustomize", str(kustomization))))
    there = json.loads(world.kubectl("get", "-k", str(kustomization), "-o", "json"))["items"]
    assert sorted((o["kind"], o["metadata"]["name"]) for o in there) == sorted(
        (o["kind"], o["metadata"]["name"]) for o in objects
    )
    versions = {o["metadata"]["uid"]: o["metadata"].get("generation") for o in there}
    apply(world, kustomization)
    again = json.loads(world.kubectl("get", "-k", str(kustomization), "-o", "json"))["items"]
    assert {o["metadata"]["uid"]: o["metadata"].get("generation") for o in again} == versions


def test_the_overlay_of_the_tests_and_the_network_policy_are_taken_too(world: World, tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [os.path.relpath(DEPLOY / "overlays/test", tmp_path)],
                "components": [os.path.relpath(DEPLOY / "components/network-policy", tmp_path)],
            }
        )
    )
    said = world.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-k", tmp_path
    )
    assert "networkpolicy.networking.k8s.io/fusecache-controller serverside-applied (server dry run)" in said
    assert "daemonset.apps/fusecache-node serverside-applied (server dry run)" in said


@pytest.mark.parametrize(
    ("namespace", "selector", "count"),
    [
        ("fusecache", "app.kubernetes.io/name=fusecache-node", 1),
        ("fusecache", "app.kubernetes.io/name=fusecache-controller", 1),
        ("training", "job-name=train", 1),
        ("training-restricted", "job-name=train", 1),
    ],
)
def test_the_pods_of_every_workload_pass_admission(world: World, namespace: str, selector: str, count: int) -> None:
    """Pod Security refuses pods, not the objects that make them."""

    def made() -> bool:
        return len(world.core.list_namespaced_pod(namespace, label_selector=selector).items) == count

    world.wait_until(made, f"no pod {selector} in {namespace}", 60)


def test_the_claim_of_the_restricted_example_is_bound_to_its_volume(world: World) -> None:
    def bound() -> bool:
        claim = world.core.read_namespaced_persistent_volume_claim("fusecache", "training-restricted")
        return claim.status.phase == "Bound"

    world.wait_until(bound, "the claim is not bound", 60)


def test_the_fence_has_no_expression_that_the_api_server_doubts(world: World) -> None:
    policies = client.AdmissionregistrationV1Api(world.api)

    def checked() -> bool:
        return policies.read_validating_admission_policy("fusecache-fence").status.type_checking is not None

    world.wait_until(checked, "the fence was not type-checked", 60)
    assert not policies.read_validating_admission_policy("fusecache-fence").status.type_checking.expression_warnings


# --- rights ------------------------------------------------------------------------------------------------------


class Right(NamedTuple):
    """One thing that one may do in a namespace, or to what lies in none."""

    group: str
    resource: str
    name: str
    """Empty: whatever its name."""
    verb: str


READS = {Right("", resource, "", verb) for resource in ("pods", "nodes") for verb in ("get", "list", "watch")}
PLACES = {
    Right("", "pods", "", "patch"),
    Right("", "pods/status", "", "patch"),
    Right("", "events", "", "create"),
}
LEASE = {Right("coordination.k8s.io", "leases", "fusecache-controller", verb) for verb in ("get", "update")} | {
    Right("coordination.k8s.io", "leases", "", "create")
}

RIGHTS = {
    ("controller", "fusecache"): READS | LEASE,
    ("controller", "training"): READS | PLACES,
    ("controller", "training-restricted"): READS | PLACES,
    ("controller", "opted-out"): READS,
    ("controller", "kube-system"): READS,
    ("node", "fusecache"): set(),
    ("node", "training"): set(),
}


@contextmanager
def acting_as(world: World, account: str) -> Iterator[client.ApiClient]:
    """The API with a token of a service account of namespace fusecache."""
    made = world.core.create_namespaced_service_account_token(account, "fusecache", {"spec": {}})
    ours = world.api.configuration
    settings = client.Configuration()
    settings.host, settings.ssl_ca_cert = ours.host, ours.ssl_ca_cert
    settings.api_key = {"authorization": f"Bearer {made.status.token}"}
    with client.ApiClient(settings) as api:
        yield api


def rights(world: World, account: str, namespace: str) -> set[Right]:
    """Everything a service account of namespace fusecache may do in a namespace, as the API server itself lists it."""
    with acting_as(world, account) as api:
        review = client.AuthorizationV1Api(api).create_self_subject_rules_review({"spec": {"namespace": namespace}})
    return {
        Right(group, resource, name, verb)
        for rule in review.status.resource_rules
        for group in rule.api_groups or ()
        for resource in rule.resources or ()
        for name in rule.resource_names or ("",)
        for verb in rule.verbs
    }


@pytest.mark.parametrize(("account", "namespace"), RIGHTS, ids=lambda name: name)
def test_account_may_do_exactly_this_more_than_an_account_without_rights(
    world: World, account: str, namespace: str
) -> None:
    of_everybody = rights(world, "default", namespace)
    assert (
        Right("authentication.k8s.io", "selfsubjectreviews", "", "create") in of_everybody
    )  # the list is no empty one
    assert rights(world, account, namespace) - of_everybody == RIGHTS[account, namespace]


def test_controller_is_refused_what_others_would_be_hurt_by(world: World, as_controller: client.CoreV1Api) -> None:
    name = waiting(world)
    forbidden: list[Callable[[], object]] = [
        lambda: as_controller.delete_namespaced_pod(name, "training"),
        lambda: as_controller.create_namespaced_pod("training", pod("made")),
        lambda: as_controller.create_namespaced_pod_binding(name, "training", {"target": {"name": "simulated-000"}}),
        lambda: as_controller.create_namespaced_pod_eviction(name, "training", {"metadata": {"name": name}}),
        lambda: as_controller.list_namespaced_secret("training"),
        lambda: as_controller.list_namespaced_config_map("training"),
        lambda: as_controller.patch_node("simulated-000", {"metadata": {"labels": {"a": "b"}}}),
        lambda: as_controller.patch_node_status("simulated-000", {"status": {"capacity": {"cpu": "1"}}}),
        lambda: as_controller.create_namespaced_service_account_token("node", "fusecache", {"spec": {}}),
        lambda: as_controller.patch_namespace("opted-out", {"metadata": {"labels": {"fusecache.io/enabled": "true"}}}),
    ]
    for attempt in forbidden:
        with pytest.raises(client.ApiException) as caught:
            attempt()
        assert caught.value.status == 403


# --- the fence ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def as_controller(world: World) -> Iterator[client.CoreV1Api]:
    """The API with a token of the controller's account."""
    with acting_as(world, "controller") as api:
        yield client.CoreV1Api(api)


def pod(name: str, *gates: str, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """A pod that runs nowhere: no simulated node takes it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": f"{name}-", "labels": labels or {}, "annotations": {"fusecache.io/datasets": "a"}},
        "spec": {
            "containers": [{"name": "c", "image": "nothing"}],
            "initContainers": [{"name": "i", "image": "nothing"}],
            "nodeSelector": {"no-such": "node"},
            "schedulingGates": [{"name": gate} for gate in gates],
            **spec,
        },
    }


def patch(api: client.CoreV1Api, name: str, body: Any, kind: str = MERGE, *, status: bool = False) -> str:
    """Patch a pod of `training`; empty when it was taken, else why not."""
    method = api.patch_namespaced_pod_status if status else api.patch_namespaced_pod
    try:
        method(name, "training", body, _content_type=kind)
    except client.ApiException as failure:
        return str(json.loads(failure.body)["message"])
    return ""


def required(*nodes: str) -> Object:
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]} for node in nodes]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


PREFERRED = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
    {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}]}}  # fmt: skip
APART = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
    {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}]}}  # fmt: skip
UNGATE = [
    {"op": "test", "path": "/spec/schedulingGates/0/name", "value": GATE},
    {"op": "remove", "path": "/spec/schedulingGates/0"},
]
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "a", "uid": "0e1b7a5c-0000-4000-8000-000000000000"}


class Refused(NamedTuple):
    """A patch that an administrator may make and the controller may not."""

    what: str
    body: Any
    kind: str = MERGE
    status: bool = False


REFUSED = [
    Refused("image", [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}], JSON),
    Refused("init image", [{"op": "replace", "path": "/spec/initContainers/0/image", "value": "evil"}], JSON),
    Refused(
        "image with the ungating",
        [{"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}, *UNGATE],
        JSON,
    ),
    Refused("label", {"metadata": {"labels": {"app": "service"}}}),
    Refused("foreign annotation", {"metadata": {"annotations": {"other.io/a": "b"}}}),
    Refused("foreign annotation away", {"metadata": {"annotations": {"other.io/there": None}}}),
    Refused("data sets", {"metadata": {"annotations": {"fusecache.io/datasets": "b"}}}),
    Refused("data sets away", {"metadata": {"annotations": {"fusecache.io/datasets": None}}}),
    Refused("placement", {"metadata": {"annotations": {"fusecache.io/placement": "require"}}}),
    Refused("finalizer", {"metadata": {"finalizers": ["other.io/a"]}}),
    Refused("owner", {"metadata": {"ownerReferences": [OWNER]}}),
    Refused("foreign gate", [{"op": "remove", "path": "/spec/schedulingGates/1"}], JSON),
    Refused("all gates", [{"op": "remove", "path": "/spec/schedulingGates"}], JSON),
    Refused("toleration", [{"op": "add", "path": "/spec/tolerations/-", "value": {"operator": "Exists"}}], JSON),
    Refused("deadline", {"spec": {"activeDeadlineSeconds": 1}}),
    Refused("node selector", {"spec": {"nodeSelector": {"more": "labels"}}}),
    Refused("preferred affinity", {"spec": {"affinity": PREFERRED}}),
    Refused(
        "preferred beside required",
        {"spec": {"affinity": {"nodeAffinity": {**PREFERRED["nodeAffinity"], **required("n")["nodeAffinity"]}}}},
    ),
    Refused("pod anti-affinity", {"spec": {"affinity": APART}}),
    Refused("phase", {"status": {"phase": "Failed"}}, status=True),
    Refused("condition", {"status": {"conditions": [{"type": "a", "status": "True"}]}}, status=True),
    Refused("label through status", {"metadata": {"labels": {"app": "service"}}}, status=True),
    Refused("phase with a nomination", {"status": {"phase": "Failed", "nominatedNodeName": "n"}}, status=True),
]


def waiting(world: World) -> str:
    """Name of a new pod that waits for the controller and for somebody else."""
    made = pod("waiting", GATE, "other.io/gate")
    made["metadata"]["annotations"]["other.io/there"] = "yes"
    return str(world.core.create_namespaced_pod("training", made).metadata.name)


@pytest.fixture(scope="module")
def fenced(world: World, as_controller: client.CoreV1Api) -> client.CoreV1Api:
    """As the controller, once the API server has taken the policy and the role into use."""
    name = waiting(world)

    def refused() -> bool:
        return "fusecache-fence" in patch(
            as_controller, name, {"metadata": {"labels": {"now": datetime.now().isoformat()[:10]}}}
        )

    world.wait_until(refused, "the fence refuses nothing", 60)
    return as_controller


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.what)
def test_fence_refuses_what_an_administrator_may_do(world: World, fenced: client.CoreV1Api, case: Refused) -> None:
    name = waiting(world)
    said = patch(fenced, name, case.body, case.kind, status=case.status)
    assert "ValidatingAdmissionPolicy 'fusecache-fence'" in said
    assert "fusecache's controller" in said  # refused by a rule, not by an expression that failed
    assert patch(world.core, name, case.body, case.kind, status=case.status) == ""


def test_fence_lets_a_waiting_pod_be_nominated_annotated_and_released(world: World, fenced: client.CoreV1Api) -> None:
    name = waiting(world)
    assert patch(fenced, name, {"status": {"nominatedNodeName": "simulated-000"}}, status=True) == ""
    assert patch(fenced, name, {"metadata": {"annotations": {"fusecache.io/decision": "{}"}}}) == ""
    assert patch(fenced, name, UNGATE, JSON) == ""
    # Released: what was said may be said again, and a nomination taken back, but no new one made.
    assert patch(fenced, name, {"metadata": {"annotations": {"fusecache.io/decision": None}}}) == ""
    said = patch(fenced, name, {"status": {"nominatedNodeName": "other"}}, status=True)
    assert "nominates a node for pods that wait for it only" in said
    assert patch(fenced, name, {"status": {"nominatedNodeName": None}}, status=True) == ""
    found = world.core.read_namespaced_pod(name, "training")
    assert [gate.name for gate in found.spec.scheduling_gates] == ["other.io/gate"]
    assert found.status.nominated_node_name is None


def test_fence_lets_a_waiting_pod_be_pinned_in_one_patch(world: World, fenced: client.CoreV1Api) -> None:
    name = waiting(world)
    version = world.core.read_namespaced_pod(name, "training").metadata.resource_version
    body = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/spec/affinity", "value": required("simulated-000")},
        {"op": "add", "path": "/metadata/annotations/fusecache.io~1decision", "value": "{}"},
        *UNGATE,
    ]
    assert patch(fenced, name, body, JSON) == ""
    found = world.core.read_namespaced_pod(name, "training")
    assert found.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution is not None


def test_fence_keeps_the_users_own_affinity_when_a_pod_is_pinned(world: World, fenced: client.CoreV1Api) -> None:
    made = pod("own", GATE, affinity={**PREFERRED, **APART})
    name = world.core.create_namespaced_pod("training", made).metadata.name
    only_pinned = [{"op": "add", "path": "/spec/affinity", "value": required("n")}, *UNGATE]
    assert "required node affinity only" in patch(fenced, name, only_pinned, JSON)
    both = {"nodeAffinity": {**PREFERRED["nodeAffinity"], **required("n")["nodeAffinity"]}, **APART}
    assert patch(fenced, name, [{"op": "add", "path": "/spec/affinity", "value": both}, *UNGATE], JSON) == ""


def test_fence_leaves_pods_alone_that_do_not_wait_for_the_controller(world: World, fenced: client.CoreV1Api) -> None:
    name = world.core.create_namespaced_pod("training", pod("foreign", "other.io/gate")).metadata.name
    pinned = {"spec": {"affinity": required("simulated-000")}}
    assert "required node affinity only" in patch(fenced, name, pinned)
    assert patch(world.core, name, pinned) == ""
    said = patch(fenced, name, {"status": {"nominatedNodeName": "simulated-000"}}, status=True)
    assert "nominates a node for pods that wait for it only" in said


def test_controller_may_not_touch_pods_of_a_namespace_that_did_not_opt_in(
    world: World, fenced: client.CoreV1Api
) -> None:
    name = world.core.create_namespaced_pod("opted-out", pod("there", GATE)).metadata.name
    with pytest.raises(client.ApiException) as caught:
        fenced.patch_namespaced_pod(name, "opted-out", UNGATE, _content_type=JSON)
    assert caught.value.status == 403
    assert fenced.read_namespaced_pod(name, "opted-out").metadata.name == name


# --- the gate ----------------------------------------------------------------------------------------------------


def set_lease(world: World, *, age_s: float, duration_s: int = 15, holder: str = "somebody") -> None:
    """The controller's Lease as if it had been renewed `age_s` seconds ago."""
    renewed = (datetime.now(UTC) - timedelta(seconds=age_s)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration_s, "renewTime": renewed, "acquireTime": renewed}
    metadata = {"name": "fusecache-controller", "namespace": "fusecache"}
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
    world.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(lease))


def remove_lease(world: World) -> None:
    world.kubectl("delete", "lease", "-n", "fusecache", "fusecache-controller", "--ignore-not-found")


def gates_of_a_new_pod(world: World, namespace: str = "training", **changes: Any) -> list[str]:
    """Scheduling gates of a pod that is created now and taken away again."""
    body = pod("new", **({"labels": LABELED} | changes))
    made = world.core.create_namespaced_pod(namespace, body)
    world.core.delete_namespaced_pod(made.metadata.name, namespace, grace_period_seconds=0)
    return [gate.name for gate in made.spec.scheduling_gates or ()]


def wait_gated(world: World, wanted: bool) -> None:
    """Until new pods are (not) gated: the API server learns of a changed Lease a moment later."""
    expected = [GATE] if wanted else []
    world.wait_until(lambda: gates_of_a_new_pod(world) == expected, f"new pods do not have gates {expected}", 60)


@pytest.fixture
def fresh(world: World) -> None:
    set_lease(world, age_s=0, duration_s=3600)
    wait_gated(world, True)


STALE: dict[str, Callable[[World], None]] = {
    "not renewed in time": lambda world: set_lease(world, age_s=16, duration_s=15),
    "given up": lambda world: set_lease(world, age_s=0, duration_s=3600, holder=""),
    "from the future": lambda world: set_lease(world, age_s=-600, duration_s=15),
    "missing": remove_lease,
}


@pytest.mark.parametrize("why", STALE)
@pytest.mark.usefixtures("fresh")
def test_gate_is_gone_when_the_lease_is(world: World, why: str) -> None:
    STALE[why](world)
    wait_gated(world, False)
    assert gates_of_a_new_pod(world) == []
    set_lease(world, age_s=0, duration_s=3600)
    wait_gated(world, True)


@pytest.mark.usefixtures("fresh")
def test_gate_is_for_labelled_pods_of_opted_in_namespaces_that_have_no_node(world: World) -> None:
    assert gates_of_a_new_pod(world, labels={}) == []
    assert gates_of_a_new_pod(world, labels={"fusecache.io/co-schedule": "false"}) == []
    assert gates_of_a_new_pod(world, "opted-out") == []
    assert gates_of_a_new_pod(world, nodeName="simulated-000", nodeSelector={}) == []
    assert gates_of_a_new_pod(world, schedulingGates=[{"name": "other.io/gate"}]) == ["other.io/gate", GATE]
    assert gates_of_a_new_pod(world, schedulingGates=[{"name": GATE}]) == [GATE]
    assert gates_of_a_new_pod(world) == [GATE]  # all the while


@pytest.mark.usefixtures("fresh")
def test_gate_is_on_the_pods_of_the_example_jobs(world: World) -> None:
    for namespace in ("training", "training-restricted"):
        world.kubectl("delete", "job", "-n", namespace, "train", "--wait=true")
        apply(world, DEPLOY / "examples" / namespace)

        def gated(namespace: str = namespace) -> bool:
            pods = world.core.list_namespaced_pod(namespace, label_selector="job-name=train").items
            return [[gate.name for gate in pod.spec.scheduling_gates or ()] for pod in pods] == [[GATE]]

        world.wait_until(gated, f"the Job's pod in {namespace} is not gated", 60)


@pytest.mark.usefixtures("fresh")
def test_pod_gated_by_a_controller_that_went_away_is_freed_by_the_command_of_the_readme(world: World) -> None:
    name = world.core.create_namespaced_pod("training", pod("left", labels=LABELED)).metadata.name
    command = next(
        line.strip().removeprefix("kubectl ").replace("POD", name)
        for line in (DEPLOY.parent / "README.md").read_text().splitlines()
        if "schedulingGates" in line and line.strip().startswith("kubectl ")
    )
    world.kubectl(*shlex.split(command))
    assert not world.core.read_namespaced_pod(name, "training").spec.scheduling_gates
